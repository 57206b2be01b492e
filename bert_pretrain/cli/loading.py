"""Functions shared by several commands: imports inside a command, and the model and configuration for inference."""

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
    """Return the seconds since this module was imported, just after the interpreter started."""
    return time.monotonic() - STARTED


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Block signals while a command imports modules, because an interrupted import may leave a module broken.

    Also import pandas, which pyarrow would otherwise import at its first use, with signals enabled.
    """
    with blocked_signals():
        with contextlib.suppress(ImportError):
            import pandas  # type: ignore[import-untyped]  # noqa: F401
        yield


@contextlib.contextmanager
def blocked_signals() -> Iterator[None]:
    """Block stop signals; they arrive when the context ends. Imports without pyarrow need only this."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def bert_folder(model: Path, flag: str = "MODEL") -> Path:
    """Return the local folder of a BERT model, after checks of its files that need no torch."""
    with blocked_signals():
        from bert_pretrain.model.folder import CONFIG, check_model, read_config
        from bert_pretrain.model.hub import model_folder
    folder = model_folder(model, flag)
    if (folder / CONFIG).exists() or not (folder / "modules.json").exists():  # sentence-transformers uses subfolders
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
