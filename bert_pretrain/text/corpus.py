"""The text of a command, resolved once: its sources with their layout, its language, and samples of it.

`Corpus.open` finds and examines the inputs. After it, each source has its encoding and boundary, and `data.language` is
set. `Corpus.texts` is a little text in memory. `Corpus.sample` copies a part of the text, to run a stage on it.
"""

import codecs
import contextlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from bert_pretrain.config import AUTO_LANGUAGE, SINGLE_CHARACTERS, DataConfig, names_of
from bert_pretrain.errors import InputError
from bert_pretrain.io.inputs import decompress, open_raw
from bert_pretrain.io.pool import progress_bar
from bert_pretrain.text import documents, languages, readers
from bert_pretrain.text.encodings import as_utf8
from bert_pretrain.text.sources import READ_ERRORS, TEXT_FORMATS, Source, damaged, resolve
from bert_pretrain.text.text_files import ByteRange, last_character

PIECE_CHARACTERS = 1 << 15  # of the pieces of `Corpus.texts`; a piece of a sample has as many bytes
MIN_PIECES, MAX_PIECES = 16, 512
_BLOCK_BYTES = 1 << 13


@dataclass
class Corpus:
    """The inputs of a command and how they are read."""

    sources: tuple[Source, ...]  # the held-out ones last
    config: DataConfig  # with the language

    @staticmethod
    def open(
        inputs: Sequence[str],
        config: DataConfig,
        *,
        whole_words: bool = False,
        finds_language: bool = True,
    ) -> "Corpus":
        """Resolve the inputs and detect their language, unless it is set. With `whole_words`, each word is a token."""
        corpus = Corpus(tuple(resolve(inputs, config, whole_words=whole_words)), config)
        if finds_language:
            corpus.config = corpus._with_language()
        return corpus

    @property
    def training(self) -> "Corpus":
        """The corpus without the held-out sources."""
        return replace(self, sources=tuple(source for source in self.sources if not source.is_validation))

    @property
    def record(self) -> dict[str, Any]:
        """What the text is and how it is read, for the manifests of a vocabulary and of data."""
        inputs = [
            {
                "location": source.location,
                **source.identity,
                "split": "validation" if source.is_validation else "train",
                "weight": source.weight,
            }
            for source in self.sources
        ]
        return {"language": self.config.language, "word_segmenter": self.config.word_segmenter, "inputs": inputs}

    def _with_language(self) -> DataConfig:
        """Return the configuration with language and word segmenter, detected in a sample unless they are set."""
        update: dict[str, str] = {}
        if self.config.language == AUTO_LANGUAGE:
            update["language"] = languages.detect(self.texts)
        else:
            update["language"] = languages.short_code(self.config.language)
        if self.config.whole_word_mask and self.config.word_segmenter is None:
            is_chinese = languages.chinese_share(self.texts) > languages.MIN_CHINESE_SHARE
            update["word_segmenter"] = "jieba" if is_chinese else SINGLE_CHARACTERS
            print(f"data.word_segmenter is {update['word_segmenter']}")
        return self.config.model_copy(update=update)

    @cached_property
    def texts(self) -> list[str]:
        """The text at the starts of some training sources, in pieces of at most 32,768 characters."""
        config = self.config.model_copy(update={"strict": False})
        pieces: list[str] = []
        for _, source, number in _chosen(self.training.sources, MIN_PIECES):
            text = ""
            for document in documents.read(ByteRange(source), config, Counter()):
                text += f"{document.text}\n"
                if len(text) >= number * PIECE_CHARACTERS:
                    break
            text = text[: number * PIECE_CHARACTERS]
            pieces += [text[begin : begin + PIECE_CHARACTERS] for begin in range(0, len(text), PIECE_CHARACTERS)]
        return pieces

    def sample(self, folder: Path, num_bytes: int) -> "Sample":
        """Copy the starts of some sources, about `num_bytes` in UTF-8, to a folder.

        The copies represent the bytes of the training sources and, apart from them, of the held-out sources.
        """
        num_pieces = min(MAX_PIECES, max(MIN_PIECES, num_bytes // PIECE_CHARACTERS))
        copies: list[Source] = []
        originals: list[Source] = []
        shares: list[float] = []
        scales: list[float] = []
        for is_validation in (False, True):
            group = [source for source in self.sources if source.is_validation is is_validation]
            if not group:
                continue
            sizes = _known_sizes(group)
            chosen_bytes = copied_bytes = read_bytes = 0.0  # of the sources whose start is copied
            for index, source, number in progress_bar(_chosen(group, num_pieces), desc="sample", unit="input"):
                format_ = source.format if source.format in ("txt", "csv", "tsv") else "jsonl"
                path = folder / f"{len(copies)}.{format_}"
                copy, share = copy_start(source, path, number * num_bytes // num_pieces, self.config)
                copies.append(copy)
                originals.append(source)
                shares.append(share)
                chosen_bytes += sizes[index]
                copied_bytes += sizes[index] * share
                read_bytes += sizes[index] * source.fraction_read  # by a stage
            scales.append(float(sizes.sum() / chosen_bytes * read_bytes / copied_bytes))
        corpus = Corpus(tuple(copies), self.config)
        return Sample(
            corpus,
            tuple(originals),
            tuple(shares),
            scales[0],
            scales[-1],
        )


class Sample(NamedTuple):
    """Copies of the starts of some sources of a corpus."""

    corpus: Corpus
    originals: tuple[Source, ...]  # the source of each copy
    shares: tuple[float, ...]  # the part of it that is in its copy
    scale: float  # training text that a stage reads, relative to the copies
    validation_scale: float  # the same of the held-out text

    def read(self, copy: Source) -> Iterator[documents.DocumentPiece]:
        """Read the documents of a copy. An error names the original."""
        with self.naming_originals():
            yield from documents.read(ByteRange(copy), self.corpus.config, Counter())

    @contextlib.contextmanager
    def naming_originals(self) -> Iterator[None]:
        """Name the original in an error about a copy."""
        try:
            yield
        except InputError as error:
            for copy, original in zip(self.corpus.sources, self.originals, strict=True):
                error.where = error.where.replace(copy.location, original.location)
            raise

    @property
    def is_part(self) -> bool:
        """Whether the copies lack some of the text."""
        return max(self.scale, self.validation_scale) > 1.0


def _known_sizes(sources: Sequence[Source]) -> np.ndarray:
    """Return the sizes of sources in bytes, (sources,) float64; an unknown size becomes the mean of the others."""
    sizes = np.array([source.size or 0 for source in sources], dtype=np.float64)
    known = sizes[sizes > 0]
    sizes[sizes == 0] = known.mean() if len(known) else 1.0
    return sizes


def _chosen(sources: Sequence[Source], num_pieces: int) -> list[tuple[int, Source, int]]:
    """Return (index, source, pieces) of the sources in which pieces at equal distances lie."""
    ends = np.cumsum(_known_sizes(sources))
    middles = (np.arange(num_pieces) + 0.5) * ends[-1] / num_pieces
    pieces = Counter(np.searchsorted(ends, middles, side="right").tolist())
    return [(index, sources[index], number) for index, number in pieces.items()]


def copy_start(
    source: Source,
    path: Path,
    size: int,
    config: DataConfig,
) -> tuple[Source, float]:
    """Copy the start of a source to `path` in UTF-8. Return the copy, and its share of the source."""
    if source.format not in TEXT_FORMATS:
        return _copy_rows(source, path, size, config)
    try:
        with open_raw(source.location) as raw, as_utf8(decompress(raw, source.location), source.encoding) as file:
            if source.format == "json":
                content = _first_elements(file, source, size, config.max_record_bytes)
            else:
                content = file.read(size)
                content += _rest_of_record(file, content, source.format, config.max_record_bytes)
            is_cut = bool(file.read(1))
            share = _share(raw, file, len(content), source.size) if is_cut else 1.0
    except READ_ERRORS as error:
        raise damaged(source, error) from error
    if is_cut and source.format == "txt":
        content = content[: content.rfind(b"\n") + 1 or content.rfind(b" ") + 1 or last_character(content)]
    path.write_bytes(content)
    return source.copied_to(path, "jsonl" if source.format == "json" else source.format), share


def _copy_rows(
    source: Source,
    path: Path,
    size: int,
    config: DataConfig,
) -> tuple[Source, float]:
    """Copy the text of the first rows of a table as JSON lines. Return the copy, and its share of the source."""
    field = names_of(config.text_field)[0]
    num_documents = num_bytes = 0
    with path.open("w", encoding="utf-8") as file:
        for document in documents.read(ByteRange(source), config, Counter()):
            num_documents += document.ends_document
            num_bytes += file.write(json.dumps({field: document.text}) + "\n")
            if num_bytes > size:
                break
    share = min(1.0, max(1, num_documents) / max(1.0, readers.num_rows(source)))
    return source.copied_to(path, "jsonl"), share


def _share(
    raw: BinaryIO,
    file: BinaryIO,
    num_bytes: int,
    size: int | None,
) -> float:
    """Estimate which share of an input the first `num_bytes` bytes of `file` are. The caller has read these bytes.

    The share is measured by the position of `raw`. A decompressor reads `raw` in blocks of up to 900 KB, so this
    position is ahead of the output. To reduce the error, the function reads at least 2 MiB more. It continues until the
    position changes, but stops after 64 MiB, because a kilobyte can decompress to gigabytes.
    """
    position, total_bytes = raw.tell(), num_bytes
    measured = None
    while total_bytes < num_bytes + ((2 << 20) if measured else (64 << 20)):
        block = file.read(_BLOCK_BYTES)
        if not block:
            return num_bytes / total_bytes
        if raw.tell() != position:
            measured = (position, total_bytes)
            position = raw.tell()
        total_bytes += len(block)
    position, total_bytes = measured or (position, total_bytes)
    return min(1.0, position / size * num_bytes / total_bytes) if size else 1.0


def _first_elements(
    file: BinaryIO,
    source: Source,
    size: int,
    max_bytes: int,
) -> bytes:
    """Return the first records of an array of objects, or of objects over several lines, as JSON lines."""
    blocks = codecs.iterdecode(iter(lambda: file.read(1 << 16), b""), "utf-8-sig", "replace")
    content = b""
    for element, _ in readers.json_values(blocks, ByteRange(source), max_bytes):
        content += re.sub(r"[\r\n]", " ", element).encode() + b"\n"
        if len(content) > size:
            break
    return content


def _rest_of_record(
    file: BinaryIO,
    content: bytes,
    format_: str,
    max_bytes: int,
) -> bytes:
    """Read the rest of the last record of `content`, up to the maximum size of a record."""
    if format_ == "txt":
        return b""
    rest = file.readline(max_bytes + 1)
    num_quotes = content.count(b'"') + rest.count(b'"')
    while format_ == "csv" and num_quotes % 2 and len(rest) <= max_bytes:  # a quoted field may contain line ends
        line = file.readline(max_bytes + 1)
        if not line:
            break
        num_quotes += line.count(b'"')
        rest += line
    return rest
