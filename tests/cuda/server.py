"""What runs in the process with the pretended device. The library must be loaded before torch, which is not here."""

import ctypes
import importlib
from typing import Any


def load(library: str) -> None:
    ctypes.CDLL(library)


def call(what: str, *arguments: object) -> Any:
    """Call a function of a module here, `module.function`, with nothing compiled before."""
    module, _, function = what.partition(".")
    found = getattr(importlib.import_module(f"tests.cuda.{module}"), function)
    importlib.import_module("torch._dynamo").reset()
    return found(*arguments)
