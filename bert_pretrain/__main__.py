"""The program: `bert-pretrain` and `python -m bert_pretrain` are the same; `torchrun -m` needs the second form."""

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> None:
    """Run the command line; Ctrl-C while its libraries are imported ends the process at once."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a training obeys it from its first step on
    from bert_pretrain.cli import main as run

    run()


def _leave(_signal: int, _frame: object) -> "NoReturn":
    # An exception could be lost in an import, and nothing is open yet.
    os.write(2, b"interrupted; nothing was begun\n")
    os._exit(130)


if __name__ == "__main__":
    main()
