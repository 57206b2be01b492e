"""The token store: text as ids, tokenised once for everything that is made from it later; `ingest.py` writes it.

A store is a folder of store shards, one for each group of byte ranges of the inputs. It is a cache: its key covers all
that decides the ids, and it may be deleted. A store shard has the arrays `ids`, `sentence_offsets` (into ids),
`is_continuation` (of each sentence), `document_offsets` (into sentences), `document_hashes` and, with a segmenter,
`continues_word` (of each id), as `.npy` files.
"""

import hashlib
import importlib.metadata
import json
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bert_pretrain.config import DataConfig
from bert_pretrain.errors import DataError
from bert_pretrain.text import ragged
from bert_pretrain.text.sources import Source
from bert_pretrain.text.tokenizer import Tokenizer

STORE_VERSION = 8


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


class TokenStore:
    """Reads the documents of a store by their numbers, which run through all store shards.

    Store shards are opened one after another, each for as long as it is read: there may be thousands, and every map of
    a file takes a descriptor; on most systems a process has 1,024.
    """

    def __init__(self, folder: Path, num_shards: int) -> None:
        self.folder = folder
        self.num_shards = num_shards
        self._formats: dict[str, tuple[np.dtype[Any], int]] = {}
        """The type of each array and the byte where its values begin, the same in all store shards."""
        for file in store_shard_folder(folder, 0).glob("*.npy"):
            try:
                array = np.load(file, mmap_mode="r")
            except (ValueError, EOFError) as error:
                raise _too_short(str(file.parent), file.stem) from error
            self._formats[file.stem] = (array.dtype, array.offset)
        counts = [len(self.map(index, "document_offsets")) - 1 for index in range(num_shards)]
        self.first_documents = ragged.offsets_of(np.array(counts, dtype=np.int64))
        """The number of each store shard's first document, with the total at the end, (shards + 1,)."""

    @property
    def num_documents(self) -> int:
        return int(self.first_documents[-1])

    def map(self, index: int, name: str) -> np.ndarray:
        """Return an array of a store shard, mapped for as long as it is in use."""
        dtype, start = self._formats[name]
        folder = str(store_shard_folder(self.folder, index))
        with open(f"{folder}/{name}.npy", "rb", buffering=0) as file:
            try:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                return np.frombuffer(content, dtype, offset=start)
            except ValueError as error:
                raise _too_short(folder, name) from error

    def document_sizes(self, index: int, documents: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray]:
        """Return the sentences and the tokens of documents of a store shard, by their numbers in it."""
        offsets, sentence_offsets = self.map(index, "document_offsets"), self.map(index, "sentence_offsets")
        begins, ends = offsets[:-1][documents], offsets[1:][documents]
        return ends - begins, sentence_offsets[ends] - sentence_offsets[begins]

    def sizes_of(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sentences and the tokens of the given documents, both (numbers,) int64; numbers ascending."""
        sentences, tokens = np.zeros_like(numbers), np.zeros_like(numbers)
        for index, rows in self._by_shard(numbers):
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

    def _by_shard(self, numbers: np.ndarray) -> Iterator[tuple[int, slice]]:
        """Yield the store shards that hold documents of ascending numbers, and which of the numbers each holds."""
        bounds = np.searchsorted(numbers, self.first_documents)
        for index in np.flatnonzero(np.diff(bounds)).tolist():
            yield index, slice(bounds[index], bounds[index + 1])

    def read(self, slices: np.ndarray, look_ahead_tokens: int, num_donors: int = 0) -> ShardText:
        """Read slices of documents, each with at least `look_ahead_tokens` of what follows in its document, if any.

        Of each of the slices, (3, slices) int64: the number of its document, and which it is of how many nearly equal
        ones; most often the only one. The last `num_donors` of them are donors.
        """
        in_order = np.argsort(slices[0], kind="stable")  # so that each store shard is opened once
        found: list[tuple[Any, ...]] = [()] * len(in_order)
        for index, rows in self._by_shard(slices[0, in_order]):
            chosen = in_order[rows]
            pieces = self._read_from(index, slices[:, chosen], look_ahead_tokens)
            for row, piece in zip(chosen.tolist(), pieces, strict=True):
                found[row] = piece
        ids, lengths, is_continuation, num_own, words = zip(*found, strict=True) if found else [()] * 5
        return ShardText(
            ids=np.concatenate([np.zeros(0, self._formats["ids"][0]), *ids]),
            sentence_starts=ragged.offsets_of(np.concatenate([np.zeros(0, np.int64), *lengths])),
            is_continuation=np.concatenate([np.zeros(0, bool), *is_continuation]),
            slice_offsets=ragged.offsets_of(np.array([len(each) for each in lengths], np.int64)),
            slice_own_sentences=np.array(num_own, np.int64),
            documents=slices[0],
            num_own_slices=len(found) - num_donors,
            continues_word=np.concatenate([np.zeros(0, bool), *words]) if "continues_word" in self._formats else None,
        )

    def _read_from(self, index: int, slices: np.ndarray, look_ahead: int) -> Iterator[tuple[Any, ...]]:
        """Yield ids, lengths of sentences, `is_continuation`, number of own sentences and `continues_word` of slices.

        All are of one store shard, whose files are read by position, not mapped: there may be many store shards with
        one slice each.
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
            for document, which, of in zip(documents, *slices[1:].tolist(), strict=True):
                begin, end = values("document_offsets", document, document + 2).tolist()
                first, own, last = begin, end, end
                if of > 1:  # a long document has many sentences: its slices are found by bisection
                    offsets = self.map(index, "sentence_offsets")[begin : end + 1]
                    cuts = offsets[0] + np.array([which, which + 1]) * int(offsets[-1] - offsets[0]) // of
                    first, own = (begin + np.searchsorted(offsets, cuts)).tolist()
                    ahead = begin + int(np.searchsorted(offsets, offsets[own - begin] + look_ahead)) + 1
                    last = max(own, min(end, ahead))
                offsets = values("sentence_offsets", first, last + 1)
                tokens = int(offsets[0]), int(offsets[-1])
                lengths, is_continuation = offsets[1:] - offsets[:-1], values("is_continuation", first, last)
                words = values("continues_word", *tokens) if "continues_word" in self._formats else ()
                yield values("ids", *tokens), lengths, is_continuation, own - first, words
        finally:
            for file in files.values():
                os.close(file)


def _too_short(folder: str, name: str) -> DataError:
    remedy = "run the same command again: a damaged store shard is tokenised again"
    return DataError(f"the token store ends too early: {name}.npy", where=folder, remedy=remedy)
