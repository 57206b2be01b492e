"""How a folder of `sentence-transformers` makes a vector of a text: its pooling, normalization and maximal length."""

from pathlib import Path
from typing import Any

from bert_pretrain.errors import DataError
from bert_pretrain.io.files import read_json
from bert_pretrain.model.hub import SENTENCE_FILES

MODULES, _LENGTH, _PROMPTS = SENTENCE_FILES
_KNOWN = ("Transformer", "Pooling", "Normalize")
# The names of the flags in older folders.
_OLD_MODES = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
_LENGTH_KEYS = {_LENGTH: "max_seq_length", "tokenizer_config.json": "model_max_length"}
_REMEDY = "name the vectors of its BERT alone, such as --pooling mean, or use the library sentence-transformers"


def read_sentence_model(folder: Path) -> tuple[str, bool, int | None] | None:
    """Return pooling, whether vectors are normalized, and the maximal length; None for any other folder.

    The pooling is `cls` or `mean`. The length is in tokens, [CLS] and [SEP] included; None: as the model has positions.
    """
    if not (folder / MODULES).is_file():
        return None

    def problem(name: str, what: str) -> DataError:
        return DataError(what, where=str(folder / name), remedy=_REMEDY)

    try:
        modules = [(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in read_json(folder / MODULES)]
    except (KeyError, TypeError) as error:
        raise problem(MODULES, "it is no list of modules with type and path") from error
    kinds = tuple(kind for kind, _ in modules)
    if kinds not in (_KNOWN, _KNOWN[:2]) or modules[0][1]:
        what = f"its modules are {', '.join(kinds)[:200]}; known are {', '.join(_KNOWN)}, in this order"
        raise problem(MODULES, what)
    path = modules[1][1]
    if Path(path).name != path:
        raise problem(MODULES, "a module is outside of the folder")
    if _settings(folder / _PROMPTS).get("default_prompt_name") is not None:
        raise problem(_PROMPTS, "it puts a prompt before every text (default_prompt_name), which is not supported")
    settings = _settings(folder / path / "config.json")
    modes = [_OLD_MODES.get(key, key) for key in settings if key.startswith("pooling_mode_") and settings[key] is True]
    mode = settings.get("pooling_mode") or ", ".join(modes)
    if mode not in _OLD_MODES.values():
        raise problem(f"{path}/config.json", f"its pooling is {str(mode)[:100] or 'not named'}; known are cls and mean")
    lengths = [_settings(folder / name).get(key) for name, key in _LENGTH_KEYS.items()]
    length = next((each for each in lengths if type(each) is int and each >= 3), None)
    return mode, "Normalize" in kinds, length


def _settings(path: Path) -> dict[str, Any]:
    found = read_json(path) if path.is_file() else {}
    return found if isinstance(found, dict) else {}
