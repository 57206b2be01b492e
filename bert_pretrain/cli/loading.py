"""Code that commands share: imports at the call, so that `--help` is instant, and the configuration from flags."""

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bert_pretrain.config import Config

STARTED = time.monotonic()


def seconds_since_start() -> float:
    """Return how long this command has run, the start of the interpreter left out."""
    return time.monotonic() - STARTED


@contextlib.contextmanager
def importing(*, with_pandas: bool = True) -> Iterator[None]:
    """Hold signals back while a command imports what it needs: one that interrupts an import may be lost or break it.

    With `with_pandas` pandas, too, which pyarrow otherwise imports at its first use, whenever that is.
    """
    with held_signals():
        if with_pandas:
            with contextlib.suppress(ImportError):
                import pandas  # type: ignore[import-untyped]  # noqa: F401
        yield


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Let signals wait that would end this process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def bert_folder(model: Path, flag: str = "MODEL") -> Path:
    """Return the folder of a BERT, refused before torch is imported if its sizes, headers or checksums are wrong."""
    with importing(with_pandas=False):
        from bert_pretrain.model.folder import CONFIG, check_model, read_config
        from bert_pretrain.model.hub import model_folder
    folder = model_folder(model, flag)
    if (folder / CONFIG).exists() or not (folder / "modules.json").exists():  # in which modules may have own folders
        check_model(folder, flag, verify_hashes=False)
        read_config(folder, flag)
    return folder


def inference_config(
    device: str, precision: str, text_field: str | None = None, encoding: str | None = None
) -> "Config":
    """Return the configuration of a command that uses a model."""
    from bert_pretrain.config_file import load_config

    flags = {
        "train.device": ("--device", device),
        "train.precision": ("--precision", precision),
        "data.text_field": ("--text-field", text_field),
        "data.encoding": ("--encoding", encoding),
    }
    return load_config(flags=flags)
