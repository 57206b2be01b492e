"""How a folder of `sentence-transformers` makes a vector of a text: its pooling, normalization and maximal length."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_pretrain.errors import DataError
from bert_pretrain.io.files import read_json
from bert_pretrain.model.hub import SENTENCE_FILES

MODULES, _LENGTH, _PROMPTS = SENTENCE_FILES
_TRANSFORMER, _POOLING, _NORMALIZE = "Transformer", "Pooling", "Normalize"
# The names of the flags in older folders.
_OLD_MODES = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
_MODES = ("cls", "mean")
_REMEDY = "name the vectors of its BERT alone, such as --pooling mean, or use the library sentence-transformers"


@dataclass(frozen=True)
class SentenceModel:
    """What the folder says."""

    pooling: str
    """`cls` or `mean`."""
    is_normalized: bool
    """Whether vectors are divided by their length."""
    max_length: int | None
    """In tokens, [CLS] and [SEP] included; None: as many as the model has positions."""


def read_sentence_model(folder: Path) -> SentenceModel | None:
    """Return what a folder of `sentence-transformers` says; None for any other folder."""
    if not (folder / MODULES).is_file():
        return None
    modules = read_json(folder / MODULES)
    try:
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        paths = [str(module["path"]) for module in modules]
    except (KeyError, TypeError) as error:
        what, remedy = "it is no list of modules with type and path", "restore the file from a copy"
        raise DataError(what, where=str(folder / MODULES), remedy=remedy) from error
    if kinds not in ([_TRANSFORMER, _POOLING], [_TRANSFORMER, _POOLING, _NORMALIZE]) or paths[0]:
        what = f"its modules are {', '.join(kinds)[:200]}; known are Transformer, Pooling, Normalize, in this order"
        raise DataError(what, where=str(folder / MODULES), remedy=_REMEDY)
    if Path(paths[1]).name != paths[1]:
        raise DataError(
            "a module is outside of the folder", where=str(folder / MODULES), remedy="copy the folder again"
        )
    if _settings(folder / _PROMPTS).get("default_prompt_name") is not None:
        what = "it puts a prompt before every text (default_prompt_name), which is not supported"
        raise DataError(what, where=str(folder / _PROMPTS), remedy=_REMEDY)
    return SentenceModel(_pooling_of(folder / paths[1] / "config.json"), _NORMALIZE in kinds, _max_length_of(folder))


def _settings(path: Path) -> dict[str, Any]:
    found = read_json(path) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def _pooling_of(path: Path) -> str:
    settings = _settings(path)
    mode = settings.get("pooling_mode")
    if mode is None:
        modes = [key for key, value in settings.items() if key.startswith("pooling_mode_") and value is True]
        mode = _OLD_MODES.get(modes[0], modes[0]) if len(modes) == 1 else modes
    if mode not in _MODES:
        what = f"its pooling is {str(mode)[:100]}; known are {' and '.join(_MODES)}"
        raise DataError(what, where=str(path), remedy=_REMEDY)
    return str(mode)


def _max_length_of(folder: Path) -> int | None:
    for name, key in ((_LENGTH, "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        found = _settings(folder / name).get(key)
        if type(found) is int and found >= 3:
            return found
    return None
