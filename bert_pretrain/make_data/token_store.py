"""The token store: a cache of the tokenized text, written by `ingest.py`.

A store is a folder of store shards, one per group of byte ranges of the inputs. Its name is a hash of everything that
decides the ids. A store shard is a folder of `.npy` files: `ids`, `sentence_offsets` (into ids), `is_continuation` (per
sentence), `document_offsets` (into sentences), `document_hashes` and, if tokens do not tell it, `continues_word` (per
id).
"""

import importlib.metadata
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
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

STORE_VERSION = 13
DTYPES = {  # of the arrays of a store shard, except `ids`
    "sentence_offsets": np.int64,
    "is_continuation": bool,
    "document_offsets": np.int64,
    "document_hashes": np.uint64,
    "continues_word": bool,
}
HEADER_BYTES = 128  # of a `.npy` file of the store


def store_key(sources: Sequence[Source], tokenizer: Tokenizer, config: DataConfig) -> str:
    """Return the name of the store of these inputs: a hash of everything that decides the ids."""
    libraries = ["tokenizers", "sentencex"]
    if config.segments_words:
        libraries.append("rjieba")
    content = [
        STORE_VERSION,
        [source.identity for source in sources],
        tokenizer.hash,
        [config.language, config.text_field, config.strict, tokenizer.stores_words(config)],
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
    owner = ragged.lists_of(first_units)
    within = ragged.positions_within(first_units)
    starts = offsets[owner] + within * lengths[owner] // num_units[owner]
    return np.append(starts, offsets[-1]), first_units


class Slices(NamedTuple):
    """Slices of documents. The slices of one document have nearly equal lengths."""

    document: np.ndarray  # (slices,) int64: the number of the document in the store
    place: np.ndarray  # (slices,) int64: which slice of its document
    num_slices: np.ndarray  # (slices,) int64: the number of slices of its document

    def take(self, rows: np.ndarray) -> "Slices":
        """Return the slices at some positions, or where a boolean array is True."""
        return Slices(*(column[rows] for column in self))


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
    continues_word: np.ndarray | None = None  # (tokens,) bool: the token continues a word; None if tokens tell it

    @cached_property
    def slice_ends(self) -> np.ndarray:
        """End of each slice in ids, look-ahead included, (slices,) int64."""
        return self.sentence_starts[self.slice_offsets[1:]]

    def starts_sentence(self, positions: np.ndarray) -> np.ndarray:
        """Return whether a sentence starts at each position in ids, (positions,) bool."""
        sentences = np.searchsorted(self.sentence_starts, positions, side="right") - 1
        return (self.sentence_starts[sentences] == positions) & ~self.is_continuation[sentences]


class TokenStore:
    """Reads the documents of a store. Documents are numbered across all store shards.

    A store shard is open only while it is read: there may be thousands, and a process has few file descriptors.
    """

    def __init__(
        self,
        folder: Path,
        num_shards: int,
        id_dtype: type[np.generic],
    ) -> None:
        self.folder = folder
        self.id_dtype = id_dtype
        dtypes = {"ids": id_dtype, **DTYPES}
        self._dtypes = {name: np.dtype(dtypes[name]) for name in dtypes if self._file(0, name).exists()}
        counts = [len(self.map(index, "document_hashes")) for index in range(num_shards)]
        self.first_documents = ragged.offsets_of(np.array(counts, dtype=np.int64))  # of each store shard, (shards + 1,)

    @property
    def num_documents(self) -> int:
        return int(self.first_documents[-1])

    def _file(self, index: int, name: str) -> Path:
        return store_shard_folder(self.folder, index) / f"{name}.npy"

    def _open(self, index: int, name: str) -> "_StoredArray":
        return _StoredArray(self._file(index, name), self._dtypes[name])

    def map(self, index: int, name: str) -> np.ndarray:
        """Return an array of a store shard as a memory map, which closes when the array is no longer used."""
        with self._open(index, name) as array:
            return array.map()

    def document_sizes(self, index: int, documents: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray]:
        """Return the sentence and token counts of documents, given by their positions in a store shard."""
        offsets = self.map(index, "document_offsets")
        starts = offsets[:-1][documents]
        ends = offsets[1:][documents]
        sentence_offsets = self.map(index, "sentence_offsets")
        return ends - starts, sentence_offsets[ends] - sentence_offsets[starts]

    def sizes_of(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sentence and token counts of documents, both (numbers,) int64. `numbers` must ascend."""
        sentences = np.zeros_like(numbers)
        tokens = np.zeros_like(numbers)
        for index, rows in self._by_shard(numbers):
            sentences[rows], tokens[rows] = self.document_sizes(index, numbers[rows] - self.first_documents[index])
        return sentences, tokens

    def documents_longer_than(self, limit_tokens: int) -> np.ndarray:
        """Return the numbers of all documents longer than a limit, ascending."""
        numbers = [np.zeros(0, dtype=np.int64)]
        for index, first in enumerate(self.first_documents[:-1]):
            _, tokens = self.document_sizes(index, slice(None))
            numbers.append(first + np.flatnonzero(tokens > limit_tokens))
        return np.concatenate(numbers)

    def _by_shard(self, numbers: np.ndarray) -> Iterator[tuple[int, slice]]:
        """Yield each store shard that has some of the documents, and the slice of their ascending numbers."""
        bounds = np.searchsorted(numbers, self.first_documents)
        for index in np.flatnonzero(np.diff(bounds)).tolist():
            yield index, slice(bounds[index], bounds[index + 1])

    def read(
        self,
        slices: Slices,
        look_ahead_tokens: int,
        num_donors: int = 0,
    ) -> ShardText:
        """Read slices of documents, each with the next `look_ahead_tokens` or more tokens of its document, if any.

        The last `num_donors` slices are donors.
        """
        order = np.argsort(slices.document, kind="stable")  # so that each store shard is opened once
        texts: list[_Slice] = []
        for index, rows in self._by_shard(slices.document[order]):
            texts += self._read_from(index, slices.take(order[rows]), look_ahead_tokens)
        texts = [texts[place] for place in np.argsort(order).tolist()]

        def joined(name: str) -> np.ndarray:
            return np.concatenate([np.zeros(0, self._dtypes[name]), *(text.arrays[name] for text in texts)])

        num_sentences = [len(text.arrays["is_continuation"]) for text in texts]
        lengths = [np.diff(text.arrays["sentence_offsets"]) for text in texts]
        return ShardText(
            ids=joined("ids"),
            sentence_starts=ragged.offsets_of(np.concatenate([np.zeros(0, np.int64), *lengths])),
            is_continuation=joined("is_continuation"),
            slice_offsets=ragged.offsets_of(np.array(num_sentences, np.int64)),
            num_slice_sentences=np.array([text.num_sentences for text in texts], np.int64),
            documents=slices.document,
            num_shard_slices=len(texts) - num_donors,
            continues_word=joined("continues_word") if "continues_word" in self._dtypes else None,
        )

    def _read_from(
        self,
        index: int,
        slices: Slices,
        look_ahead_tokens: int,
    ) -> Iterator["_Slice"]:
        """Yield the text of slices whose documents are in one store shard."""
        documents = slices.document - self.first_documents[index]
        rows = zip(documents.tolist(), slices.place.tolist(), slices.num_slices.tolist(), strict=True)
        with ExitStack() as stack:
            arrays = {name: stack.enter_context(self._open(index, name)) for name in self._dtypes}
            for document, place, num_slices in rows:
                first, last = arrays["document_offsets"].read(document, document + 2).tolist()
                slice_end = last
                if num_slices > 1:
                    offsets = arrays["sentence_offsets"].map()[first : last + 1]
                    bounds = _slice_bounds(offsets, place, num_slices, look_ahead_tokens)
                    first, slice_end, last = (first + bound for bound in bounds)
                offsets = arrays["sentence_offsets"].read(first, last + 1)
                found = {"sentence_offsets": offsets, "is_continuation": arrays["is_continuation"].read(first, last)}
                for name in arrays.keys() & {"ids", "continues_word"}:
                    found[name] = arrays[name].read(int(offsets[0]), int(offsets[-1]))
                yield _Slice(found, slice_end - first)


class _Slice(NamedTuple):
    """The text of a slice of a document, with its look-ahead."""

    arrays: dict[str, np.ndarray]  # its parts of the store's arrays
    num_sentences: int  # without the look-ahead


def _slice_bounds(
    offsets: np.ndarray,
    place: int,
    num_slices: int,
    look_ahead_tokens: int,
) -> tuple[int, int, int]:
    """Return the first sentence of a slice, the sentence after it, and the sentence after its look-ahead.

    `offsets` (sentences + 1,) are the token offsets of the sentences of its document.
    """
    edges = offsets[0] + np.array([place, place + 1]) * int(offsets[-1] - offsets[0]) // num_slices
    first, slice_end = np.searchsorted(offsets, edges).tolist()
    ahead = int(np.searchsorted(offsets, offsets[slice_end] + look_ahead_tokens)) + 1
    return first, slice_end, max(slice_end, min(len(offsets) - 1, ahead))


class _StoredArray(AbstractContextManager["_StoredArray"]):
    """An open array of a store shard. It is read by position, because mapping is slow for a few slices."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._path = path
        self._dtype = dtype
        self._file = path.open("rb", buffering=0)

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def map(self) -> np.ndarray:
        try:
            content = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
            return np.frombuffer(content, self._dtype, offset=HEADER_BYTES)
        except ValueError as error:
            raise self._too_short() from error

    def read(self, first: int, last: int) -> np.ndarray:
        size = (last - first) * self._dtype.itemsize
        content = os.pread(self._file.fileno(), size, HEADER_BYTES + first * self._dtype.itemsize)
        if len(content) < size:
            raise self._too_short()
        return np.frombuffer(content, self._dtype)

    def _too_short(self) -> DataError:
        return DataError(
            f"the token store ends too early: {self._path.name}",
            where=str(self._path.parent),
            remedy="run the same command again: it tokenizes a damaged store shard again",
        )
