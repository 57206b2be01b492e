"""The inputs of a command: files, globs, folders, URLs and `datasets` names, resolved to sources in a fixed order.

A source has an identity, an encoding, a document boundary and a sentence splitter. Settings with the value `auto` are
detected in the first bytes of its text.
"""

import contextlib
import glob
import lzma
import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bert_pretrain.config import DataConfig
from bert_pretrain.errors import ConfigError, InputError
from bert_pretrain.io.cores import available_cores
from bert_pretrain.io.files import DISK_FULL, is_url
from bert_pretrain.io.inputs import COMPRESSIONS, matching_urls, open_input, size_and_version
from bert_pretrain.io.manifest import is_output
from bert_pretrain.io.pool import run_each
from bert_pretrain.text import hub_datasets
from bert_pretrain.text.encodings import AUTO, UTF8, decode, encoding_of
from bert_pretrain.text.layout import CLEARLY_LINES, CLEARLY_PARAGRAPHS, delimiter_of, evidence_of_lines
from bert_pretrain.text.reasons import count_reason, describe_reasons

FORMATS = {
    ".txt": "txt",
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
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
_SAMPLE_BYTES = 1 << 18
_RUN_FILES = {"plan.yaml", "forecast.json", "machine.json", "time.json"}  # that `run` writes next to its outputs
T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """One input file, URL, saved dataset or dataset name."""

    location: str
    format: str  # txt, jsonl, json (array or long objects), csv, tsv, parquet or dataset
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

    def copied_to(self, path: Path, format_: str) -> "Source":
        """A local copy of the source in UTF-8, which is read completely."""
        copy = replace(
            self,
            location=str(path),
            format=format_,
            encoding=UTF8,
            fraction=1.0,
            split="",
        )
        return copy.measured()

    def measured(self) -> "Source":
        """The source with its present size and version."""
        if self.format == "dataset":
            return replace(self, version=hub_datasets.version_of(self.location))
        if is_url(self.location):
            size, version = size_and_version(self.location)
            return replace(self, size=size, version=version)
        status = os.stat(self.location)
        return replace(self, size=status.st_size, version=f"mtime:{status.st_mtime_ns}")

    def check_unchanged(self) -> None:
        """Raise an InputError if the size or version has changed since the source was resolved."""
        with contextlib.suppress(OSError):
            if self.measured() == self:
                return
        raise InputError(
            "the input changed while it was read",
            where=self.location,
            remedy="run the command again once the input no longer changes",
        )

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
) -> list[Source]:
    """Resolve files, globs, folders, URLs and `dataset:` names to sources in a fixed order, held-out sources last.

    Args:
        whole_words: each word is a token; `auto` means that each line is a sentence and blank lines end documents.
        every_split: return all splits of a dataset; otherwise `train` and, unless `config.validation` is set,
            `validation` as held out.
        detect: open each source to detect its encoding and layout, as `examined` does. If False, no source is opened.
    """
    if not inputs:
        raise InputError("no input is given", where="INPUT", remedy="name files, folders, globs or dataset:NAME")
    training: list[Source] = []
    held_out: list[Source] = []
    for item in inputs:
        found = _find(item, config)
        if found[0].split and not every_split:
            found = _for_training(item, found, holds_out=not config.validation)
        for source in found:
            group = held_out if source.is_validation else training
            group.append(replace(source, weight=config.input_weights.get(item, 1.0)))
    if config.fraction < 1.0:
        training = _some_of(training, config.fraction)
    for item in config.validation:
        found = _find(item, config)
        # Of a dataset, only the validation split is held out; without one, all its splits are.
        found = [source for source in found if source.split in hub_datasets.VALIDATION] or found
        held_out += (replace(source, is_validation=True) for source in found)
    sources = training + held_out
    _check_names(inputs, sources, config)
    if unversioned := [source.location for source in sources if not source.version]:
        print(f"changes of {', '.join(unversioned[:3])} cannot be detected: no version is known")
    if not detect:
        return sources
    sources = examined(sources, config, whole_words=whole_words)
    others = Counter(source.encoding for source in sources if source.encoding != UTF8)
    if config.encoding == AUTO and others:
        print("; ".join(f"{number} of {len(sources)} inputs in {name}" for name, number in others.items()))
    return sources


def _check_names(inputs: Sequence[str], sources: Sequence[Source], config: DataConfig) -> None:
    """Raise an error for too many inputs, an input that is given twice, or a configuration key that is no input."""
    if len(sources) > MAX_SOURCES:
        raise InputError(
            f"there are {len(sources):,} inputs, the maximum is {MAX_SOURCES:,}",
            where=sources[0].location,
            remedy="join small files, for example as JSON lines with a field text",
        )
    name, times = Counter(map(_full_name, sources)).most_common(1)[0]
    if times > 1:
        raise InputError("an input is given twice", where=name, remedy="name it once")
    boundaries = config.document_boundary if isinstance(config.document_boundary, dict) else {}
    known = {*inputs, *config.validation, *(source.location for source in sources)}
    # Files below an input that are empty, or left out by `data.fraction`, are not in `sources`.
    known |= {key for key in boundaries if os.path.isfile(key) and any(map(Path(key).is_relative_to, inputs))}
    for key, names, allowed in (
        ("input_weights", config.input_weights, inputs),
        ("document_boundary", boundaries, known),
    ):
        if unknown := set(names).difference(allowed):
            raise ConfigError(
                f"'{min(unknown)}' is not an input",
                where=f"data.{key}",
                remedy=f"write it exactly as the input: {', '.join(inputs)}",
            )


def _full_name(source: Source) -> str:
    """Return a name of a source that does not depend on how it is written."""
    if source.format == "dataset":
        return hub_datasets.absolute(source.location.removeprefix(hub_datasets.DATASET))
    return os.path.realpath(source.location) if source.is_local else source.location


def _for_training(item: str, sources: Sequence[Source], *, holds_out: bool) -> list[Source]:
    """Return the training split of a dataset and, with `holds_out`, the validation split."""
    splits = {source.split: source for source in sources}
    held_out = hub_datasets.held_out_split(item, list(splits), holds_out=holds_out)
    found = [splits[hub_datasets.TRAIN]]
    if held_out is not None:
        found.append(replace(splits[held_out], is_validation=True))
    return found


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
    item = os.path.expanduser(item)
    if hub_datasets.is_dataset(item):
        splits = hub_datasets.split_names(item)
        sources = [Source(f"{item}@{split}", "dataset", boundary=default, split=split) for split in splits]
        return [source.measured() for source in sources or [Source(item, "dataset", boundary=default)]]
    locations = matching_urls(item) if is_url(item) else _local_files(item)
    sources = []
    for location in locations:
        if (format_ := _format_of(location)) is None:
            what = f"the ending of '{location.rsplit('/', 1)[-1]}' is unknown"
            remedy = (
                "unpack it if it is an archive; otherwise rename it to its format, such as NAME.txt or NAME.txt.gz; "
            )
            raise InputError(what, where=location, remedy=f"{remedy}supported: {SUPPORTED}")
        sources.append(Source(location, format_, boundary=boundaries.get(location, default)).measured())
    empty = [source.location for source in sources if source.size == 0]
    if len(empty) == len(sources):
        raise InputError("the file is empty", where=empty[0], remedy="leave it out, or write it again")
    if empty:
        print(f"not read: {len(empty)} empty files (first: {empty[0]})")
    return [source for source in sources if source.size != 0]


def _local_files(item: str) -> list[str]:
    """Return the files of a path or glob, in a fixed order."""
    if os.path.isdir(item):
        return _files_below(Path(item))
    if os.path.isfile(item):
        return [item]
    locations: list[str] = []
    for match in map(Path, sorted(glob.glob(str(Path(item)), recursive=True))):
        if match.is_file():
            locations.append(str(match))
        elif not match.is_dir():
            raise InputError(
                "it is neither a file nor a folder",
                where=str(match),
                remedy="repair the link; write the text of a pipe or device, which cannot be read twice, to a file",
            )
        elif "**" not in item and not is_output(match):  # `**` finds the files of folders itself
            locations += _files_below(match, may_be_empty=True)
    if not locations:
        raise InputError("there is no such file or folder", where=item, remedy="check the path")
    return locations


def _files_below(path: Path, *, may_be_empty: bool = False) -> list[str]:
    """Return the readable files of a folder and its subfolders, in a fixed order.

    Hidden files and folders, such as the token store, are skipped. Output folders are too: they have files such as
    vocab.txt.
    """
    files: list[str] = []
    skipped: Counter[str] = Counter()
    errors: list[OSError] = []
    for folder, subfolders, names in os.walk(path, onerror=errors.append):
        if hub_datasets.is_dataset(folder):
            count_reason(skipped, "saved datasets, which can be named as dataset:FOLDER", folder)
            subfolders.clear()
            continue
        visible = [name for name in sorted(subfolders) if not name.startswith(".")]
        outputs = {name for name in visible if is_output(Path(folder, name))}
        if outputs or "plan.yaml" in names:
            outputs |= _RUN_FILES.intersection(names)
        subfolders[:] = [name for name in visible if name not in outputs]
        texts = [name for name in names if _format_of(name) and not name.startswith(".")]
        for name in [*visible, *texts]:
            file = os.path.join(folder, name)
            if name in outputs:
                count_reason(skipped, "outputs of bert-pretrain", file)
            elif os.path.isfile(file):
                files.append(file)
            elif os.path.islink(file):
                count_reason(skipped, "links to folders or to nothing", file)
    for error in errors:
        count_reason(skipped, "folders without permission", str(error.filename))
    files.sort(key=lambda file: file.split(os.sep))
    by_target: dict[str, str] = {}
    for file in files:
        if by_target.setdefault(os.path.realpath(file), file) != file:
            count_reason(skipped, "links to other files of the folder", file)
    for line in describe_reasons(skipped):
        print(f"not read: {line}")
    if not files and not may_be_empty:
        raise InputError("the folder has no readable file", where=str(path), remedy=f"supported: {SUPPORTED}")
    return list(by_target.values())


def _format_of(name: str) -> str | None:
    stem, ending = os.path.splitext(name.lower())
    if ending in COMPRESSIONS:
        ending = os.path.splitext(stem)[1]
    return FORMATS.get(ending)


def is_compressed(location: str) -> bool:
    return location.lower().endswith(COMPRESSIONS)


def _some_of(sources: list[Source], fraction: float) -> list[Source]:
    """Return sources that together read a fraction of the text: a part of each source, or some of many sources."""
    if len(sources) > MAX_SAMPLED_SOURCES:
        wanted = fraction * len(sources)
        sources = evenly_spaced(sources, math.ceil(wanted))
        fraction = wanted / len(sources)
    return [replace(source, fraction=fraction) for source in sources]


def evenly_spaced(items: Sequence[T], n: int) -> list[T]:
    """Return `n` of the items at equal distances, or all items if there are fewer."""
    n = min(n, len(items))
    return [items[int((index + 0.5) * len(items) / n)] for index in range(n)]


def examined(sources: Sequence[Source], config: DataConfig, *, whole_words: bool = False) -> list[Source]:
    """Detect encoding, layout and delimiter in the first bytes of sources, and return the sources with these settings.

    All text files have the same layout, except those that clearly have the other one. More than `SOURCES_PER_TASK`
    sources are examined on all cores.
    """
    tasks = [sources[first : first + SOURCES_PER_TASK] for first in range(0, len(sources), SOURCES_PER_TASK)]
    detect = partial(_detected, config=config)
    results: Iterable[list[Source]] = map(detect, tasks)
    if len(tasks) > 1:
        results = run_each(
            detect,
            tasks,
            workers=available_cores(),
            description="inputs",
            unit="thousand",
        )
    detected = [source for result in results for source in result]
    evidence = sum(source.evidence for source in detected)
    return [_with_layout(source, evidence, config, whole_words) for source in detected]


def _detected(sources: Sequence[Source], config: DataConfig) -> list[Source]:
    """Return sources with their encoding, JSON format and delimiter, and the evidence for their layout."""
    return [_detected_alone(source, config) if source.format in TEXT_FORMATS else source for source in sources]


def _detected_alone(source: Source, config: DataConfig) -> Source:
    sample = _sample(source)
    source = replace(source, encoding=encoding_of(sample, config.encoding, source.location))
    text = decode(sample, source.encoding)
    if source.format == "csv":
        return replace(source, delimiter=delimiter_of(text))
    if source.format == "jsonl" and _WHOLE_JSON.match(text):
        return replace(source, format="json")
    if source.format == "txt" and "auto" in (source.boundary, config.sentence_splitter):
        return replace(source, evidence=evidence_of_lines(text, config.language))
    return source


def _with_layout(
    source: Source,
    evidence: float,
    config: DataConfig,
    whole_words: bool,
) -> Source:
    """Return a source with its layout, which is that of all sources with their `evidence` if its own is not clear."""
    if not CLEARLY_PARAGRAPHS <= source.evidence <= CLEARLY_LINES:
        evidence = source.evidence
    is_text = source.format == "txt"
    is_split = whole_words or (is_text and evidence >= 0)
    boundary = source.boundary if is_text else "record"
    if boundary == "auto":
        boundary = "blank_line" if is_split else "file"
    splitter = str(config.sentence_splitter)
    if splitter == "auto":
        splitter = "lines" if is_split else "sentencex"
    return replace(source, boundary=boundary, splitter=splitter)


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
            return file.read(_SAMPLE_BYTES)
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
