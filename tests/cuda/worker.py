"""Functions for the process with the fake CUDA device. This module must not import torch before `load`."""

import ctypes
import importlib
from typing import Any


def load(library: str) -> None:
    ctypes.CDLL(library)


def call(name: str, *arguments: object) -> Any:
    """Call `module.function` of this package, after a reset of the compiler."""
    module, _, function = name.partition(".")
    imported = importlib.import_module(f"tests.cuda.{module}")
    importlib.import_module("torch._dynamo").reset()
    return getattr(imported, function)(*arguments)
