"""The inputs of a command as sources: files, globs, folders, URLs and `datasets` names, in a fixed order.

Each source has an identity of its content, an encoding, and a rule for the ends of documents and sentences. What the
configuration does not say, the beginning of its text tells.
"""

import glob
import itertools
import lzma
import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from bert_pretrain.config import Boundary, DataConfig
from bert_pretrain.errors import ConfigError, InputError
from bert_pretrain.storage.compression import COMPRESSIONS
from bert_pretrain.storage.files import open_input
from bert_pretrain.storage.manifest import is_output
from bert_pretrain.storage.paths import is_url
from bert_pretrain.text.encodings import AUTO, UTF8, decode, encoding_of
from bert_pretrain.text.hub_datasets import (
    DATASET,
    VALIDATION,
    folder_of,
    is_dataset,
    split_names,
    training_splits,
    version_of,
)
from bert_pretrain.text.urls import matching_urls, size_and_version

FORMATS = {
    **{".txt": "txt", ".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl"},
    **{".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"},
}
TEXT_FORMATS = ("txt", "jsonl", "json", "csv", "tsv")
SUPPORTED = f"{', '.join(FORMATS)}, each also {', '.join(COMPRESSIONS)}, or a folder saved by datasets"
_SAMPLE_BYTES = 1 << 18
FEW_DOCUMENTS = 20
"""Below, the two that next-sentence prediction needs for validation are more than a tenth."""
FEW_SOURCES = 16
"""Up to which `data.fraction` is a share of each source; of more, it is a share of the sources."""
T = TypeVar("T")
DELIMITERS = (",", ";", "\t")
_QUOTED = re.compile(r'"[^"]*("|$)')
READ_ERRORS = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)
"""Raised for damaged files; not all decompressors raise OSError."""


@dataclass(frozen=True)
class Source:
    """One input file, URL, saved dataset or dataset name."""

    location: str
    format: str
    """txt, jsonl, json (one array), csv, tsv, parquet, or dataset; stream is a dataset that is not to be built."""
    size: int | None
    version: str
    """Changes when the content does: modification time, ETag or fingerprint."""
    boundary: str = "blank_line"
    """For txt: where documents end, `blank_line`, `line` or `file`."""
    splitter: str = "sentencex"
    """How its documents become sentences: `lines` or `sentencex`."""
    weight: float = 1.0
    """How often its documents are used in training, relative to others."""
    is_validation: bool = False
    """Whether all of it is held out."""
    fraction: float = 1.0
    """Share of its parts that are read."""
    encoding: str = UTF8
    """Of its text, as Python names it."""
    delimiter: str = ","
    """Of the columns of CSV."""
    split: str = ""
    """Of a dataset with several splits."""

    @property
    def identity(self) -> dict[str, Any]:
        """What identifies the content without reading it: a file may be moved, but not changed."""
        name = self.location if self.format == "dataset" else self.location.rsplit("/", 1)[-1]
        layout = {"boundary": self.boundary, "splitter": self.splitter}
        read = {"fraction": self.fraction, "encoding": self.encoding}
        return {"name": name, "size": self.size, "version": self.version, **layout, **read}

    @property
    def is_local(self) -> bool:
        """Whether it is a file on this machine."""
        return self.format != "dataset" and not is_url(self.location)

    @property
    def absolute(self) -> "Source":
        """The same input with an absolute path, for processes in other folders or on other machines."""
        if self.format != "dataset":
            return self if is_url(self.location) else replace(self, location=os.path.abspath(self.location))
        folder = folder_of(self.location)
        begin = len(DATASET) if self.location.startswith(DATASET) else 0
        rest = self.location[begin + len(folder) :]
        return replace(self, location=self.location[:begin] + os.path.abspath(folder) + rest) if folder else self

    def check_unchanged(self) -> None:
        """Check that an input has not changed since it was resolved, as far as its version tells."""
        now: tuple[int | None, str] | None
        try:
            if self.is_local:
                now = _state_of(os.stat(self.location))
            else:
                now = (None, version_of(self.location)) if self.format == "dataset" else size_and_version(self.location)
        except OSError:
            now = None
        if now != (self.size, self.version):
            raise InputError(
                "the input changed while it was read",
                where=self.location,
                remedy="run the command again once the input no longer changes",
            )

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
) -> list[Source]:
    """Resolve files, globs, folders, URLs and `dataset:` names to sources, in a fixed order, those held out last.

    With `whole_words`, words are tokens already; `auto` then means a sentence per line and documents that end at blank
    lines. With `every_split` all splits of a dataset are read and none is held out; otherwise `train` is read, and
    `validation` held out unless the configuration names what is. Without `looks` no file is opened, and what the
    beginning of its text would tell is missing: see `examined`.
    """
    if not inputs:
        raise InputError("no input is given", where="INPUT", remedy="name files, folders, globs or dataset:NAME")
    if unknown := set(config.input_weights) - set(inputs):
        raise ConfigError(
            f"'{min(unknown)}' has a weight but is no input",
            where="data.input_weights",
            remedy="spell it as the input: " + ", ".join(inputs),
        )
    boundaries = config.document_boundary if isinstance(config.document_boundary, dict) else {}
    boundary_of = dict(boundaries)  # by location
    sources = []
    for item in inputs:
        found, weight = _resolve_one(item), config.input_weights.get(item, 1.0)
        boundary_of |= {source.location: boundaries[item] for source in found if item in boundaries}
        found = found if every_split else _for_training(item, found, holds_out=not config.validation)
        sources += found if weight == 1.0 else [replace(source, weight=weight) for source in found]
    held_out = [source for source in sources if source.is_validation]
    sources = [source for source in sources if not source.is_validation]
    if config.fraction < 1.0:
        sources = _some_of(sources, config.fraction)
    for item in config.validation:
        found = _resolve_one(item)
        found = [source for source in found if source.split in VALIDATION] or found
        boundary_of |= {source.location: boundaries[item] for source in found if item in boundaries}
        held_out += [replace(source, is_validation=True) for source in found]
    sources += held_out
    seen: set[str] = set()
    real_folder = lru_cache(os.path.realpath)
    for source in sources:
        name = source.location
        if source.is_local:
            folder, file = os.path.split(name)
            name = os.path.realpath(name) if os.path.islink(name) else os.path.join(real_folder(folder), file)
        if name in seen:
            raise InputError("an input is given twice", where=source.location, remedy="name it once")
        seen.add(name)
    if unversioned := [source.location for source in sources if not source.version]:
        print(
            f"no version is known for {', '.join(unversioned[:3])}{' …' if len(unversioned) > 3 else ''}: a change of "
            "its content will not be detected, and the same command will be treated as complete"
        )
    known = {*inputs, *config.validation, *(source.location for source in sources)}
    if unknown := set(boundaries) - known:
        what, remedy = f"'{min(unknown)}' is no input", "spell it as the input: " + ", ".join(inputs)
        raise ConfigError(what, where="data.document_boundary", remedy=remedy)
    if not looks:
        return sources
    sources = [
        examined(source, config, whole_words=whole_words, boundary=boundary_of.get(source.location))
        for source in sources
    ]
    if config.encoding == AUTO and (
        others := Counter(source.encoding for source in sources if source.encoding != UTF8)
    ):
        print("; ".join(f"{number} of {len(sources)} inputs in {name}" for name, number in others.items()))
    return sources


def _for_training(item: str, sources: list[Source], *, holds_out: bool) -> list[Source]:
    """Return those of a dataset's splits that are read for training, or held out; any other input as it is."""
    splits = {source.split: source for source in sources}
    if "" in splits:
        return sources
    train, held_out = training_splits(item, list(splits), holds_out=holds_out)
    return [splits[train], *([replace(splits[held_out], is_validation=True)] if held_out else [])]


def is_mix(sources: Sequence[Source], config: DataConfig) -> bool:
    """Whether only some of the inputs have a split for validation."""
    of_splits = {_without_split(source) for source in sources if source.is_validation}
    has_own = [_without_split(source) in of_splits for source in sources if not source.is_validation]
    return not config.validation and any(has_own) and not all(has_own)


def _without_split(source: Source) -> str:
    return source.location.removesuffix(f"@{source.split}")


def _resolve_one(item: str) -> list[Source]:
    if is_url(item):
        return [_url_source(url) for url in matching_urls(item)]
    item = item if item.startswith(DATASET) else os.path.expanduser(item)
    if is_dataset(item):
        names = split_names(item)
        return [_dataset_source(item, split) for split in names] if names else [_dataset_source(item)]
    path = Path(item)
    if path.is_dir():
        files: list[str] = []
        outputs: set[str] = set()
        for folder, inner, names in os.walk(path):
            # Hidden files and folders are skipped, among them our token store.
            inner[:] = [name for name in inner if not name.startswith(".")]
            found = [name for name in names if not name.startswith(".") and _format_of(name)]
            # The stages' outputs, with files such as vocab.txt, may be in the same folder.
            if found and (output := _output_around(Path(folder), path)):
                outputs.add(str(output))
                continue
            files += filter(os.path.isfile, (os.path.join(folder, name) for name in found))
        if outputs:
            print(f"skipped, since bert-pretrain wrote them: {', '.join(sorted(outputs))}")
        files = _not_empty(sorted(files, key=lambda file: file.split(os.sep)))
        if not files:
            raise InputError("the folder holds no readable file", where=item, remedy=f"supported: {SUPPORTED}")
        return [_file_source(file) for file in files]
    if path.is_file():
        return [_file_source(str(path))]
    matches = [match for match in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(match)]
    if not matches:
        raise InputError("there is no such file or folder", where=item, remedy="check the path; no file matches it")
    return [_file_source(str(Path(file))) for file in _not_empty(matches)]


def _not_empty(files: list[str]) -> list[str]:
    """Skip empty files among others, with a message; if all are empty, that is an error elsewhere."""
    kept = [file for file in files if os.path.getsize(file)]
    if kept and len(kept) < len(files):
        empty = next(file for file in files if not os.path.getsize(file))
        print(f"skipped, since they are empty: {len(files) - len(kept)} files, {empty} the first")
        return kept
    return files


def _output_around(folder: Path, within: Path) -> Path | None:
    """Return the output of a stage, below `within`, that contains a folder or is it."""
    depth = len(folder.relative_to(within).parts)
    return next((each for each in [folder, *folder.parents][:depth] if is_output(each)), None)


def _file_source(path: str) -> Source:
    kind = _format_of(path)
    if kind is None:
        what = f"the ending of '{os.path.basename(path)}' is unknown"
        raise InputError(what, where=path, remedy=f"supported: {SUPPORTED}")
    size, version = _state_of(os.stat(path))
    if size == 0:
        raise InputError("the file is empty", where=path, remedy="leave it out, or write it again")
    return Source(path, kind, size, version)


def _state_of(status: os.stat_result) -> tuple[int, str]:
    return status.st_size, f"mtime:{status.st_mtime_ns}"


def _url_source(url: str) -> Source:
    kind = _format_of(url)
    if kind is None:
        raise InputError("the ending of the URL is unknown", where=url, remedy=f"supported: {SUPPORTED}")
    return Source(url, kind, *size_and_version(url))


def _dataset_source(location: str, split: str = "") -> Source:
    name = f"{location}@{split}" if split else location
    return Source(name, "dataset", None, version_of(location), split=split)


def _format_of(name: str) -> str | None:
    compression = next((ending for ending in COMPRESSIONS if name.endswith(ending)), "")
    return FORMATS.get(os.path.splitext(name.removesuffix(compression))[1])


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


def examined(
    source: Source, config: DataConfig, *, whole_words: bool = False, boundary: Boundary | None = None
) -> Source:
    """Return a source with what the beginning of its text tells: encoding, layout, and form of a table."""
    if boundary is None:
        boundary = config.document_boundary if isinstance(config.document_boundary, str) else "auto"
    splitter: str = config.sentence_splitter
    if splitter == "auto":
        splitter = "lines" if whole_words else "sentencex"
    if source.format not in TEXT_FORMATS:
        return replace(source, boundary="record", splitter=splitter)
    sample = _sample(source)
    encoding = encoding_of(sample, config.encoding, source.location)
    text = decode(sample, encoding)
    if source.format != "txt":
        is_array = source.format == "jsonl" and text.lstrip().startswith("[")  # not one value per line
        format_, delimiter = "json" if is_array else source.format, source.delimiter
        delimiter = delimiter_of(text) if source.format == "csv" else delimiter
        return replace(
            source, format=format_, encoding=encoding, boundary="record", splitter=splitter, delimiter=delimiter
        )
    if "auto" in (boundary, config.sentence_splitter):
        is_split = whole_words or has_one_sentence_a_line(text, config.language)
        if boundary == "auto":
            boundary = "blank_line" if is_split else "file"
        if config.sentence_splitter == "auto":
            splitter = "lines" if is_split else "sentencex"
    return replace(source, encoding=encoding, boundary=boundary, splitter=splitter)


def few_documents(number: int) -> str:
    """Return in words that inputs hold few documents, "" where they do not."""
    return "" if number >= FEW_DOCUMENTS else f"the inputs hold only {number} document{'' if number == 1 else 's'}"


def finer_boundary(sources: Sequence[Source], *, is_only: bool | None = None) -> str:
    """Return which setting would divide text files into more documents, as a flag and its condition; "" if none would.

    The beginnings of the files are looked at, up to the first where there is one. Unless it is the only input, the
    setting is for that one.
    """
    is_one = len(sources) == 1 if is_only is None else is_only
    for source in sources:
        if source.format != "txt" or source.boundary == "line":
            continue
        lines = [line.strip() for line in sample_text(source).strip().splitlines()]
        if source.boundary == "file" and not all(lines):
            value = f"{'' if is_one else f'{source.location}='}blank_line"
            return f"--set data.document_boundary={value}, if blank lines of {source.location} separate documents"
        if sum(map(bool, lines)) > 1:
            value = f"{'' if is_one else f'{source.location}='}line"
            return f"--set data.document_boundary={value}, if each line of {source.location} is a document or sequence"
    return ""


def sample_text(source: Source) -> str:
    """Return the beginning of a text file."""
    return decode(_sample(source), source.encoding)


def _sample(source: Source) -> bytes:
    with open_input(source.location) as file:
        try:
            is_small = source.is_local and not source.needs_decoding and (source.size or 0) < _SAMPLE_BYTES
            return file.read() if is_small else file.read(_SAMPLE_BYTES)
        except READ_ERRORS as error:
            raise damaged(source, error) from error


def damaged(source: Source, error: Exception) -> InputError:
    return InputError(f"cannot read on: {error}", where=source.location, remedy="the file is damaged; fetch it again")


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
    if ended < 0.5 * len(lines):
        return False
    may_hold_several = int(0.35 * len(lines[:500]))
    several = (line for line in lines[:500] if len(sentencex.segment(language, line[:2000])) > 1)
    return next(itertools.islice(several, may_hold_several, None), None) is None


def delimiter_of(sample: str) -> str:
    """Return what separates the columns of CSV: the most frequent delimiter of the header, outside quotes."""
    header = _QUOTED.sub("", sample.lstrip("\r\n").partition("\n")[0])
    return max(DELIMITERS, key=header.count)
