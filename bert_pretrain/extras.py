"""Libraries that only an extra of the package installs, such as `bert-pretrain[plot]`."""

import importlib
from typing import Any

from bert_pretrain.errors import ConfigError


def import_extra(module: str, extra: str, purpose: str, *, where: str) -> Any:
    """Import a module that an extra installs.

    Args:
        module: its name.
        extra: the extra of `bert-pretrain` that installs it.
        purpose: what needs it, for the message, such as "pictures".
        where: the flag or key that asked for it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        what = f"{(error.name or module).partition('.')[0]} is not installed, and {purpose} need it"
        raise ConfigError(what, where=where, remedy=f"pip install 'bert-pretrain[{extra}]'") from error
