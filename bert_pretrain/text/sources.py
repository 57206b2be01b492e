"""The inputs of a command as sources: files, globs, folders, URLs and `datasets` names, in a fixed order.

Each source has an identity of its content, and a rule for the ends of documents and sentences; for `.txt` the rule
comes from the configuration or from a sample of the text.
"""

import glob
import hashlib
import json
import lzma
import math
import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from bert_pretrain.config import DataConfig
from bert_pretrain.errors import ConfigError, InputError
from bert_pretrain.storage.compression import COMPRESSIONS
from bert_pretrain.storage.files import open_input
from bert_pretrain.storage.manifest import is_output
from bert_pretrain.storage.paths import is_url

FORMATS = {".txt": "txt", ".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".csv": "csv"}
DATASET = "dataset:"
_VERSIONS = ("ETag", "etag", "blob_id", "Content-MD5", "mtime", "LastModified", "Last-Modified", "updated", "modified")
"""File systems' names for what changes with a file, the best first."""
SUPPORTED = f"{', '.join(FORMATS)}, each also {', '.join(COMPRESSIONS)}, or a folder saved by datasets"
_SAMPLE_BYTES = 1 << 18
FEW_SOURCES = 16
"""Up to which `data.fraction` is a share of each source; of more, it is a share of the sources."""
T = TypeVar("T")
READ_ERRORS = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)
"""Raised for damaged files; not all decompressors raise OSError."""


@dataclass(frozen=True)
class Source:
    """One input file, URL, saved dataset or dataset name."""

    location: str
    format: str
    """txt, jsonl, parquet, csv, or dataset."""
    size: int | None
    version: str
    """Changes when the content does: modification time, ETag or fingerprint."""
    boundary: str = "blank_line"
    """For txt: where documents end, `blank_line` or `file`."""
    splitter: str = "sentencex"
    """How its documents become sentences: `lines` or `sentencex`."""
    weight: float = 1.0
    """How often its documents are used in training, relative to others."""
    is_validation: bool = False
    """Whether all of it is held out."""
    fraction: float = 1.0
    """Share of its parts that are read."""

    @property
    def identity(self) -> dict[str, Any]:
        """What identifies the content without reading it: a file may be moved, but not changed."""
        name = self.location if self.format == "dataset" else self.location.rsplit("/", 1)[-1]
        layout = {"boundary": self.boundary, "splitter": self.splitter}
        fraction = {"fraction": self.fraction} if self.fraction < 1.0 else {}
        return {"name": name, "size": self.size, "version": self.version, **layout, **fraction}

    @property
    def is_local(self) -> bool:
        """Whether it is a file on this machine."""
        return self.format != "dataset" and not is_url(self.location)

    @property
    def absolute(self) -> "Source":
        """The same input with an absolute path, for processes in other folders or on other machines."""
        if self.format != "dataset":
            return self if is_url(self.location) else replace(self, location=os.path.abspath(self.location))
        folder = _dataset_folder(self.location)
        begin = len(DATASET) if self.location.startswith(DATASET) else 0
        rest = self.location[begin + len(folder) :]
        return replace(self, location=self.location[:begin] + os.path.abspath(folder) + rest) if folder else self

    def check_unchanged(self) -> None:
        """Check that an input has not changed since it was resolved, as far as its version tells.

        Raises:
            InputError: when it has changed or is missing.
        """
        now: Source | None
        if is_url(self.location):
            now = _url_source(self.location, *_open_url(self.location))
        else:
            try:
                is_dataset = self.format == "dataset"
                now = _dataset_source(self.location) if is_dataset else _file_source(Path(self.location))
            except (OSError, InputError):
                now = None
        if now is None or (now.size, now.version) != (self.size, self.version):
            raise InputError(
                "the input changed while it was read",
                where=self.location,
                remedy="run the command again once the input no longer changes",
            )

    @property
    def is_plain_local(self) -> bool:
        """Whether it can be read from any byte position."""
        return self.is_local and self.format in ("txt", "jsonl") and not is_compressed(self.location)


def resolve(inputs: Sequence[str], config: DataConfig, *, whole_words: bool = False) -> list[Source]:
    """Resolve files, globs, folders, URLs and `dataset:` names to sources, in a fixed order, those held out last.

    Args:
        inputs: as the user has typed them.
        config: weights of inputs, the layout of text, the share of it to read, and further inputs to hold out
            (`validation`).
        whole_words: whether words are tokens already; `auto` then means a sentence per line and documents that end at
            blank lines.

    Raises:
        InputError: when nothing is given or found, an ending is unknown, or a file is empty.
        ConfigError: when a weight is for something that is not an input.
    """
    if not inputs:
        raise InputError("no input is given", where="INPUT", remedy="name files, folders, globs or dataset:NAME")
    if unknown := set(config.input_weights) - set(inputs):
        raise ConfigError(
            f"'{min(unknown)}' has a weight but is no input",
            where="data.input_weights",
            remedy="spell it as the input: " + ", ".join(inputs),
        )
    sources = [
        replace(source, weight=config.input_weights.get(item, 1.0)) for item in inputs for source in _resolve_one(item)
    ]
    if config.fraction < 1.0:
        sources = _some_of(sources, config.fraction)
    sources += [replace(source, is_validation=True) for item in config.validation for source in _resolve_one(item)]
    seen: set[str] = set()
    for source in sources:
        name = os.path.realpath(source.location) if source.is_local else source.location
        if name in seen:
            raise InputError("an input is given twice", where=source.location, remedy="name it once")
        seen.add(name)
    if unversioned := [source.location for source in sources if not source.version]:
        print(
            f"no version is known for {', '.join(unversioned[:3])}{' …' if len(unversioned) > 3 else ''}: a change of "
            "its content will not be detected, and the same command will be treated as complete"
        )
    return [_with_layout(source, config, whole_words) for source in sources]


def _resolve_one(item: str) -> list[Source]:
    if item.startswith(DATASET):
        return [_dataset_source(item)]
    if is_url(item):
        return _resolve_url(item)
    path = Path(item).expanduser()
    if path.is_dir():
        if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            return [_dataset_source(str(path))]
        files = [file for file in sorted(path.rglob("*")) if file.is_file() and _format_of(file.name)]
        # Hidden files and folders are skipped, among them our token store.
        files = [file for file in files if not any(name.startswith(".") for name in file.relative_to(path).parts)]
        # The stages' outputs, with files such as vocab.txt, may be in the same folder.
        outputs = {folder: _output_around(folder, path) for folder in {file.parent for file in files}}
        if skipped := sorted({str(output) for output in outputs.values() if output}):
            print(f"skipped, since bert-pretrain wrote them: {', '.join(skipped)}")
        files = _not_empty([file for file in files if not outputs[file.parent]])
        if not files:
            raise InputError("the folder holds no readable file", where=item, remedy=f"supported: {SUPPORTED}")
        return [_file_source(file) for file in files]
    if path.is_file():
        return [_file_source(path)]
    matches = [match for match in sorted(glob.glob(str(path), recursive=True)) if Path(match).is_file()]
    if not matches:
        raise InputError("there is no such file or folder", where=item, remedy="check the path; no file matches it")
    return [_file_source(file) for file in _not_empty([Path(match) for match in matches])]


def _not_empty(files: list[Path]) -> list[Path]:
    """Skip empty files among others, with a message; if all are empty, that is an error elsewhere."""
    kept = [file for file in files if file.stat().st_size]
    if kept and len(kept) < len(files):
        empty = next(file for file in files if not file.stat().st_size)
        print(f"skipped, since they are empty: {len(files) - len(kept)} files, {empty} the first")
        return kept
    return files


def _output_around(folder: Path, within: Path) -> Path | None:
    """Return the output of a stage, below `within`, that contains a folder or is it."""
    depth = len(folder.relative_to(within).parts)
    return next((each for each in [folder, *folder.parents][:depth] if is_output(each)), None)


def _file_source(path: Path) -> Source:
    kind = _format_of(path.name)
    if kind is None:
        raise InputError(f"the ending of '{path.name}' is unknown", where=str(path), remedy=f"supported: {SUPPORTED}")
    status = path.stat()
    if status.st_size == 0:
        raise InputError("the file is empty", where=str(path), remedy="leave it out, or write it again")
    return Source(str(path), kind, status.st_size, f"mtime:{status.st_mtime_ns}")


def _resolve_url(url: str) -> list[Source]:
    filesystem, path = _open_url(url)
    try:
        paths = sorted(filesystem.glob(path)) if any(character in url for character in "*?[") else [path]
    except Exception as error:
        raise _unreachable(url, error) from error
    if not paths:
        raise InputError("no file matches the URL", where=url, remedy="check the pattern")
    return [_url_source(filesystem.unstrip_protocol(entry), filesystem, entry) for entry in paths]


def _open_url(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        filesystem, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        remedy = "pip install 'bert-pretrain[http]'" if url.startswith("http") else "install the package it names"
        raise InputError(f"cannot open such URLs: {error}", where=url, remedy=remedy) from error
    except Exception as error:
        raise _unreachable(url, error) from error
    return filesystem, path


def _url_source(location: str, filesystem: Any, path: str) -> Source:
    kind = _format_of(location)
    if kind is None:
        raise InputError("the ending of the URL is unknown", where=location, remedy=f"supported: {SUPPORTED}")
    try:
        info = filesystem.info(path)
    except Exception as error:
        raise _unreachable(location, error) from error
    version = next((f"{key}:{info[key]}" for key in _VERSIONS if info.get(key)), "")
    return Source(location, kind, info.get("size"), version)


def _unreachable(url: str, error: Exception) -> InputError:
    # Each file system has errors of its own.
    what = f"cannot reach the URL: {str(error) or type(error).__name__}"
    return InputError(what, where=url, remedy="check the address and access")


def _dataset_source(location: str) -> Source:
    folder = _dataset_folder(location)
    return Source(location, "dataset", None, _folder_version(Path(folder)) if folder else "")


def _dataset_folder(location: str) -> str:
    """Return the local folder of a `dataset:` name or a saved dataset, "" for a name on the hub."""
    name = location.removeprefix(DATASET)
    found = (name, name.partition("@")[0], re.split("[:@]", name, maxsplit=1)[0])
    return next((folder for folder in found if folder and Path(folder).is_dir()), "")


def _folder_version(folder: Path) -> str:
    """Return a hash that changes when a file of the folder does."""
    files = [(str(file.relative_to(folder)), file.stat()) for file in sorted(folder.rglob("*")) if file.is_file()]
    content = [(name, status.st_size, status.st_mtime_ns) for name, status in files]
    return "files:" + hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _format_of(name: str) -> str | None:
    compression = next((ending for ending in COMPRESSIONS if name.endswith(ending)), "")
    return FORMATS.get(Path(name.removesuffix(compression)).suffix)


def is_compressed(location: str) -> bool:
    return location.endswith(COMPRESSIONS)


def _some_of(sources: list[Source], fraction: float) -> list[Source]:
    """Return a share of many sources, evenly spaced, or all of a few, of each of which that share is read."""
    if len(sources) <= FEW_SOURCES:
        return [replace(source, fraction=fraction) for source in sources]
    number = math.ceil(fraction * len(sources))
    rest = fraction * len(sources) / number
    return [replace(source, fraction=rest) for source in evenly_spaced(sources, number)]


def evenly_spaced(items: Sequence[T], number: int) -> list[T]:
    """Return so many of the items, at equal distances from one another."""
    return [items[int((place + 0.5) * len(items) / number)] for place in range(number)]


def _with_layout(source: Source, config: DataConfig, whole_words: bool) -> Source:
    """Set how documents and sentences of a source end, from the configuration or from a sample."""
    boundary: str = config.document_boundary
    splitter: str = config.sentence_splitter
    if source.format == "txt" and "auto" in (boundary, splitter):
        is_split = whole_words or has_one_sentence_a_line(_sample(source), config.language)
        if boundary == "auto":
            boundary = "blank_line" if is_split else "file"
        if splitter == "auto":
            splitter = "lines" if is_split else "sentencex"
    elif splitter == "auto":
        splitter = "lines" if whole_words else "sentencex"
    boundary = boundary if source.format == "txt" else "record"
    return replace(source, boundary=boundary, splitter=splitter)


def _sample(source: Source) -> str:
    with open_input(source.location) as file:
        try:
            return file.read(_SAMPLE_BYTES).decode("utf-8", errors="ignore")
        except READ_ERRORS as error:
            raise damaged(source, error) from error


def has_one_sentence_a_line(sample: str, language: str) -> bool:
    """Whether a sample has one sentence per line, rather than running paragraphs, hard-wrapped or not.

    It has if most lines end as sentences do, and few contain more than one.
    """
    import sentencex

    lines = [line.strip() for line in sample.split("\n")[:-1] or [sample]]
    lines = [line for line in lines if line][:2000]
    if len(lines) < 3:
        return False
    ended = sum(line[-1] in ".!?。！？…;；:：\"'”’」』）)]》" for line in lines)
    several = sum(len(sentencex.segment(language, line[:2000])) > 1 for line in lines[:500])
    return ended >= 0.5 * len(lines) and several <= 0.35 * len(lines[:500])


def damaged(source: Source, error: Exception) -> InputError:
    return InputError(f"cannot read on: {error}", where=source.location, remedy="the file is damaged; fetch it again")
