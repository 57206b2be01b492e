"""The tensors of a model folder's weight files: safetensors, or pickles that contain nothing but tensors."""

from collections.abc import Mapping
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bert_pretrain.errors import DataError
from bert_pretrain.model.folder import REMEDY, broken_weights, weight_files


def read_weights(folder: Path, flag: str) -> dict[str, Tensor]:
    """Return the tensors of a folder under their names there, on the CPU."""
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder, flag):
        tensors.update(_read_file(path))
    return tensors


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write one safetensors file with the permissions of any new file.

    Safetensors itself writes to a private temporary file, whose permissions the model would keep.
    """
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(mode)


def _read_file(path: Path) -> dict[str, Tensor]:
    if path.suffix != ".safetensors":
        return read_pickle(path)
    try:
        return load_file(path)
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise broken_weights(path, error) from error


def read_pickle(path: Path) -> dict[str, Tensor]:
    """Read a pickle of plain tensors; any other pickle could run code and is refused."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the bytes of a broken pickle may do anything but run code
        raise DataError(
            f"{path.name} is broken or holds more than tensors, and was not unpickled",
            where=str(path),
            remedy="convert it to model.safetensors if you trust it",
        ) from error
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in found.items()
    ):
        raise DataError(f"{path.name} holds more than named tensors", where=str(path), remedy=REMEDY)
    return found
