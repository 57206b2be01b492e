"""The inputs of a command as sources: files, globs, folders, URLs and `datasets` names, in a fixed order.

Each source has an identity of its content, an encoding, and a rule for the ends of documents and sentences. What the
configuration does not say is detected at the beginning of its text.
"""

import glob
import lzma
import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bert_pretrain.config import DataConfig
from bert_pretrain.errors import ConfigError, InputError
from bert_pretrain.io.files import is_url
from bert_pretrain.io.inputs import COMPRESSIONS, matching_urls, open_input, size_and_version
from bert_pretrain.io.manifest import is_output
from bert_pretrain.io.pool import run_each
from bert_pretrain.text import hub_datasets
from bert_pretrain.text.encodings import AUTO, UTF8, decode, encoding_of
from bert_pretrain.text.hub_datasets import DATASET, TRAIN, VALIDATION
from bert_pretrain.text.layout import has_one_sentence_a_line

FORMATS = {
    **{".txt": "txt", ".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl"},
    **{".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"},
}
TEXT_FORMATS = ("txt", "jsonl", "json", "csv", "tsv")
SUPPORTED = f"{', '.join(FORMATS)}, each also {', '.join(COMPRESSIONS)}, or a folder saved by datasets"
FEW_DOCUMENTS = 20  # below, the two that next-sentence prediction needs for validation are more than a tenth
FEW_SOURCES = 16
"""Up to which `data.fraction` is a share of each source; of more, it is a share of the sources."""
READ_ERRORS = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)
"""Raised for damaged files; not all decompressors raise OSError."""
_SAMPLE_BYTES = 1 << 18
SOURCES_PER_TASK = 1000
MAX_SOURCES = 300_000
RUN_FILES = ("time.json", "forecast.json", "machine.json")
"""Files that `run` writes next to the outputs of its stages, and that look like text."""
_QUOTED = re.compile(r'"[^"]*("|$)')
T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """One input file, URL, saved dataset or dataset name."""

    location: str
    format: str
    """txt, jsonl, json (one array), csv, tsv, parquet, or dataset; stream is a dataset that is not to be built."""
    size: int | None = None
    version: str = ""
    """Changes when the content does: modification time, ETag or fingerprint."""
    boundary: str = "auto"
    """Where documents of a text file end: `blank_line`, `line` or `file`; `auto` until it is detected."""
    splitter: str = "sentencex"
    """How its documents become sentences: `lines` or `sentencex`."""
    weight: float = 1.0
    """How often its documents are used in training, relative to others."""
    is_validation: bool = False
    fraction: float = 1.0
    """Share of its parts that are read."""
    encoding: str = UTF8
    delimiter: str = ","  # of CSV
    split: str = ""  # of a dataset with several

    @property
    def identity(self) -> dict[str, Any]:
        """Keys that identify the content without reading it: a file may be moved, but not changed."""
        name = self.location if self.format == "dataset" else self.location.rsplit("/", 1)[-1]
        keys = ("size", "version", "boundary", "splitter", "fraction", "encoding")
        return {"name": name, **{key: getattr(self, key) for key in keys}}

    @property
    def is_local(self) -> bool:
        """Whether it is a file on this machine."""
        return self.format != "dataset" and not is_url(self.location)

    @property
    def absolute(self) -> "Source":
        """The same input with an absolute path, for processes in other folders or on other machines."""
        if self.format == "dataset":
            return replace(self, location=hub_datasets.absolute(self.location))
        return replace(self, location=os.path.abspath(self.location)) if self.is_local else self

    def check_unchanged(self) -> None:
        """Check that an input has not changed since it was resolved, as far as its version tells."""
        try:
            if _size_and_version(self) == (self.size, self.version):
                return
        except OSError:
            pass
        remedy = "run the command again once the input no longer changes"
        raise InputError("the input changed while it was read", where=self.location, remedy=remedy)

    @property
    def is_divisible(self) -> bool:
        """Whether several cores may read it."""
        if self.format in ("parquet", "dataset"):
            return not is_compressed(self.location)
        return self.has_documents_at_lines and not self.needs_decoding

    @property
    def has_documents_at_lines(self) -> bool:
        """Whether its documents begin and end with lines of text, so that it can be cut into byte ranges."""
        return self.format in ("txt", "jsonl") and self.boundary != "file"

    @property
    def needs_decoding(self) -> bool:
        """Whether its bytes are not those of its text as UTF-8."""
        return is_compressed(self.location) or self.encoding != UTF8


def resolve(
    inputs: Sequence[str],
    config: DataConfig,
    *,
    whole_words: bool = False,
    every_split: bool = False,
    looks: bool = True,
    workers: int = 1,
) -> list[Source]:
    """Resolve files, globs, folders, URLs and `dataset:` names to sources, in a fixed order, those held out last.

    With `whole_words`, words are tokens already; `auto` then means a sentence per line and documents that end at blank
    lines. With `every_split` all splits of a dataset are read and none is held out; otherwise `train` is read, and
    `validation` held out unless the configuration names what is. Without `looks` no file is opened: see `examined`.
    Thousands of files are looked at by `workers` processes.
    """
    if not inputs:
        raise InputError("no input is given", where="INPUT", remedy="name files, folders, globs or dataset:NAME")
    sources: list[Source] = []
    held_out: list[Source] = []
    for item in inputs:
        found = _find(item, config)
        if found[0].split and not every_split:
            found = _for_training(item, found, holds_out=not config.validation)
        found = [replace(source, weight=config.input_weights.get(item, 1.0)) for source in found]
        sources += (source for source in found if not source.is_validation)
        held_out += (source for source in found if source.is_validation)
    if config.fraction < 1.0:
        sources = _some_of(sources, config.fraction)
    for item in config.validation:
        found = _find(item, config)
        found = [source for source in found if source.split in VALIDATION] or found
        held_out += (replace(source, is_validation=True) for source in found)
    sources += held_out
    _check_names(inputs, sources, config)
    if unversioned := [source.location for source in sources if not source.version]:
        print(f"no version is known for {', '.join(unversioned[:3])}: a change of the content will not be detected")
    if not looks:
        return sources
    examine = partial(_all_examined, config=config, whole_words=whole_words)
    if len(sources) <= SOURCES_PER_TASK:
        sources = examine(sources)
    else:
        tasks = [sources[first : first + SOURCES_PER_TASK] for first in range(0, len(sources), SOURCES_PER_TASK)]
        sizes = [len(task) for task in tasks]
        parts = run_each(examine, tasks, workers=workers, description="inputs", unit="input", weights=sizes)
        sources = [source for part in parts for source in part]
    others = Counter(source.encoding for source in sources if source.encoding != UTF8)
    if config.encoding == AUTO and others:
        print("; ".join(f"{number} of {len(sources)} inputs in {name}" for name, number in others.items()))
    return sources


def _check_names(inputs: Sequence[str], sources: Sequence[Source], config: DataConfig) -> None:
    """Refuse too many inputs, one that is given twice, and a key of the configuration that names none."""
    if len(sources) > MAX_SOURCES:  # each takes half a kilobyte of the manifest
        remedy = "join small files, for example as JSON lines with a field text"
        raise InputError(f"{len(sources):,} inputs are too many", where=sources[0].location, remedy=remedy)
    names = [os.path.realpath(source.location) if source.is_local else source.location for source in sources]
    name, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise InputError("an input is given twice", where=name, remedy="name it once")
    boundaries = config.document_boundary if isinstance(config.document_boundary, dict) else {}
    known = {*inputs, *config.validation, *(source.location for source in sources)}
    for key, unknown in (
        ("input_weights", set(config.input_weights) - set(inputs)),
        ("document_boundary", set(boundaries) - known),
    ):
        if unknown:
            remedy = f"spell it as the input: {', '.join(inputs)}"
            raise ConfigError(f"'{min(unknown)}' is no input", where=f"data.{key}", remedy=remedy)


def _for_training(item: str, found: list[Source], *, holds_out: bool) -> list[Source]:
    """Return those of a dataset's splits that are read for training, or held out."""
    splits = {source.split: source for source in found}
    held_out = hub_datasets.held_out_split(item, list(splits), holds_out=holds_out)
    return [splits[TRAIN], *([replace(splits[held_out], is_validation=True)] if held_out else [])]


def is_mix(sources: Sequence[Source], config: DataConfig) -> bool:
    """Whether only some of the inputs have a split for validation."""
    of_splits = {_without_split(source) for source in sources if source.is_validation}
    has_own = [_without_split(source) in of_splits for source in sources if not source.is_validation]
    return not config.validation and any(has_own) and not all(has_own)


def _without_split(source: Source) -> str:
    return source.location.removesuffix(f"@{source.split}")


def _find(item: str, config: DataConfig) -> list[Source]:
    """Return the sources that an input names, with the boundary that is configured for it, or for one of them."""
    configured = config.document_boundary
    boundaries = configured if isinstance(configured, dict) else {}
    default = boundaries.get(item, "auto") if isinstance(configured, dict) else configured
    locations = [item]
    if is_url(item):
        locations = matching_urls(item)
    elif hub_datasets.is_dataset(item := item if item.startswith(DATASET) else os.path.expanduser(item)):
        splits = hub_datasets.split_names(item) or [""]
        locations = [f"{item}@{split}" if split else item for split in splits]
        return [_source(name, default, "dataset", split) for name, split in zip(locations, splits, strict=True)]
    elif os.path.isdir(item):
        locations = _files_below(Path(item))
    elif not os.path.isfile(item):
        matches = sorted(glob.glob(str(Path(item)), recursive=True))
        locations = [str(Path(match)) for match in matches if os.path.isfile(match)]
        if not locations:
            raise InputError("there is no such file or folder", where=item, remedy="check the path; no file matches it")
    sources = [_source(location, boundaries.get(location, default)) for location in locations]
    empty = [source.location for source in sources if source.size == 0]
    if len(empty) == len(sources):
        raise InputError("the file is empty", where=empty[0], remedy="leave it out, or write it again")
    if empty:
        print(f"skipped, since they are empty: {len(empty)} files, {empty[0]} the first")
    return [source for source in sources if source.size != 0]


def _source(location: str, boundary: str, format_: str | None = None, split: str = "") -> Source:
    format_ = format_ or _format_of(location)
    if format_ is None:
        name = location.rsplit("/", 1)[-1]
        remedy = f"rename it by what it holds, such as {name}.txt or {name}.jsonl; supported: {SUPPORTED}"
        raise InputError(f"the ending of '{name}' is unknown", where=location, remedy=remedy)
    source = Source(location, format_, None, "", boundary=boundary, split=split)
    size, version = _size_and_version(source)
    return replace(source, size=size, version=version)


def _size_and_version(source: Source) -> tuple[int | None, str]:
    if source.format == "dataset":
        return None, hub_datasets.version_of(source.location)
    if is_url(source.location):
        return size_and_version(source.location)
    status = os.stat(source.location)
    return status.st_size, f"mtime:{status.st_mtime_ns}"


def _files_below(path: Path) -> list[str]:
    """Return the files of a folder that can be read, in a fixed order."""
    files: list[str] = []
    outputs: list[str] = []
    unread: list[str] = []
    refused: list[OSError] = []
    for folder, inner, names in os.walk(path, onerror=refused.append):
        unread += [link for name in inner if os.path.islink(link := os.path.join(folder, name))]
        unread += [os.path.join(folder, name) for name in names if not _format_of(name) and _format_of(name.lower())]
        # Hidden files and folders are skipped, among them our token store, and outputs with files such as vocab.txt.
        below = [name for name in inner if not name.startswith(".")]
        inner[:] = [name for name in below if not is_output(Path(folder, name))]
        skipped = [name for name in below if name not in inner]
        if skipped or {"plan.yaml", "forecast.json"} <= set(names):
            skipped += [name for name in names if name in RUN_FILES]
        outputs += [os.path.join(folder, name) for name in skipped]
        found = [name for name in names if not name.startswith(".") and _format_of(name) and name not in skipped]
        files += filter(os.path.isfile, (os.path.join(folder, name) for name in found))
    if outputs:
        print(f"skipped, since bert-pretrain wrote them: {', '.join(sorted(outputs))}")
    if unread := [str(error.filename) for error in refused] + unread:
        print(f"not read, links to folders, endings in capitals or no permission: {len(unread)}, {unread[0]} the first")
    if not files:
        raise InputError("the folder holds no readable file", where=str(path), remedy=f"supported: {SUPPORTED}")
    return sorted(files, key=lambda file: file.split(os.sep))


def _format_of(name: str) -> str | None:
    compression = next((ending for ending in COMPRESSIONS if name.endswith(ending)), "")
    return FORMATS.get(os.path.splitext(name.removesuffix(compression))[1])


def is_compressed(location: str) -> bool:
    return location.endswith(COMPRESSIONS)


def _some_of(sources: list[Source], fraction: float) -> list[Source]:
    """Return a share of many sources, evenly spaced; of few, return all, each to be read in that share."""
    if len(sources) <= FEW_SOURCES:
        return [replace(source, fraction=fraction) for source in sources]
    number = math.ceil(fraction * len(sources))
    rest = fraction * len(sources) / number
    return [replace(source, fraction=rest) for source in evenly_spaced(sources, number)]


def evenly_spaced(items: Sequence[T], number: int) -> list[T]:
    """Return `number` of the items, evenly spaced."""
    return [items[int((place + 0.5) * len(items) / number)] for place in range(number)]


def examined(source: Source, config: DataConfig, *, whole_words: bool = False) -> Source:
    """Return a source with what is detected at the beginning of its text: encoding, layout, and form of a table."""
    boundary, splitter, is_split = "record", str(config.sentence_splitter), whole_words
    if source.format in TEXT_FORMATS:
        sample = _sample(source)
        source = replace(source, encoding=encoding_of(sample, config.encoding, source.location))
        text = decode(sample, source.encoding)
    if source.format == "txt":
        boundary = source.boundary
        if "auto" in (boundary, splitter):
            is_split = whole_words or has_one_sentence_a_line(text, config.language)
        if boundary == "auto":
            boundary = "blank_line" if is_split else "file"
    elif source.format == "jsonl" and text.lstrip().startswith("["):  # not one value per line
        source = replace(source, format="json")
    elif source.format == "csv":
        source = replace(source, delimiter=delimiter_of(text))
    if splitter == "auto":
        splitter = "lines" if is_split else "sentencex"
    return replace(source, boundary=boundary, splitter=splitter)


def _all_examined(sources: Sequence[Source], config: DataConfig, *, whole_words: bool) -> list[Source]:
    return [examined(source, config, whole_words=whole_words) for source in sources]


def few_documents(number: int) -> str:
    """Return in words that inputs hold few documents, "" where they do not."""
    return "" if number >= FEW_DOCUMENTS else f"the inputs hold only {number} document{'' if number == 1 else 's'}"


def finer_boundary(sources: Sequence[Source]) -> str:
    """Return which setting may divide text files into more documents, "" where there is none."""
    if all(source.format != "txt" or source.boundary == "line" for source in sources):
        return ""
    return "--set data.document_boundary=blank_line (or line), if blank lines (or line ends) separate documents"


def sample_text(source: Source) -> str:
    """Return the beginning of a text file."""
    return decode(_sample(source), source.encoding)


def _sample(source: Source) -> bytes:
    with open_input(source.location) as file:
        try:
            return file.read(_SAMPLE_BYTES)
        except READ_ERRORS as error:
            raise damaged(source, error) from error


def damaged(source: Source, error: Exception) -> InputError:
    return InputError(f"cannot read on: {error}", where=source.location, remedy="the file is damaged; fetch it again")


def delimiter_of(sample: str) -> str:
    """Return what separates the columns of CSV: the most frequent delimiter of the header, outside quotes."""
    header = _QUOTED.sub("", sample.lstrip("\r\n").partition("\n")[0])
    return max(",;\t", key=header.count)
