"""Models by their name on the Hugging Face Hub, such as `org/name` or `org/name@revision`.

Only data is fetched: configuration, safetensors and the tokenizer's files, never a pickle or code. They are kept in the
cache that `transformers` uses too, so that a model fetched once opens without a network.
"""

import re
import sys
from pathlib import Path

from bert_pretrain.errors import DataError
from bert_pretrain.io.files import CHECKSUMS, did_you_mean
from bert_pretrain.io.manifest import MANIFEST
from bert_pretrain.text.tokenizer_folder import FILES

CONFIG = "config.json"
MODULES = "modules.json"
"""The list of modules in a `sentence-transformers` folder, such as the pooling of vectors."""
_TOKENIZER = (*FILES, "added_tokens.json")
_WEIGHTS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
_PATTERNS = (CONFIG, CHECKSUMS, MANIFEST, *_TOKENIZER, *_WEIGHTS, MODULES)
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")


def model_folder(model: str | Path, flag: str) -> Path:
    """Return the folder of a model: the path given, or for a name on the Hub the folder into which it was fetched.

    A name is looked up only if there is no such path, nor a folder that the path would be in.
    """
    path = Path(model)
    found = _NAME.fullmatch(str(model))
    if found is None or path.exists() or path.parent.is_dir():
        remedy = None if any((path / name).exists() for name in (CONFIG, *FILES)) else _inside_a_run(path, flag)
        if remedy is not None:
            wanted = "a vocabulary" if flag == "--vocab" else "a model"
            raise DataError(f"{path} is the folder of a run, not of {wanted}", where=flag, remedy=remedy)
        return path
    from huggingface_hub import snapshot_download

    name = found[1]
    try:
        folder = Path(snapshot_download(name, revision=found[2], allow_patterns=list(_PATTERNS)))
    except Exception as error:  # the network has errors of its own
        message = " ".join(str(error).split())[:200]
        raise DataError(
            f"there is no folder '{name}', and the Hub does not give it: {type(error).__name__}: {message}",
            where=flag,
            remedy=f"check the path; or, where the Hub can be reached, run 'hf download {name} --local-dir FOLDER' and "
            "give that FOLDER",
        ) from error
    if not any(folder.glob("*.safetensors")):
        what = f"{name} on the Hub has no safetensors, and pickles are not fetched"
        raise DataError(what, where=flag, remedy="open and save it by transformers, and give that folder")
    print(f"model {model} of the Hub: {folder}", file=sys.stderr)
    return folder


def _inside_a_run(path: Path, flag: str) -> str | None:
    """Return a remedy that names the model, or as long as there is none the newest checkpoint, of a run."""
    if flag == "--vocab" and (found := did_you_mean(path, ("vocab",), FILES[0])):
        return found
    trainings = ("", "train/", "train/*/")
    patterns = [each + name for name in ("model", "checkpoints/step-*") for each in trainings]
    return did_you_mean(path, patterns, CONFIG)


def name_of_folder(folder: Path) -> str:
    """Return the name of a model folder: that on the Hub, that of its run, or its own."""
    folder = folder.resolve()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return folder.parent.name if folder.name == "model" else folder.name
