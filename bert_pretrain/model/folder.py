"""Read and check model folders, and compare vocabularies with them. Only pickles and the values of weights need torch.

Weight files are searched in the same order as in `transformers`: safetensors before pickles, one file before an index.
"""

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import safe_open

from bert_pretrain.config import ModelConfig
from bert_pretrain.errors import ConfigError, DataError, first_problem
from bert_pretrain.io.files import CHECKSUMS, damage_of_folder, has_checksums, read_json, sha256_file
from bert_pretrain.model.architectures import current_name, expected_shapes, model_settings
from bert_pretrain.text.tokenizer import Extension, Tokenizer, find_extension
from bert_pretrain.text.tokenizer_folder import (
    FILES,
    TOKENIZER,
    Definition,
    TextRules,
    has_vocabulary,
    read_tokenizer_folder,
)

CARD = "README.md"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
GENERATOR = "generator"  # folder of ELECTRA's generator, next to that of its discriminator
GENERATOR_WEIGHTS = "generator.safetensors"  # in a checkpoint
PICKLED_WEIGHTS = "pytorch_model.bin"
PRETRAINING = "pretraining"  # key of `config.json` that describes our pretraining; fine-tuning keeps it
TRAINED_LENGTH = "max_seq_length"  # its key for the number of tokens of the longest training examples
_REMEDY = (
    f"name a folder with a BERT: {CONFIG}, and {WEIGHTS} or {PICKLED_WEIGHTS} in one file or several; or a model on "
    "the Hub with its owner, such as google-bert/bert-base-uncased"
)
_REMEDY_FOR_GOOGLE = (  # its folders have bert_config.json and bert_model.ckpt.*; some with PyTorch weights have both
    "name the same model on the Hub, such as google-bert/bert-base-uncased, or convert the TensorFlow checkpoint to "
    'PyTorch with transformers 4; then rename bert_config.json to config.json, and add "model_type": "bert" to it'
)


def damage_of_model(folder: Path, *, verify_hashes: bool = True) -> str | None:
    """Describe the damage of a folder that `save_model_folder` wrote, or return None.

    Compares the SHA-256 of each file with `verify_hashes`, otherwise only its size.
    """
    return damage_of_folder(folder, {CONFIG, WEIGHTS, *FILES}, check_hashes=verify_hashes)


def check_model(folder: Path, flag: str, *, verify_hashes: bool = True) -> None:
    """Raise `DataError` if a model folder with checksums is damaged."""
    if has_checksums(folder) and (damage := damage_of_model(folder, verify_hashes=verify_hashes)):
        raise DataError(
            f"{folder} is damaged: {damage}",
            where=flag,
            remedy=f"copy or write the folder again; if you changed it on purpose, remove its {CHECKSUMS}",
        )


def read_config(folder: Path, flag: str) -> tuple[ModelConfig, int]:
    """Return the model configuration and the vocabulary size from a folder's `config.json`."""
    if not (folder / CONFIG).is_file():
        what = f"{folder} has no {CONFIG}" if folder.is_dir() else f"there is no folder '{folder}'"
        is_from_google = (folder / "bert_config.json").exists()
        raise DataError(what, where=flag, remedy=_REMEDY_FOR_GOOGLE if is_from_google else _REMEDY)
    content = read_json(folder / CONFIG)
    where = str(folder / CONFIG)
    vocab_size = content.get("vocab_size") if isinstance(content, dict) else None
    if type(vocab_size) is not int or vocab_size < 1:
        raise DataError("vocab_size is missing or invalid", where=where, remedy=_REMEDY)
    try:
        settings = model_settings(content)
    except ValueError as error:
        raise DataError(str(error), where=where, remedy=_REMEDY) from error
    try:
        config = ModelConfig.model_validate(settings, strict=True)
    except ValidationError as error:
        raise DataError(first_problem(error), where=where, remedy="correct it, or name another folder") from error
    _check_sizes(config, vocab_size, folder, flag)
    return config, vocab_size


def _check_sizes(
    config: ModelConfig,
    vocab_size: int,
    folder: Path,
    flag: str,
) -> None:
    """Compare the sizes in `config.json` with the weights, so that wrong sizes cannot allocate a huge model."""
    weights = read_weights(folder, flag, only_shapes=True)
    shapes = {current_name(name, config.architecture): shape for name, shape in weights.items()}
    expected = expected_shapes(config, vocab_size, num_layers=min(config.num_hidden_layers, len(shapes)))
    for name, shape in expected.items():
        if name not in shapes:
            what, remedy = f"{folder} has no tensor {name}, which a BERT with the sizes in its {CONFIG} needs", _REMEDY
            if wrapped := [other for other in shapes if other.endswith(name.partition(".")[2])]:
                what += f", but {wrapped[0]}"
                remedy = "save the model without its wrapper (of DataParallel: model.module), or rename the tensors"
            raise DataError(what, where=flag, remedy=remedy)
        check_shape(
            name,
            shapes[name],
            shape,
            folder,
            flag,
        )


def lengths(folder: Path) -> tuple[int, int]:
    """Return the number of tokens for which a model is trained, and the number of its positions.

    The first is the length of the examples if this package trained the model. Otherwise both are equal.
    """
    content = read_json(folder / CONFIG)
    positions, record = content.get("max_position_embeddings", 512), content.get(PRETRAINING)
    length = record.get(TRAINED_LENGTH) if isinstance(record, dict) else None
    return length if type(length) is int and 3 <= length <= positions else positions, positions


def length_limit(folder: Path, max_length: int | None) -> int:
    """Return the maximum number of tokens to read: `--max-length`, by default the trained length.

    Raise `ConfigError` if the model has fewer positions. Warn if the last of them are not trained.
    """
    trained, positions = lengths(folder)
    if max_length is None:
        return trained
    if not 3 <= max_length <= positions:
        raise ConfigError(
            f"the maximum length is {max_length}, the model {folder} has {positions} positions",
            where="--max-length",
            remedy=f"set it to 3 to {positions} tokens, including [CLS] and [SEP]",
        )
    if max_length > trained:
        hint = "leave it out, or train the model on longer examples"
        what = f"--max-length is {max_length}, but the model is trained for {trained} tokens"
        print(f"warning: {what}\n  hint: {hint}", file=sys.stderr)
    return max_length


def weights_sha256(folder: Path, flag: str) -> str:
    """Return the SHA-256 of a folder's weight file. For several files, hash the concatenation of their SHA-256s.

    It is that of the folder's checksums, if there are any: `check_model` has compared them.
    """
    if has_checksums(folder) and (recorded := read_json(folder / CHECKSUMS).get(WEIGHTS)):
        return str(recorded["sha256"])
    sums = [sha256_file(path) for path in weight_files(folder, flag)]
    return sums[0] if len(sums) == 1 else hashlib.sha256("".join(sums).encode()).hexdigest()


def read_weights(folder: Path, flag: str, *, only_shapes: bool = False) -> dict[str, Any]:
    """Return a folder's tensors by their names on disk, on the CPU, or with `only_shapes` their shapes.

    Shapes are read from the headers of safetensors. A pickle of more than tensors is refused, because it could run
    code.
    """
    weights: dict[str, Any] = {}
    for path in weight_files(folder, flag):
        try:
            weights |= _read_weights(path, only_shapes)
        except Exception as error:  # a broken pickle can raise any exception
            raise DataError(
                f"{path.name} is broken, or a pickle of more than tensors, which is not unpickled",
                where=str(path),
                remedy=f"copy it again; if you trust a pickle, convert it to {WEIGHTS}",
            ) from error
    return weights


def _read_weights(path: Path, only_shapes: bool) -> dict[str, Any]:
    is_pickle = path.suffix != ".safetensors"
    if only_shapes and not is_pickle:
        with safe_open(path, "np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    import torch
    from safetensors.torch import load_file

    tensors = torch.load(path, map_location="cpu", weights_only=True) if is_pickle else load_file(path)
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise TypeError("not a dict of tensors")
    return {str(name): tuple(tensor.shape) if only_shapes else tensor for name, tensor in tensors.items()}


def weight_files(folder: Path, flag: str) -> list[Path]:
    """Return the files with a folder's weights."""
    for name in (WEIGHTS, PICKLED_WEIGHTS):
        if (folder / name).is_file():
            return [folder / name]
        if (folder / f"{name}.index.json").is_file():
            return _indexed_files(folder / f"{name}.index.json")
    raise DataError(f"{folder} has neither {WEIGHTS} nor {PICKLED_WEIGHTS}", where=flag, remedy=_REMEDY)


def _indexed_files(index: Path) -> list[Path]:
    """Return the weight files that an index lists. Raise `DataError` if one is missing or in another folder."""
    remedy = "copy the folder again"
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
        if not names or any(Path(name).name != name for name in names):
            raise ValueError
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{index.name} names no files in its folder", where=str(index), remedy=remedy) from error
    files = [index.parent / name for name in names]
    missing = [path.name for path in files if not os.path.isfile(path)]  # Path.is_file fails for very long names
    if missing:
        raise DataError(
            f"{len(missing)} of {len(files)} weight files are missing: {', '.join(missing[:3])}",
            where=str(index),
            remedy=remedy,
        )
    return files


def check_shape(
    name: str,
    shape: tuple[int, ...],
    expected: tuple[int, ...],
    folder: Path,
    flag: str,
) -> None:
    if shape != expected:
        raise DataError(
            f"the tensor {name} has the shape {str(shape)[:80]}, the model needs {str(expected)[:80]}",
            where=f"{flag} {folder}",
            remedy=f"correct the sizes in that folder's {CONFIG}, and use data made with its tokenizer",
        )


def match_vocabulary(folder: Path, tokenizer: Tokenizer, flag: str) -> Extension | None:
    """Return how a tokenizer extends the vocabulary of a model folder, or None if the folder has no vocabulary.

    If both vocabularies are equal, the extension has no pieces.

    Raise `DataError` if the tokenizer does not extend the vocabulary, or if the two tokenizers treat text differently.
    """
    if not has_vocabulary(folder):
        return None
    old = read_tokenizer_folder(folder, flag)
    extension = find_extension(old.tokens, tokenizer.tokens)
    if extension is None or (old.definition is not None and extension.pieces):
        what = f"the vocabulary of {folder} differs from the vocabulary of the data"
        remedy = "make the data with --vocab and this model's folder, or a folder that 'vocab --extend' made from it; "
        remedy += "or use a model trained on such data"
        raise DataError(what, where=flag, remedy=remedy)
    theirs = _effects(old.rules, old.definition)
    ours = _effects(tokenizer.rules, getattr(tokenizer, "definition", None))
    differences = [f"{name} {theirs[name]} and {ours[name]}" for name in theirs if theirs[name] != ours[name]]
    if differences:
        raise DataError(
            f"the tokenizers of {folder} and of the data treat text differently: {', '.join(differences)}",
            where=flag,
            remedy="make the data with --vocab and this model's folder",
        )
    return extension


def _effects(rules: TextRules, definition: Definition | None) -> dict[str, Any]:
    """Return the effects of rules on text. Without a casing, a folder states only the first ones."""
    effects: dict[str, Any] = {"whole words": rules.whole_words, "clusters": rules.split_clusters}
    effects[TOKENIZER] = None if definition is None else definition.effect[:8]
    if rules.lowercase is not None:
        effects["do_lower_case"] = rules.lowercase
        effects["strip_accents"] = rules.strips_accents
        effects["tokenize_chinese_chars"] = rules.handle_chinese_chars
    return effects


def check_rows(
    folder: Path,
    num_rows: int,
    tokenizer: Tokenizer,
    flag: str,
) -> None:
    """Raise `DataError` if a word embedding has fewer rows than a vocabulary has tokens.

    More rows are an error only if the model folder has no vocabulary. Otherwise they pad the embedding to a round
    number, and stay in the softmax, as in `transformers`.
    """
    if num_rows < tokenizer.vocab_size or (num_rows > tokenizer.vocab_size and not has_vocabulary(folder)):
        raise DataError(
            f"the model has {num_rows} tokens, the vocabulary {tokenizer.vocab_size}",
            where=f"{flag} {folder}",
            remedy="put the model's vocab.txt there, or use data made with the model's tokenizer folder",
        )


def check_same_vocabulary(folder: Path, tokenizer: Tokenizer, flag: str) -> None:
    """Raise `DataError` if a model folder has a vocabulary other than the tokenizer's."""
    extension = match_vocabulary(folder, tokenizer, flag)
    if extension is not None and extension.pieces:
        raise DataError(
            f"the vocabulary of the data extends the vocabulary of {folder} by {len(extension.pieces)} tokens",
            where=flag,
            remedy="make data with --vocab and this model's folder, or use a model trained on such data",
        )
