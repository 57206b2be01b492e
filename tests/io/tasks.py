"""Tasks of worker processes. They are in a module of their own, so that workers need not import torch."""

import errno
import os
import signal
import time
from pathlib import Path

from bert_pretrain.errors import UserError


def square(number: int) -> tuple[int, set[int]]:
    time.sleep(0.05 * (3 - number % 3))  # later tasks finish earlier
    return number * number, signal.pthread_sigmask(signal.SIG_BLOCK, set())


def write_id_and_wait(_: int) -> None:
    os.write(1, b"%d\n" % os.getpid())  # one write, because the workers share the pipe
    time.sleep(120)


def break_a_pipe(_: int) -> None:
    raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def fail_at_1(path: Path) -> None:
    if path.name == "1":
        raise UserError("no", where="task 1", remedy="none")
    time.sleep(20)
    path.touch()


def kill_worker_at_1(number: int) -> int:
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number
