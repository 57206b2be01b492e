"""Download models by their name on the Hugging Face Hub, such as `org/name` or `org/name@revision`.

Only configuration, safetensors and tokenizer files are downloaded, never a pickle or code. Downloads share the cache of
`transformers`, so a cached model needs no network.
"""

import re
import sys
from pathlib import Path

from bert_pretrain.errors import DataError
from bert_pretrain.io.files import CHECKSUMS, did_you_mean, local_path
from bert_pretrain.io.manifest import MANIFEST
from bert_pretrain.model.folder import CONFIG
from bert_pretrain.text.tokenizer_folder import FILES

MODULES = "modules.json"  # lists the modules of a `sentence-transformers` folder, such as pooling
_DOWNLOADED = [
    CONFIG, CHECKSUMS, MANIFEST, *FILES, "added_tokens.json",
    "model.safetensors", "model-*.safetensors", "model.safetensors.index.json", MODULES,
]  # fmt: skip
_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")


def model_folder(model: str | Path, flag: str) -> Path:
    """Return the path of a model folder. Download the model first if `model` is a name on the Hub.

    An existing path, or a path in an existing folder, is never treated as a name.
    """
    path = local_path(model, flag)
    match = _NAME.fullmatch(str(model))
    if match is None or path.exists() or path.parent.is_dir():
        remedy = None if any((path / name).exists() for name in (CONFIG, *FILES)) else _remedy_for_run(path, flag)
        if remedy is not None:
            expected = "a vocabulary" if flag == "--vocab" else "a model"
            raise DataError(f"{path} is the folder of a run, not of {expected}", where=flag, remedy=remedy)
        return path
    from huggingface_hub import snapshot_download

    name = match[1]
    try:
        folder = Path(snapshot_download(name, revision=match[2], allow_patterns=_DOWNLOADED))
    except Exception as error:  # errors of the Hub, and any of the network
        message = " ".join(str(error).split())[:200]
        what = f"there is no folder '{name}', and the download from the Hub failed: {type(error).__name__}: {message}"
        remedy = "check the path; or, where the Hub can be reached, run "
        remedy += f"'hf download {name} --local-dir FOLDER' and pass that FOLDER"
        raise DataError(what, where=flag, remedy=remedy) from error
    if not any(folder.glob("*.safetensors")):
        raise DataError(
            f"{name} on the Hub has no safetensors, and pickles are not downloaded",
            where=flag,
            remedy="load and save it with transformers, and pass that folder",
        )
    print(f"model {model} from the Hub: {folder}", file=sys.stderr)
    return folder


def _remedy_for_run(path: Path, flag: str) -> str | None:
    """Return a remedy that names the model of a run, or its newest checkpoint if there is no model yet."""
    if flag == "--vocab" and (remedy := did_you_mean(path, ("vocab",), FILES[0])):
        return remedy
    patterns = [run + name for name in ("model", "checkpoints/step-*") for run in ("", "train/", "train/*/")]
    return did_you_mean(path, patterns, CONFIG)


def name_of_folder(folder: Path) -> str:
    """Return a model's name on the Hub. If it has none, return the name of its run or of its folder."""
    folder = folder.resolve()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return folder.parent.name if folder.name == "model" else folder.name
