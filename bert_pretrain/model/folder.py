"""What a model folder holds: sizes from `config.json`, shapes and checksums, all without torch; and its weights.

In the same order as by `transformers`: one file or several with an index, safetensors or pickles.
"""

import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors
from pydantic import ValidationError
from safetensors import safe_open

from bert_pretrain.config import ModelConfig
from bert_pretrain.errors import DataError, first_problem
from bert_pretrain.io.files import CHECKSUMS, damage_of_folder, is_sealed, read_json, sha256_file
from bert_pretrain.text.tokenizer_folder import FILES

if TYPE_CHECKING:
    from torch import Tensor

CARD = "README.md"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
PICKLED_WEIGHTS = "pytorch_model.bin"
_INDEX = ".index.json"
REMEDY = f"name a folder that holds a BERT: {CONFIG} with {WEIGHTS} or {PICKLED_WEIGHTS}, in one file or several"
WORD_EMBEDDINGS = "bert.embeddings.word_embeddings.weight"
POSITIONS = "bert.embeddings.position_embeddings.weight"


def damage_of_model(folder: Path, *, whole: bool = True) -> str | None:
    """Return how a model that `save_tensors` has written was damaged; None if it was not.

    Without `whole`, only sizes are compared.
    """
    return damage_of_folder(folder, {CONFIG, WEIGHTS, *FILES}, check_hashes=whole)


def check_model(folder: Path, flag: str, *, whole: bool = True) -> None:
    """Compare the bytes of a model folder, or without `whole` their number, with its checksums, if it has any."""
    damage = damage_of_model(folder, whole=whole) if is_sealed(folder) else None
    if damage:
        remedy = "copy it again, or run the command that wrote it again; after a change of your own, remove its "
        raise DataError(f"{folder} is damaged: {damage}", where=flag, remedy=remedy + CHECKSUMS)


def read_config(folder: Path, flag: str) -> tuple[ModelConfig, int]:
    """Return the model configuration and the size of the vocabulary from a folder's `config.json`."""
    if not (folder / CONFIG).is_file():
        missing = f"{folder} has no {CONFIG}" if folder.is_dir() else f"there is no folder '{folder}'"
        raise DataError(missing, where=flag, remedy=REMEDY)
    found = read_json(folder / CONFIG)
    where = str(folder / CONFIG)
    vocab_size = found.get("vocab_size") if isinstance(found, dict) else None
    if type(vocab_size) is not int or vocab_size < 1:
        raise DataError("it states no vocab_size", where=where, remedy=REMEDY)
    required = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False}
    for key, value in required.items():
        if found.get(key, value) != value:
            what = f"{key} is {str(found[key])[:80]!r}; only BERT with {value!r} is supported"
            raise DataError(what, where=where, remedy=REMEDY)
    try:
        given = {key: found[key] for key in ModelConfig.model_fields if key in found}
        config = ModelConfig.model_validate(given, strict=True)
    except ValidationError as error:
        raise DataError(first_problem(error), where=where, remedy="correct it, or name another folder") from error
    _check_sizes(config, vocab_size, folder, flag)
    return config, vocab_size


def _check_sizes(config: ModelConfig, vocab_size: int, folder: Path, flag: str) -> None:
    """Compare sizes with the weights before anything is built: then a model is no larger than its file."""
    shapes = {current_name(name): shape for name, shape in read_weights(folder, flag, only_shapes=True).items()}
    hidden = config.hidden_size
    demanded = {
        WORD_EMBEDDINGS: (vocab_size, hidden),
        POSITIONS: (config.max_position_embeddings, hidden),
        "bert.embeddings.token_type_embeddings.weight": (config.type_vocab_size, hidden),
    }
    for number in range(min(config.num_hidden_layers, len(shapes))):
        layer = f"bert.encoder.layer.{number}"
        demanded[f"{layer}.attention.self.query.weight"] = (hidden, hidden)
        demanded[f"{layer}.intermediate.dense.weight"] = (config.intermediate_size, hidden)
    for name, shape in demanded.items():
        if name not in shapes:
            what = f"{folder} holds no {name}, which a BERT of the sizes in its {CONFIG} has"
            raise DataError(what, where=flag, remedy=REMEDY)
        check_shape(name, shapes[name], shape, folder, flag)


def weights_sha256(folder: Path, flag: str) -> str:
    """Return the SHA-256 of a folder's weights; for several files, that of their SHA-256s in order."""
    sums = [sha256_file(path) for path in weight_files(folder, flag)]
    return sums[0] if len(sums) == 1 else hashlib.sha256("".join(sums).encode()).hexdigest()


def read_weights(folder: Path, flag: str, *, only_shapes: bool = False) -> dict[str, Any]:
    """Return a folder's tensors under their names there, on the CPU.

    With `only_shapes` their shapes instead, for which of safetensors no more than the header is read.
    """
    found: dict[str, Any] = {}
    for path in weight_files(folder, flag):
        if path.suffix != ".safetensors":
            tensors = read_pickle(path)
            found |= {name: tuple(tensor.shape) for name, tensor in tensors.items()} if only_shapes else tensors
            continue
        try:
            if only_shapes:
                with safe_open(path, "np") as file:
                    found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            else:
                from safetensors.torch import load_file

                found |= load_file(path)
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            what = f"{path.name} is broken: {error}"
            raise DataError(what, where=str(path), remedy="copy it again") from error
    return found


def read_pickle(path: Path) -> "dict[str, Tensor]":
    """Read a pickle of plain tensors; any other pickle could run code and is refused."""
    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        if all(isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in found.items()):
            return found
        cause = None
    except Exception as error:  # the bytes of a broken pickle may do anything but run code
        cause = error
    what = f"{path.name} is broken or holds more than named tensors, and was not unpickled"
    raise DataError(what, where=str(path), remedy="convert it to model.safetensors if you trust it") from cause


def weight_files(folder: Path, flag: str) -> list[Path]:
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
    what, files = f"{index.name} names no files in its folder", []
    if names and all(isinstance(name, str) and Path(name).name == name for name in names):
        files = sorted({index.parent / name for name in names})
        missing = [path.name for path in files if not os.path.isfile(path)]  # unlike Path, for names of any length
        if not missing:
            return files
        what = f"{len(missing)} of {len(files)} files of weights are missing: {', '.join(missing[:3])}"
    raise DataError(what, where=str(index), remedy="copy the folder again")


def check_shape(name: str, found: tuple[int, ...], needed: tuple[int, ...], folder: Path, flag: str) -> None:
    if found != needed:
        what = f"the tensor {name} has the shape {str(found)[:80]}, the model needs {str(needed)[:80]}"
        remedy = f"correct the sizes in that folder's {CONFIG}, and use data of its tokenizer"
        raise DataError(what, where=f"{flag} {folder}", remedy=remedy)


def current_name(name: str) -> str:
    name = re.sub(r"\bLayerNorm\.gamma$", "LayerNorm.weight", name)
    name = re.sub(r"\bLayerNorm\.beta$", "LayerNorm.bias", name)
    # A bare BertModel is saved without the prefix.
    return f"bert.{name}" if re.match(r"(embeddings|encoder|pooler)\.", name) else name
