"""Libraries that only an extra of the package installs, such as `bert-pretrain[plot]`."""

import importlib
from typing import Any

from bert_pretrain.errors import ConfigError


def import_extra(module: str, extra: str, purpose: str, *, where: str, otherwise: str = "") -> Any:
    """Import a module that an extra of `bert-pretrain` installs; `purpose` is what needs it, such as "pictures"."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        what = f"{(error.name or module).partition('.')[0]} is not installed, and {purpose} need it"
        raise ConfigError(what, where=where, remedy=f"pip install 'bert-pretrain[{extra}]'{otherwise}") from error
