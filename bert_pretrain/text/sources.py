"""The inputs of a command: files, globs, folders, URLs and `datasets` names, resolved to sources in a fixed order.

A source has an identity, an encoding, a document boundary and a sentence splitter. Settings with the value `auto` are
detected in the first bytes of its text.
"""

import contextlib
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
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bert_pretrain.config import DataConfig
from bert_pretrain.errors import ConfigError, InputError
from bert_pretrain.io.files import DISK_FULL, is_url
from bert_pretrain.io.inputs import COMPRESSIONS, matching_urls, open_input, size_and_version
from bert_pretrain.io.manifest import is_output
from bert_pretrain.io.pool import run_each
from bert_pretrain.text import hub_datasets
from bert_pretrain.text.encodings import AUTO, UTF8, decode, encoding_of
from bert_pretrain.text.layout import CLEARLY_LINES, CLEARLY_PARAGRAPHS, delimiter_of, evidence_of_lines

FORMATS = {
    ".txt": "txt", ".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "tsv",
    ".parquet": "parquet",
}  # fmt: skip
TEXT_FORMATS = ("txt", "jsonl", "json", "csv", "tsv")
_WHOLE_JSON = re.compile(r"\s*(\[|\{([^\n]*[\[{,])?\s*\n)")  # not one value per line
SUPPORTED = f"{', '.join(FORMATS)}, each also {', '.join(COMPRESSIONS)}, or a folder saved by datasets"
MIN_CORPUS_DOCUMENTS = 20  # with fewer documents, holding out two of them would take more than 10 % of the documents
MAX_SAMPLED_SOURCES = 16  # with more sources, `data.fraction` selects complete sources instead of a part of each
MIN_UNPACKED_BYTES = 4 << 20  # smaller packed files are read as they are, by one core
MIN_PART_BYTES = 1 << 16  # of the parts of a file for `data.fraction`
READ_ERRORS = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)  # raised for damaged files
SOURCES_PER_TASK = 1000
MAX_SOURCES = 300_000  # each takes half a kilobyte of the manifest
T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """One input file, URL, saved dataset or dataset name."""

    location: str
    format: str  # txt, jsonl, json (array or long objects), csv, tsv, parquet, dataset, stream (a dataset not built)
    size: int | None = None  # in bytes
    version: str = ""  # changes with the content: modification time, ETag or fingerprint
    boundary: str = "auto"  # end of a document: `blank_line`, `line`, `file`, `record` or `auto` (detect it)
    splitter: str = "sentencex"  # of documents into sentences: `lines` or `sentencex`
    weight: float = 1.0  # how often its documents are used in training, relative to other sources
    is_validation: bool = False
    fraction: float = 1.0  # share of its parts that are read
    encoding: str = UTF8
    delimiter: str = ","  # of CSV
    split: str = ""  # of a dataset with several
    evidence: float = 0.0  # that each line of text is a sentence, see `evidence_of_lines`

    @property
    def identity(self) -> dict[str, Any]:
        """Name, size, version and reading settings, by which a later run recognizes the source without reading it.

        They stay equal if a file is moved to another folder.
        """
        name = self.location if self.format == "dataset" else self.location.rsplit("/", 1)[-1]
        keys = ("size", "version", "boundary", "splitter", "fraction", "encoding")
        return {"name": name, **{key: getattr(self, key) for key in keys}}

    @property
    def is_local(self) -> bool:
        return self.format != "dataset" and not is_url(self.location)

    @property
    def absolute(self) -> "Source":
        """The source with an absolute path, for processes in other folders or on other machines."""
        if self.format == "dataset":
            return replace(self, location=hub_datasets.absolute(self.location))
        return replace(self, location=os.path.abspath(self.location)) if self.is_local else self

    @property
    def streamed(self) -> "Source":
        """The source, whose first rows can be read without building the dataset if it is one."""
        return replace(self, format="stream") if self.format == "dataset" else self

    def copied_to(self, path: Path, format_: str) -> "Source":
        """A local copy of the source in UTF-8, which is read completely."""
        copy = replace(self, location=str(path), format=format_, encoding=UTF8, fraction=1.0, split="")
        size, version = _size_and_version(copy)
        return replace(copy, size=size, version=version)

    def check_unchanged(self) -> None:
        """Raise an InputError if the size or version has changed since the source was resolved."""
        with contextlib.suppress(OSError):
            if _size_and_version(self) == (self.size, self.version):
                return
        remedy = "run the command again once the input no longer changes"
        raise InputError("the input changed while it was read", where=self.location, remedy=remedy)

    @property
    def is_divisible(self) -> bool:
        """Whether several cores can read parts of the source."""
        if self.format in ("parquet", "dataset"):
            return not is_compressed(self.location)
        return self.has_documents_at_lines and not self.needs_decoding

    @property
    def has_documents_at_lines(self) -> bool:
        """Whether documents end at line ends, so that the source can be cut into byte ranges."""
        return self.format in ("txt", "jsonl") and self.boundary != "file"

    @property
    def fraction_read(self) -> float:
        """The share of the source that `make-data` reads: `fraction`, or 1 if it does not cut the source."""
        size = self.size or 0
        is_unpacked = self.is_local and self.has_documents_at_lines and size >= MIN_UNPACKED_BYTES
        is_cut = self.format == "dataset" or (size > 2 * MIN_PART_BYTES and (self.is_divisible or is_unpacked))
        return self.fraction if is_cut else 1.0

    @property
    def needs_decoding(self) -> bool:
        """Whether the source is compressed or not in UTF-8."""
        return is_compressed(self.location) or self.encoding != UTF8


def resolve(
    inputs: Sequence[str],
    config: DataConfig,
    *,
    whole_words: bool = False,
    every_split: bool = False,
    detect: bool = True,
    workers: int = 1,
) -> list[Source]:
    """Resolve files, globs, folders, URLs and `dataset:` names to sources in a fixed order, held-out sources last.

    Args:
        whole_words: each word is a token; `auto` means that each line is a sentence and blank lines end documents.
        every_split: return all splits of a dataset; otherwise `train` and, unless `config.validation` is set,
            `validation` as held out.
        detect: open each source to detect its encoding and layout, as `examined` does. If False, no source is opened.
        workers: number of processes that examine more than `SOURCES_PER_TASK` sources.
    """
    if not inputs:
        raise InputError("no input is given", where="INPUT", remedy="name files, folders, globs or dataset:NAME")
    sources: list[Source] = []
    held_out: list[Source] = []
    for item in inputs:
        item_sources = _find(item, config)
        if item_sources[0].split and not every_split:
            item_sources = _for_training(item, item_sources, holds_out=not config.validation)
        item_sources = [replace(source, weight=config.input_weights.get(item, 1.0)) for source in item_sources]
        sources += (source for source in item_sources if not source.is_validation)
        held_out += (source for source in item_sources if source.is_validation)
    if config.fraction < 1.0:
        sources = _some_of(sources, config.fraction)
    for item in config.validation:
        item_sources = _find(item, config)
        # Of a dataset, only the validation split is held out; without one, all its splits are.
        item_sources = [each for each in item_sources if each.split in hub_datasets.VALIDATION] or item_sources
        held_out += (replace(source, is_validation=True) for source in item_sources)
    sources += held_out
    _check_names(inputs, sources, config)
    if unversioned := [source.location for source in sources if not source.version]:
        print(f"changes of {', '.join(unversioned[:3])} cannot be detected: no version is known")
    if not detect:
        return sources
    sources = examined(sources, config, whole_words=whole_words, workers=workers)
    others = Counter(source.encoding for source in sources if source.encoding != UTF8)
    if config.encoding == AUTO and others:
        print("; ".join(f"{number} of {len(sources)} inputs in {name}" for name, number in others.items()))
    return sources


def _check_names(inputs: Sequence[str], sources: Sequence[Source], config: DataConfig) -> None:
    """Raise an error for too many inputs, an input that is given twice, or a configuration key that is no input."""
    if len(sources) > MAX_SOURCES:
        remedy = "join small files, for example as JSON lines with a field text"
        what = f"there are {len(sources):,} inputs, the maximum is {MAX_SOURCES:,}"
        raise InputError(what, where=sources[0].location, remedy=remedy)
    names = [_full_name(source) for source in sources]
    name, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise InputError("an input is given twice", where=name, remedy="name it once")
    boundaries = config.document_boundary if isinstance(config.document_boundary, dict) else {}
    known = {*inputs, *config.validation, *(source.location for source in sources)}
    # Files below an input that are empty, or left out by `data.fraction`, are not in `sources`.
    known |= {key for key in boundaries if os.path.isfile(key) and any(map(Path(key).is_relative_to, inputs))}
    for key, unknown in (
        ("input_weights", set(config.input_weights) - set(inputs)),
        ("document_boundary", set(boundaries) - known),
    ):
        if unknown:
            remedy = f"write it exactly as the input: {', '.join(inputs)}"
            raise ConfigError(f"'{min(unknown)}' is not an input", where=f"data.{key}", remedy=remedy)


def _full_name(source: Source) -> str:
    """Return a name of a source that does not depend on how it is written."""
    if source.format == "dataset":
        return hub_datasets.absolute(source.location.removeprefix(hub_datasets.DATASET))
    return os.path.realpath(source.location) if source.is_local else source.location


def _for_training(item: str, sources: list[Source], *, holds_out: bool) -> list[Source]:
    """Return the training split of a dataset and, with `holds_out`, the validation split."""
    splits = {source.split: source for source in sources}
    held_out = hub_datasets.held_out_split(item, list(splits), holds_out=holds_out)
    return [splits[hub_datasets.TRAIN], *([replace(splits[held_out], is_validation=True)] if held_out else [])]


def is_mix(sources: Sequence[Source], config: DataConfig) -> bool:
    """Return whether some of the inputs, but not all, have a validation split."""
    held_out = {source.location.removesuffix(f"@{source.split}") for source in sources if source.is_validation}
    training = {source.location.removesuffix(f"@{source.split}") for source in sources if not source.is_validation}
    return not config.validation and bool(training & held_out) and not training <= held_out


def _find(item: str, config: DataConfig) -> list[Source]:
    """Return the sources of an input. Their boundary is the one configured for the source, or else for the input."""
    configured = config.document_boundary
    boundaries = configured if isinstance(configured, dict) else {}
    default = boundaries.get(item, "auto") if isinstance(configured, dict) else configured
    if not is_url(item) and not item.startswith(hub_datasets.DATASET):
        item = os.path.expanduser(item)
    if is_url(item):
        locations = matching_urls(item)
    elif hub_datasets.is_dataset(item):
        splits = hub_datasets.split_names(item) or [""]
        locations = [f"{item}@{split}" if split else item for split in splits]
        return [_source(name, default, "dataset", split) for name, split in zip(locations, splits, strict=True)]
    elif os.path.isdir(item):
        locations = _files_below(Path(item))
    elif os.path.isfile(item) and item != "/dev/stdin":
        locations = [item]
    elif os.path.exists(item) or item == "-":
        remedy = "write the text to a file, such as text.txt, and name the file"
        raise InputError("a pipe or device cannot be read several times, as inputs are", where=item, remedy=remedy)
    else:
        locations = []
        for match in sorted(glob.glob(str(Path(item)), recursive=True)):
            if os.path.isfile(match):
                locations.append(str(Path(match)))
            elif not os.path.exists(match):
                raise InputError("the link leads to nothing", where=match, remedy="repair the link, or remove it")
            elif "**" not in item and not is_output(Path(match)):  # `**` finds the files of folders itself
                locations += _files_below(Path(match), may_be_empty=True)
        if not locations:
            raise InputError("there is no such file or folder", where=item, remedy="check the path")
    sources = [_source(location, boundaries.get(location, default)) for location in locations]
    empty = [source.location for source in sources if source.size == 0]
    if len(empty) == len(sources):
        raise InputError("the file is empty", where=empty[0], remedy="leave it out, or write it again")
    if empty:
        print(f"skipped: {len(empty)} empty files (first: {empty[0]})")
    return [source for source in sources if source.size != 0]


def _source(location: str, boundary: str, format_: str | None = None, split: str = "") -> Source:
    format_ = format_ or _format_of(location)
    if format_ is None:
        name = location.rsplit("/", 1)[-1]
        remedy = "unpack it if it is an archive; otherwise rename it to its format, such as NAME.txt or NAME.txt.gz; "
        remedy += f"supported: {SUPPORTED}"
        raise InputError(f"the ending of '{name}' is unknown", where=location, remedy=remedy)
    source = Source(location, format_, boundary=boundary, split=split)
    size, version = _size_and_version(source)
    return replace(source, size=size, version=version)


def _size_and_version(source: Source) -> tuple[int | None, str]:
    if source.format == "dataset":
        return None, hub_datasets.version_of(source.location)
    if is_url(source.location):
        return size_and_version(source.location)
    status = os.stat(source.location)
    return status.st_size, f"mtime:{status.st_mtime_ns}"


def _files_below(path: Path, *, may_be_empty: bool = False) -> list[str]:
    """Return the readable files of a folder and its subfolders, in a fixed order."""
    files: list[str] = []
    outputs: list[str] = []
    unread: list[str] = []
    errors: list[OSError] = []
    datasets: list[str] = []
    for folder, subfolders, names in os.walk(path, onerror=errors.append):
        if hub_datasets.is_dataset(folder):
            datasets.append(folder)
            subfolders.clear()
            continue
        unread += [link for name in subfolders if os.path.islink(link := os.path.join(folder, name))]
        unread += [os.path.join(folder, name) for name in names if not _format_of(name) and _format_of(name.lower())]
        # Skip hidden folders (such as the token store), output folders (with files such as vocab.txt), files of `run`.
        visible = [name for name in subfolders if not name.startswith(".")]
        subfolders[:] = [name for name in visible if not is_output(Path(folder, name))]
        skipped = [name for name in visible if name not in subfolders]
        if skipped or {"plan.yaml", "forecast.json"} <= set(names):
            skipped += [name for name in names if name in ("time.json", "forecast.json", "machine.json")]
        outputs += [os.path.join(folder, name) for name in skipped]
        texts = [name for name in names if not name.startswith(".") and _format_of(name) and name not in skipped]
        paths = [os.path.join(folder, name) for name in texts]
        unread += [path for path in paths if os.path.islink(path) and not os.path.exists(path)]
        files += filter(os.path.isfile, paths)
    if outputs:
        print(f"skipped outputs of bert-pretrain: {', '.join(sorted(outputs))}")
    if unread := [str(error.filename) for error in errors] + unread:
        reasons = "links to folders or to nothing, endings in capitals or no permission"
        print(f"not read ({reasons}): {len(unread)} files or folders (first: {unread[0]})")
    if datasets:
        print(f"not read: {len(datasets)} saved datasets (first: {datasets[0]}); name each as dataset:FOLDER")
    if not files and not may_be_empty:
        raise InputError("the folder has no readable file", where=str(path), remedy=f"supported: {SUPPORTED}")
    files.sort(key=lambda file: file.split(os.sep))
    by_target = {os.path.realpath(file): file for file in reversed(files)}
    if len(by_target) < len(files):
        print(f"skipped links to other files of the folder: {len(files) - len(by_target)}")
    return list(reversed(by_target.values()))


def _format_of(name: str) -> str | None:
    compression = next((ending for ending in COMPRESSIONS if name.endswith(ending)), "")
    return FORMATS.get(os.path.splitext(name.removesuffix(compression))[1])


def is_compressed(location: str) -> bool:
    return location.endswith(COMPRESSIONS)


def _some_of(sources: list[Source], fraction: float) -> list[Source]:
    """Return sources that together read a fraction of the text: a part of each source, or some of many sources."""
    if len(sources) <= MAX_SAMPLED_SOURCES:
        return [replace(source, fraction=fraction) for source in sources]
    n = math.ceil(fraction * len(sources))
    return [replace(source, fraction=fraction * len(sources) / n) for source in evenly_spaced(sources, n)]


def evenly_spaced(items: Sequence[T], n: int) -> list[T]:
    """Return `n` of the items at equal distances, or all items if there are fewer."""
    n = min(n, len(items))
    return [items[int((index + 0.5) * len(items) / n)] for index in range(n)]


def examined(
    sources: Sequence[Source], config: DataConfig, *, whole_words: bool = False, workers: int = 1
) -> list[Source]:
    """Detect encoding, layout and delimiter in the first bytes of sources, and return the sources with these settings.

    All text files have the same layout, except those that clearly have the other one.
    """
    examine = partial(_detected, config=config)
    tasks = [sources[first : first + SOURCES_PER_TASK] for first in range(0, len(sources), SOURCES_PER_TASK)]
    sizes = list(map(len, tasks))
    on_all_cores = run_each(examine, tasks, workers=workers, description="inputs", unit="input", weights=sizes)
    parts = on_all_cores if len(tasks) > 1 else map(examine, tasks)
    detected = list(itertools.chain.from_iterable(parts))
    evidence = sum(source.evidence for source in detected)
    return [_with_layout(source, evidence, config, whole_words) for source in detected]


def _detected(sources: Sequence[Source], config: DataConfig) -> list[Source]:
    """Return sources with their encoding, JSON format and delimiter, and the evidence for their layout."""
    return [_detected_alone(source, config) for source in sources]


def _with_layout(source: Source, evidence: float, config: DataConfig, whole_words: bool) -> Source:
    """Return a source with its layout, which is that of all sources with their `evidence` if its own is not clear."""
    is_clear = not CLEARLY_PARAGRAPHS <= source.evidence <= CLEARLY_LINES
    is_text = source.format == "txt"
    is_split = whole_words or (is_text and (source.evidence if is_clear else evidence) >= 0)
    boundary = source.boundary if is_text else "record"
    if boundary == "auto":
        boundary = "blank_line" if is_split else "file"
    splitter = str(config.sentence_splitter)
    if splitter == "auto":
        splitter = "lines" if is_split else "sentencex"
    return replace(source, boundary=boundary, splitter=splitter)


def _detected_alone(source: Source, config: DataConfig) -> Source:
    if source.format not in TEXT_FORMATS:
        return source
    sample = _sample(source)
    source = replace(source, encoding=encoding_of(sample, config.encoding, source.location))
    text = decode(sample, source.encoding)
    if source.format == "csv":
        return replace(source, delimiter=delimiter_of(text))
    if source.format == "jsonl" and _WHOLE_JSON.match(text):
        return replace(source, format="json")
    if source.format == "txt":
        if "\n" not in text and text.rstrip("\r").count("\r") > 1:
            remedy = "convert it, after unpacking: tr '\\r' '\\n' < old.txt > new.txt"
            raise InputError("its lines end in CR without LF", where=source.location, remedy=remedy)
        if "auto" in (source.boundary, config.sentence_splitter):
            return replace(source, evidence=evidence_of_lines(text, config.language))
    return source


def few_documents(num_documents: int) -> str:
    """Return a warning that the inputs have few documents, or "" if they have enough."""
    documents = "1 document" if num_documents == 1 else f"{num_documents} documents"
    return f"the inputs have only {documents}" if num_documents < MIN_CORPUS_DOCUMENTS else ""


def finer_boundary(sources: Sequence[Source]) -> str:
    """Return a hint to the setting that divides text files into more documents, or "" if no setting does."""
    boundaries = {source.boundary for source in sources if source.format == "txt"}
    if boundaries <= {"line"}:
        return ""
    if boundaries <= {"line", "blank_line"}:
        return "--set data.document_boundary=line, if line ends separate documents"
    return "--set data.document_boundary=blank_line (or line), if blank lines (or line ends) separate documents"


def sample_text(source: Source) -> str:
    return decode(_sample(source), source.encoding)


def _sample(source: Source) -> bytes:
    with open_input(source.location) as file:
        try:
            return file.read(1 << 18)
        except READ_ERRORS as error:
            raise damaged(source, error) from error


def damaged(source: Source, error: Exception) -> Exception:
    """Return the error to raise for one of `READ_ERRORS`. If the disk is full, the file is not called damaged."""
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return error
    remedy = "if it is damaged, get it again"
    if "too much memory" in str(error):
        remedy = "zstd's window is at most 128 MiB; compress it again: zstd -dc --long=31 OLD.zst | zstd -o NEW.zst"
    return InputError(f"cannot read the file: {error}", where=source.location, remedy=remedy)
