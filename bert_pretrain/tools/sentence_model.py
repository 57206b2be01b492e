"""How a folder of `sentence-transformers` makes a vector of a text: its pooling, normalization and maximal length."""

from pathlib import Path
from typing import Any

from bert_pretrain.errors import DataError
from bert_pretrain.io.files import read_json
from bert_pretrain.model.hub import SENTENCE_FILES

MODULES, _LENGTH, _PROMPTS = SENTENCE_FILES
_KNOWN = ["Transformer", "Pooling", "Normalize"]
_MODES = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
"""The names of the flags in older folders."""


def read_sentence_model(folder: Path) -> tuple[str, bool, int | None] | None:
    """Return pooling, whether vectors are normalized, and the maximal length; None for any other folder.

    The pooling is `cls` or `mean`. The length is in tokens, [CLS] and [SEP] included; None: as the model has positions.
    """
    if not (folder / MODULES).is_file():
        return None
    try:
        modules = read_json(folder / MODULES)
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        pooling = _settings(folder / Path(modules[1]["path"]).name / "config.json")
        modes = [
            _MODES.get(key, key) for key, value in pooling.items() if key.startswith("pooling_mode_") and value is True
        ]
        mode = pooling.get("pooling_mode") or ", ".join(modes)
        is_known = kinds in (_KNOWN, _KNOWN[:2]) and mode in _MODES.values()
        is_prompted = _settings(folder / _PROMPTS).get("default_prompt_name") is not None
    except (KeyError, TypeError, IndexError) as error:
        raise _unknown(folder, "it is no list of modules with type and path") from error
    if not is_known or is_prompted:
        what = f"its modules are {', '.join(kinds)[:200]}, its pooling {str(mode)[:100]}"
        raise _unknown(folder, f"{what}, with a prompt before every text" if is_prompted else what)
    keys = {_LENGTH: "max_seq_length", "tokenizer_config.json": "model_max_length"}
    lengths = [_settings(folder / name).get(key) for name, key in keys.items()]
    return mode, "Normalize" in kinds, next((each for each in lengths if type(each) is int and each >= 3), None)


def _unknown(folder: Path, what: str) -> DataError:
    remedy = "name the vectors of its BERT alone, such as --pooling mean, or use the library sentence-transformers"
    known = "known are Transformer, Pooling by cls or mean, and perhaps Normalize"
    return DataError(f"{what}; {known}", where=str(folder / MODULES), remedy=remedy)


def _settings(path: Path) -> dict[str, Any]:
    found = read_json(path) if path.is_file() else {}
    return found if isinstance(found, dict) else {}
