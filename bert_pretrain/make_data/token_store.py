"""The token store: text as ids, tokenised once, whatever is made from it later; `store_writer.py` writes it.

A store is a folder of store shards, one for each group of byte ranges of the inputs: flat ids, sentence offsets and
document offsets as `.npy` files. It is a cache: its key covers all that decides the ids, and it may be deleted.
"""

import hashlib
import importlib.metadata
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import numpy as np

from bert_pretrain.config import DataConfig
from bert_pretrain.errors import DataError
from bert_pretrain.text import ragged
from bert_pretrain.text.sources import Source
from bert_pretrain.text.tokenizer import Tokenizer

STORE_VERSION = 7


def store_key(sources: list[Source], tokenizer: Tokenizer, config: DataConfig) -> str:
    """Return the name of the store that holds these inputs as ids: a hash of all that decides them."""
    libraries = ["tokenizers", "sentencex", *(["rjieba"] if config.word_segmenter else [])]
    content = [
        STORE_VERSION,
        [source.identity for source in sources],
        tokenizer.hash,
        [config.language, config.text_field, config.strict, config.word_segmenter],
        [importlib.metadata.version(name) for name in libraries],
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def store_shard_folder(store: Path, number: int) -> Path:
    """Return the folder of a store shard."""
    return store / f"part-{number:05d}"


def split_long(offsets: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Split lists longer than `limit` into nearly equal units.

    Returns the offsets of the units, and for each list the number of its first unit (with the total at the end).
    """
    lengths = np.diff(offsets)
    units = np.maximum(1, -(-lengths // limit))
    first_units = ragged.offsets_of(units)
    if first_units[-1] == len(lengths):
        return offsets, first_units
    within = ragged.positions_within(first_units)
    begins = np.repeat(offsets[:-1], units) + within * np.repeat(lengths, units) // np.repeat(units, units)
    return np.append(begins, offsets[-1]), first_units


class DocumentSlices(NamedTuple):
    """What to read: of each document the slice `which`, out of `of` nearly equal ones; most often the only one."""

    documents: np.ndarray  # (slices,) int64: the number of the document in the store
    which: np.ndarray  # (slices,) int64
    of: np.ndarray  # (slices,) int64

    def take(self, rows: np.ndarray) -> "DocumentSlices":
        """Return the chosen slices, by number or mask."""
        return DocumentSlices(self.documents[rows], self.which[rows], self.of[rows])


@dataclass(frozen=True)
class ShardText:
    """The text that a shard is made from: slices of documents, each with its look-ahead."""

    ids: np.ndarray  # (tokens,)
    sentence_starts: np.ndarray  # (sentences + 1,) int64, in ids
    is_continuation: np.ndarray  # (sentences,) bool: begins inside a sentence that was too long for the store
    slice_offsets: np.ndarray  # (slices + 1,) int64: the sentences of each slice
    slice_own_sentences: np.ndarray  # (slices,) int64: how many of them belong to the slice; the rest is look-ahead
    documents: np.ndarray  # (slices,) int64: the number of the document
    num_own_slices: int  # those after them are donors: other shards' text that offers random Bs
    continues_word: np.ndarray | None = None  # (tokens,) bool: continues the word before, by a segmenter; None without

    @cached_property
    def slice_ends(self) -> np.ndarray:
        """Where each slice ends, look-ahead included, (slices,) int64 in ids."""
        return self.sentence_starts[self.slice_offsets[1:]]

    def slices_of(self, places: np.ndarray) -> np.ndarray:
        """Return the slice of each place in ids, (places,)."""
        return np.searchsorted(self.slice_ends, places, side="right")

    def begins_sentence(self, places: np.ndarray) -> np.ndarray:
        """Return at which places in ids a sentence begins, (places,) bool."""
        sentences = np.searchsorted(self.sentence_starts, places, side="right") - 1
        return (self.sentence_starts[sentences] == places) & ~self.is_continuation[sentences]


def map_array(file: Path) -> np.memmap:
    """Map an array of a store shard."""
    try:
        return cast(np.memmap, np.load(file, mmap_mode="r"))
    except (ValueError, EOFError) as error:
        raise _too_short(f"{file.name}: {error}", str(file.parent)) from error


def _too_short(what: str, folder: str) -> DataError:
    remedy = "run the same command again: a damaged store shard is tokenised again"
    return DataError(f"the token store ends too early: {what}", where=folder, remedy=remedy)


class TokenStore:
    """Reads the documents of a store by their numbers, which run through all store shards.

    Store shards are opened one after another, each for as long as it is read: there may be thousands, and every open
    file and every map of one takes a descriptor, of which a process has 1,024 on most systems.
    """

    def __init__(self, folder: Path, num_shards: int) -> None:
        self.folder = folder
        self.num_shards = num_shards
        counts = [len(self.map(index, "document_offsets")) - 1 for index in range(num_shards)]
        self.first_documents = ragged.offsets_of(np.array(counts, dtype=np.int64))
        """The number of each store shard's first document, with the total at the end, (shards + 1,)."""
        arrays = {file.stem: map_array(file) for file in store_shard_folder(folder, 0).glob("*.npy")}
        self._formats: _Formats = {name: (array.dtype, array.offset) for name, array in arrays.items()}

    @property
    def num_documents(self) -> int:
        return int(self.first_documents[-1])

    def map(self, index: int, name: str) -> np.ndarray:
        """Return an array of a store shard, mapped for as long as it is in use; see `_StoreShard` for the names."""
        return np.asarray(map_array(store_shard_folder(self.folder, index) / f"{name}.npy"))

    def document_sizes(self, index: int, documents: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray]:
        """Return the sentences and the tokens of documents of a store shard, by their numbers in it."""
        offsets, sentence_offsets = self.map(index, "document_offsets"), self.map(index, "sentence_offsets")
        begins, ends = offsets[:-1][documents], offsets[1:][documents]
        return ends - begins, sentence_offsets[ends] - sentence_offsets[begins]

    def sizes_of(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sentences and the tokens of the given documents, both (numbers,) int64; numbers ascending."""
        sentences, tokens = np.zeros_like(numbers), np.zeros_like(numbers)
        bounds = np.searchsorted(numbers, self.first_documents)
        for index in np.flatnonzero(np.diff(bounds)).tolist():
            rows = slice(bounds[index], bounds[index + 1])
            local = numbers[rows] - self.first_documents[index]
            sentences[rows], tokens[rows] = self.document_sizes(index, local)
        return sentences, tokens

    def documents_longer_than(self, limit_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers and tokens of all documents longer than a limit, ascending by number."""
        numbers, tokens = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
        for index in range(self.num_shards):
            _, lengths = self.document_sizes(index, slice(None))
            long = np.flatnonzero(lengths > limit_tokens)
            numbers.append(long + self.first_documents[index])
            tokens.append(lengths[long])
        return np.concatenate(numbers), np.concatenate(tokens)

    def read(self, slices: DocumentSlices, look_ahead_tokens: int, num_donors: int = 0) -> ShardText:
        """Read slices of documents, each with at least `look_ahead_tokens` of what follows in its document, if any.

        The last `num_donors` of the slices are donors.
        """
        shards = np.searchsorted(self.first_documents, slices.documents, side="right") - 1
        wanted = np.stack([slices.documents - self.first_documents[shards], slices.which, slices.of], axis=1).tolist()
        in_order = np.argsort(slices.documents, kind="stable").tolist()  # so that each store shard is opened once
        found: list[Any] = [None] * len(wanted)
        for index, rows in itertools.groupby(in_order, key=shards.tolist().__getitem__):
            with _StoreShard(store_shard_folder(self.folder, index), self._formats) as shard:
                for row in rows:
                    document, which, of = wanted[row]
                    found[row] = shard.read(document, which, of, look_ahead_tokens)
        columns: Sequence[tuple[Any, ...]] = list(zip(*found, strict=True)) or [()] * 5
        ids, lengths, is_continuation, num_own, continues_word = columns
        lengths_of_all = np.concatenate([np.zeros(0, dtype=np.int64), *lengths])
        return ShardText(
            ids=np.frombuffer(b"".join(ids), self._formats["ids"][0]),
            sentence_starts=ragged.offsets_of(lengths_of_all),
            is_continuation=np.frombuffer(b"".join(is_continuation), bool),
            slice_offsets=ragged.offsets_of(np.array([len(each) for each in lengths], dtype=np.int64)),
            slice_own_sentences=np.array(num_own, dtype=np.int64),
            documents=slices.documents,
            num_own_slices=len(wanted) - num_donors,
            continues_word=np.frombuffer(b"".join(continues_word), bool) if "continues_word" in self._formats else None,
        )


_Formats = dict[str, tuple[np.dtype[Any], int]]
"""The type of each array of a store shard and the byte where its values begin; all store shards have the same."""


class _StoreShard:
    """A store shard while it is open: documents are read from its files by position, not mapped.

    Its arrays are `ids`, `sentence_offsets` (into ids), `is_continuation` (of each sentence), `document_offsets` (into
    sentences), `document_hashes` and, with a segmenter, `continues_word` (of each id).
    """

    def __init__(self, folder: Path, formats: _Formats) -> None:
        self._folder = str(folder)
        self._formats = formats
        self._descriptors: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def read(
        self, document: int, which: int, of: int, look_ahead_tokens: int
    ) -> tuple[bytes, np.ndarray, bytes, int, bytes]:
        """Read a slice of a document, given by its number in the store shard.

        Returns ids, lengths (sentences,), `is_continuation`, how many sentences are the slice's own, and
        `continues_word` if there is a segmenter; arrays that are only concatenated are still bytes.
        """
        first, last = self._offsets("document_offsets", document, document + 2).tolist()
        own = last
        if of > 1:
            first, own, last = self._slice(first, last, which, of, look_ahead_tokens)
        offsets = self._offsets("sentence_offsets", first, last + 1)
        tokens = int(offsets[0]), int(offsets[-1])
        return (
            self._bytes("ids", *tokens),
            offsets[1:] - offsets[:-1],
            self._bytes("is_continuation", first, last),
            own - first,
            self._bytes("continues_word", *tokens) if "continues_word" in self._formats else b"",
        )

    def _slice(self, begin: int, end: int, which: int, of: int, look_ahead: int) -> tuple[int, int, int]:
        """Return the first sentence of a slice of sentences [begin, end), the end of its own and of its look-ahead."""
        offsets = self._mapped_offsets[begin : end + 1]
        cuts = offsets[0] + np.array([which, which + 1]) * int(offsets[-1] - offsets[0]) // of
        first, own = (begin + int(value) for value in np.searchsorted(offsets, cuts))
        ahead = self._mapped_offsets[own] + look_ahead
        last = min(end, begin + int(np.searchsorted(offsets, ahead)) + 1)
        return first, own, max(last, own)

    @cached_property
    def _mapped_offsets(self) -> np.ndarray:
        # A long document has many sentences, and its slices are found by bisection, which touches few of them.
        return np.asarray(map_array(Path(self._folder) / "sentence_offsets.npy"))

    def _offsets(self, name: str, first: int, last: int) -> np.ndarray:
        return np.frombuffer(self._bytes(name, first, last), np.int64)

    def _bytes(self, name: str, first: int, last: int) -> bytes:
        """Read the values [first, last) of an array."""
        dtype, start = self._formats[name]
        if name not in self._descriptors:
            self._descriptors[name] = os.open(f"{self._folder}/{name}.npy", os.O_RDONLY)
        size = (last - first) * dtype.itemsize
        values = os.pread(self._descriptors[name], size, start + first * dtype.itemsize)
        if len(values) < size:
            raise _too_short(f"{name}.npy has no value {last - 1:,}", self._folder)
        return values
