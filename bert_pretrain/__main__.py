"""Entry point of `bert-pretrain`, `python -m bert_pretrain` and `torchrun -m bert_pretrain`."""

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> None:
    """Run the command line. Ctrl-C during the imports exits immediately."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # its default is to kill; training handles it later
    from bert_pretrain.cli import main as run

    run()


def _leave(_signal: int, _frame: object) -> "NoReturn":
    # A library could swallow a KeyboardInterrupt while it is imported. No file is open yet.
    os.write(2, b"interrupted; nothing was started\n")
    os._exit(130)


if __name__ == "__main__":
    main()
