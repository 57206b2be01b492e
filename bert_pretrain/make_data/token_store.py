"""The token store: a cache of the tokenized text, written by `ingest.py`.

A store is a folder of store shards, one per group of byte ranges of the inputs. Its name is a hash of everything that
decides the ids. A store shard is a folder of `.npy` files: `ids`, `sentence_offsets` (into ids), `is_continuation` (per
sentence), `document_offsets` (into sentences), `document_hashes` and, with a segmenter, `continues_word` (per id).
"""

import importlib.metadata
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bert_pretrain import ragged
from bert_pretrain.config import DataConfig
from bert_pretrain.errors import DataError
from bert_pretrain.io.files import json_digest
from bert_pretrain.text.sources import Source
from bert_pretrain.text.tokenizer import Tokenizer

STORE_VERSION = 12


def store_key(sources: list[Source], tokenizer: Tokenizer, config: DataConfig) -> str:
    """Return the name of the store of these inputs: a hash of everything that decides the ids."""
    libraries = ["tokenizers", "sentencex", *(["rjieba"] if config.segments_words else [])]
    content = [
        STORE_VERSION,
        [source.identity for source in sources],
        tokenizer.hash,
        [config.language, config.text_field, config.strict, config.segments_words],
        [importlib.metadata.version(name) for name in libraries],
    ]
    return json_digest(content)[:16]


def store_shard_folder(store: Path, number: int) -> Path:
    return store / f"part-{number:05d}"


def split_long(offsets: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Split each list longer than `limit` into units of nearly equal length.

    Returns the offsets of the units (units + 1,), and the index of each list's first unit (lists + 1,).
    """
    lengths = np.diff(offsets)
    num_units = np.maximum(1, -(-lengths // limit))
    first_units = ragged.offsets_of(num_units)
    if first_units[-1] == len(lengths):
        return offsets, first_units
    list_of_unit = np.repeat(np.arange(len(lengths)), num_units)
    within = ragged.positions_within(first_units)
    starts = offsets[list_of_unit] + within * lengths[list_of_unit] // num_units[list_of_unit]
    return np.append(starts, offsets[-1]), first_units


@dataclass(frozen=True)
class ShardText:
    """The text of a shard: slices of documents, each followed by its look-ahead, the next text of the document."""

    ids: np.ndarray  # (tokens,)
    sentence_starts: np.ndarray  # (sentences + 1,) int64, in ids
    is_continuation: np.ndarray  # (sentences,) bool: continues a sentence that was too long for the store
    slice_offsets: np.ndarray  # (slices + 1,) int64: the sentences of each slice, look-ahead included
    num_slice_sentences: np.ndarray  # (slices,) int64: number of sentences of each slice without look-ahead
    documents: np.ndarray  # (slices,) int64: the number of each slice's document
    num_shard_slices: int  # the slices after these are donors: text of other shards for random Bs
    continues_word: np.ndarray | None = None  # (tokens,) bool: the token continues a word; None without a segmenter

    @cached_property
    def slice_ends(self) -> np.ndarray:
        """End of each slice in ids, look-ahead included, (slices,) int64."""
        return self.sentence_starts[self.slice_offsets[1:]]

    def slices_of(self, positions: np.ndarray) -> np.ndarray:
        """Return the slice at each position in ids, (positions,)."""
        return np.searchsorted(self.slice_ends, positions, side="right")

    def starts_sentence(self, positions: np.ndarray) -> np.ndarray:
        """Return whether a sentence starts at each position in ids, (positions,) bool."""
        sentences = np.searchsorted(self.sentence_starts, positions, side="right") - 1
        return (self.sentence_starts[sentences] == positions) & ~self.is_continuation[sentences]


class TokenStore:
    """Reads the documents of a store. Documents are numbered across all store shards.

    A store shard is open only while it is read: there may be thousands, and a process has few file descriptors.
    """

    def __init__(self, folder: Path, num_shards: int) -> None:
        self.folder = folder
        self.num_shards = num_shards
        # The dtype of each array and the byte offset of its values, the same in all store shards.
        self._formats: dict[str, tuple[np.dtype[Any], int]] = {}
        for file in store_shard_folder(folder, 0).glob("*.npy"):
            try:
                array = np.load(file, mmap_mode="r")
            except (ValueError, EOFError) as error:
                raise _too_short(str(file.parent), file.stem) from error
            self._formats[file.stem] = (array.dtype, array.offset)
        counts = [len(self.map(index, "document_offsets")) - 1 for index in range(num_shards)]
        self.first_documents = ragged.offsets_of(np.array(counts, dtype=np.int64))  # of each store shard, (shards + 1,)

    @property
    def num_documents(self) -> int:
        return int(self.first_documents[-1])

    def map(self, index: int, name: str) -> np.ndarray:
        """Return an array of a store shard as a memory map, which closes when the array is no longer used."""
        dtype, start = self._formats[name]
        folder = str(store_shard_folder(self.folder, index))
        with open(f"{folder}/{name}.npy", "rb", buffering=0) as file:
            try:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                return np.frombuffer(content, dtype, offset=start)
            except ValueError as error:
                raise _too_short(folder, name) from error

    def document_sizes(self, index: int, documents: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray]:
        """Return the sentence and token counts of documents, given by their positions in a store shard."""
        offsets, sentence_offsets = self.map(index, "document_offsets"), self.map(index, "sentence_offsets")
        starts, ends = offsets[:-1][documents], offsets[1:][documents]
        return ends - starts, sentence_offsets[ends] - sentence_offsets[starts]

    def sizes_of(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sentence and token counts of documents, both (numbers,) int64. `numbers` must ascend."""
        sentences, tokens = np.zeros_like(numbers), np.zeros_like(numbers)
        for index, rows in self._by_shard(numbers):
            local = numbers[rows] - self.first_documents[index]
            sentences[rows], tokens[rows] = self.document_sizes(index, local)
        return sentences, tokens

    def documents_longer_than(self, limit_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers, ascending, and the lengths in tokens of all documents longer than a limit."""
        numbers, tokens = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for index in range(self.num_shards):
            _, lengths = self.document_sizes(index, slice(None))
            long = np.flatnonzero(lengths > limit_tokens)
            numbers.append(long + self.first_documents[index])
            tokens.append(lengths[long])
        return np.concatenate(numbers), np.concatenate(tokens)

    def _by_shard(self, numbers: np.ndarray) -> Iterator[tuple[int, slice]]:
        """Yield each store shard that has some of the documents, and the slice of their ascending numbers."""
        bounds = np.searchsorted(numbers, self.first_documents)
        for index in np.flatnonzero(np.diff(bounds)).tolist():
            yield index, slice(bounds[index], bounds[index + 1])

    def read(self, slices: np.ndarray, look_ahead_tokens: int, num_donors: int = 0) -> ShardText:
        """Read slices of documents, each with the next `look_ahead_tokens` or more tokens of its document, if any.

        The rows of `slices`, (3, slices) int64, are the document, the index of the slice in it, and the document's
        number of slices. The slices of a document have nearly equal lengths. The last `num_donors` slices are donors.
        """
        order = np.argsort(slices[0], kind="stable")  # so that each store shard is opened once
        read: dict[int, _Slice] = {}
        for index, in_shard in self._by_shard(slices[0, order]):
            rows = order[in_shard]
            from_shard = self._read_from(index, slices[:, rows], look_ahead_tokens)
            read.update(zip(rows.tolist(), from_shard, strict=True))
        texts = [read[row] for row in range(len(order))]
        words = _concatenate([text.continues_word for text in texts], bool)
        return ShardText(
            ids=_concatenate([text.ids for text in texts], self._formats["ids"][0]),
            sentence_starts=ragged.offsets_of(_concatenate([text.lengths for text in texts], np.int64)),
            is_continuation=_concatenate([text.is_continuation for text in texts], bool),
            slice_offsets=ragged.offsets_of(np.array([len(text.lengths) for text in texts], np.int64)),
            num_slice_sentences=np.array([text.num_sentences for text in texts], np.int64),
            documents=slices[0],
            num_shard_slices=len(texts) - num_donors,
            continues_word=words if "continues_word" in self._formats else None,
        )

    def _read_from(self, index: int, slices: np.ndarray, look_ahead: int) -> Iterator["_Slice"]:
        """Yield slices, (3, slices) as in `read`, whose documents are in store shard `index`.

        Files are read by position, because mapping is slow for a few slices.
        """
        folder, files = str(store_shard_folder(self.folder, index)), dict[str, int]()

        def values(name: str, first: int, last: int) -> np.ndarray:
            dtype, start = self._formats[name]
            if name not in files:
                files[name] = os.open(f"{folder}/{name}.npy", os.O_RDONLY)
            size = (last - first) * dtype.itemsize
            content = os.pread(files[name], size, start + first * dtype.itemsize)
            if len(content) < size:
                raise _too_short(folder, name)
            return np.frombuffer(content, dtype)

        documents = (slices[0] - self.first_documents[index]).tolist()
        try:
            for document, slice_index, num_slices in zip(documents, *slices[1:].tolist(), strict=True):
                start, end = values("document_offsets", document, document + 2).tolist()
                first, slice_end, last = start, end, end
                if num_slices > 1:
                    offsets = self.map(index, "sentence_offsets")[start : end + 1]
                    edges = np.array([slice_index, slice_index + 1]) * int(offsets[-1] - offsets[0]) // num_slices
                    first, slice_end = (start + np.searchsorted(offsets, offsets[0] + edges)).tolist()
                    ahead = start + int(np.searchsorted(offsets, offsets[slice_end - start] + look_ahead)) + 1
                    last = max(slice_end, min(end, ahead))
                offsets = values("sentence_offsets", first, last + 1)
                tokens = int(offsets[0]), int(offsets[-1])
                lengths, is_continuation = offsets[1:] - offsets[:-1], values("is_continuation", first, last)
                words = values("continues_word", *tokens) if "continues_word" in self._formats else np.zeros(0, bool)
                yield _Slice(values("ids", *tokens), lengths, is_continuation, slice_end - first, words)
        finally:
            for file in files.values():
                os.close(file)


class _Slice(NamedTuple):
    """The text of a slice of a document, with its look-ahead."""

    ids: np.ndarray  # (tokens,)
    lengths: np.ndarray  # (sentences,), in tokens
    is_continuation: np.ndarray  # (sentences,) bool
    num_sentences: int  # without the look-ahead
    continues_word: np.ndarray  # (tokens,) bool, or empty if the store does not have it


def _concatenate(arrays: list[np.ndarray], dtype: Any) -> np.ndarray:
    """Concatenate arrays of a dtype. The list may be empty."""
    return np.concatenate([np.zeros(0, dtype), *arrays])


def _too_short(folder: str, name: str) -> DataError:
    remedy = "run the same command again: it tokenizes a damaged store shard again"
    return DataError(f"the token store ends too early: {name}.npy", where=folder, remedy=remedy)
