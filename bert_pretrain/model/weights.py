"""The weight files of a model folder: one or more, safetensors or pickles that contain nothing but tensors.

They are looked for in the same order as by `transformers`; of several files, an index names them all.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import safetensors
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from bert_pretrain.errors import DataError
from bert_pretrain.storage.files import read_json, sha256_file

WEIGHTS = "model.safetensors"
PICKLED_WEIGHTS = "pytorch_model.bin"
_INDEX = ".index.json"
REMEDY = f"name a folder that holds a BERT: config.json with {WEIGHTS} or {PICKLED_WEIGHTS}, in one file or several"


def weights_sha256(folder: Path, flag: str) -> str:
    """Return the SHA-256 of a folder's weights; for several files, that of their SHA-256s in order.

    Raises:
        DataError: when there are none.
    """
    sums = [sha256_file(path) for path in _weight_files(folder, flag)]
    return sums[0] if len(sums) == 1 else hashlib.sha256("".join(sums).encode()).hexdigest()


def read_weights(folder: Path, flag: str) -> dict[str, Tensor]:
    """Return the tensors of a folder under their names there, on the CPU.

    Raises:
        DataError: when there are none, or a file is missing, broken or holds more than tensors.
    """
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(folder, flag):
        tensors.update(_read_file(path))
    return tensors


def read_shapes(folder: Path, flag: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a folder's tensors under their names there; of safetensors only the header is read.

    Raises:
        DataError: as `read_weights`.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in _weight_files(folder, flag):
        if path.suffix != ".safetensors":
            shapes |= {name: tuple(tensor.shape) for name, tensor in _read_pickle(path).items()}
            continue
        try:
            with safe_open(path, "pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise _broken(path, error) from error
    return shapes


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write one safetensors file with the permissions of any new file.

    Safetensors itself writes to a private temporary file, whose permissions the model would keep.
    """
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(mode)


def _weight_files(folder: Path, flag: str) -> list[Path]:
    """Return the files that hold a folder's weights; safetensors before a pickle."""
    for name in (WEIGHTS, PICKLED_WEIGHTS):
        if (folder / name).is_file():
            return [folder / name]
        if (folder / f"{name}{_INDEX}").is_file():
            return _parts(folder / f"{name}{_INDEX}")
    raise DataError(f"{folder} has neither {WEIGHTS} nor {PICKLED_WEIGHTS}", where=flag, remedy=REMEDY)


def _parts(index: Path) -> list[Path]:
    """Return the files that an index names, which must be in its folder."""
    found = read_json(index)
    weight_map = found.get("weight_map") if isinstance(found, dict) else None
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise DataError(f"{index.name} names no files in its folder", where=str(index), remedy="copy the folder again")
    files = sorted({index.parent / name for name in names})
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(files)} files of weights are missing: {', '.join(missing[:3])}",
            where=str(index),
            remedy="copy the folder again",
        )
    return files


def _read_file(path: Path) -> dict[str, Tensor]:
    if path.suffix != ".safetensors":
        return _read_pickle(path)
    try:
        return load_file(path)
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise _broken(path, error) from error


def _broken(path: Path, error: Exception) -> DataError:
    return DataError(f"{path.name} is broken: {error}", where=str(path), remedy="copy it again")


def _read_pickle(path: Path) -> dict[str, Tensor]:
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
