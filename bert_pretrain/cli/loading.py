"""What commands import at their call, not before, so that `--help` answers at once."""

import importlib
import importlib.util
import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bert_pretrain.config import Config

_WITHOUT_PANDAS = ("bert_pretrain.vocab", "bert_pretrain.make_data")


def load(module: str, name: str) -> Any:
    """Import what a command needs, with signals held back: inside a half-made import one would be lost, or break it."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        if not module.startswith(_WITHOUT_PANDAS) and importlib.util.find_spec("pandas"):
            importlib.import_module("pandas")  # pyarrow loads it at its first use, whenever that is
        return getattr(importlib.import_module(module), name)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def load_config(
    source: str | None,
    settings: list[str] | None,
    flags: Mapping[str, tuple[str, object]] | None = None,
    *,
    with_phases: bool = True,
) -> "Config":
    """Read the configuration that the flags of a command describe."""
    from bert_pretrain.config import load_config as read_config

    return read_config(source, settings or (), flags, with_phases=with_phases)
