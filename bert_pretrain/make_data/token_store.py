"""The token store: text as ids, tokenised once, whatever is made from it later; `ingest.py` fills it.

A store is a folder of pieces, one for each part of the inputs: flat ids, sentence offsets and document offsets as
memory-mapped `.npy` files. It is a cache: its key holds all that decides the ids, and it may be deleted at any time.
"""

import hashlib
import importlib.metadata
import itertools
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bert_pretrain import ragged
from bert_pretrain.config import DataConfig
from bert_pretrain.sources import Source
from bert_pretrain.tokenizer import Tokenizer

STORE_VERSION = 4


def store_key(sources: list[Source], tokenizer: Tokenizer, config: DataConfig) -> str:
    """Return the name of the store that holds these inputs as ids: all that decides them, hashed."""
    libraries = ["tokenizers", "sentencex", *(["rjieba"] if config.word_segmenter else [])]
    content = [
        STORE_VERSION,
        [source.identity for source in sources],
        tokenizer.hash,
        [config.language, config.text_field, config.strict, config.word_segmenter],
        [importlib.metadata.version(name) for name in libraries],
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def split_long(offsets: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Split lists longer than `limit` into nearly equal pieces.

    Returns:
        the offsets of the pieces, and for each list the number of its first piece (with the total at the end).
    """
    lengths = np.diff(offsets)
    pieces = np.maximum(1, -(-lengths // limit))
    first_pieces = ragged.offsets_of(pieces)
    if first_pieces[-1] == len(lengths):
        return offsets, first_pieces
    within = ragged.positions_within(first_pieces)
    begins = np.repeat(offsets[:-1], pieces) + within * np.repeat(lengths, pieces) // np.repeat(pieces, pieces)
    return np.append(begins, offsets[-1]), first_pieces


def _join(arrays: list[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype=dtype)


@dataclass(frozen=True)
class Piece:
    """One memory-mapped piece of the store. Offsets of documents count sentences, offsets of sentences tokens."""

    ids: np.ndarray
    sentence_offsets: np.ndarray
    is_continuation: np.ndarray
    document_offsets: np.ndarray
    document_hashes: np.ndarray
    continues_word: np.ndarray | None


@dataclass(frozen=True)
class Text:
    """Spans of documents taken out of the store into memory, each with its look-ahead."""

    ids: np.ndarray  # (tokens,)
    sentence_starts: np.ndarray  # (sentences + 1,) int64, into ids
    is_continuation: np.ndarray  # (sentences,) bool: begins inside a sentence that was too long
    span_sentences: np.ndarray  # (spans + 1,) int64: the sentences of each span
    span_own_sentences: np.ndarray  # (spans,) int64: how many of them belong to the span; the rest is look-ahead
    continues_word: np.ndarray | None = None  # (tokens,) bool: continues the word before, by a segmenter; None without


class TokenStore:
    """Reads the documents of a store by their numbers, which run through all pieces."""

    def __init__(self, folder: Path, num_pieces: int) -> None:
        self.folder = folder
        self.num_pieces = num_pieces

    @cached_property
    def pieces(self) -> list[Piece]:
        names = ("ids", "sentence_offsets", "is_continuation", "document_offsets", "document_hashes")
        folders = [piece_folder(self.folder, number) for number in range(self.num_pieces)]
        words = [folder / "continues_word.npy" for folder in folders]
        return [
            Piece(
                **{name: _map(folder / f"{name}.npy") for name in names},
                continues_word=_map(file) if file.exists() else None,
            )
            for folder, file in zip(folders, words, strict=True)
        ]

    @cached_property
    def first_documents(self) -> np.ndarray:
        """The number of each piece's first document, with the total at the end, (pieces + 1,)."""
        return ragged.offsets_of(np.array([len(piece.document_offsets) - 1 for piece in self.pieces], dtype=np.int64))

    @property
    def num_documents(self) -> int:
        return int(self.first_documents[-1])

    def sizes_of(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sentences and the tokens of the given documents, both (numbers,) int64; numbers ascending."""
        counts, lengths = [], []
        for piece, (first, last) in zip(self.pieces, itertools.pairwise(self.first_documents), strict=True):
            local = numbers[(numbers >= first) & (numbers < last)] - first
            begins, ends = piece.document_offsets[local], piece.document_offsets[local + 1]
            counts.append(ends - begins)
            lengths.append(piece.sentence_offsets[ends] - piece.sentence_offsets[begins])
        return _join(counts, np.int64), _join(lengths, np.int64)

    def documents_longer_than(self, limit_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers and tokens of all documents longer than a limit, ascending by number."""
        numbers, tokens = [], []
        for piece, first in zip(self.pieces, self.first_documents, strict=False):
            lengths = np.diff(piece.sentence_offsets[piece.document_offsets])
            long = np.flatnonzero(lengths > limit_tokens)
            numbers.append(long + first)
            tokens.append(lengths[long])
        return _join(numbers, np.int64), _join(tokens, np.int64)

    def read(self, numbers: np.ndarray, parts: np.ndarray, of_parts: np.ndarray, look_ahead_tokens: int) -> Text:
        """Take spans out of documents: part `parts[i]` of `of_parts[i]` nearly equal ones of document `numbers[i]`.

        Each span goes on for at least `look_ahead_tokens` into its document, if that is so long.
        """
        found = [
            self._locate(int(number), int(part), int(of), look_ahead_tokens)
            for number, part, of in zip(numbers, parts, of_parts, strict=True)
        ]
        ids, lengths, continuations, continued_words = [], [], [], []
        for piece, first, _, last in found:
            offsets = piece.sentence_offsets[first : last + 1]
            ids.append(piece.ids[offsets[0] : offsets[-1]])
            lengths.append(np.diff(offsets))
            continuations.append(piece.is_continuation[first:last])
            if piece.continues_word is not None:
                continued_words.append(piece.continues_word[offsets[0] : offsets[-1]])
        return Text(
            ids=_join(ids, self.pieces[0].ids.dtype),
            sentence_starts=ragged.offsets_of(_join(lengths, np.int64)),
            is_continuation=_join(continuations, bool),
            span_sentences=ragged.offsets_of(np.array([last - first for _, first, _, last in found], dtype=np.int64)),
            span_own_sentences=np.array([own - first for _, first, own, _ in found], dtype=np.int64),
            continues_word=np.concatenate(continued_words) if continued_words else None,
        )

    def _locate(self, number: int, part: int, of: int, look_ahead_tokens: int) -> tuple[Piece, int, int, int]:
        """Return the piece, and the span's first sentence, the end of its own and the end of its look-ahead."""
        index = int(np.searchsorted(self.first_documents, number, side="right")) - 1
        piece = self.pieces[index]
        local = number - int(self.first_documents[index])
        begin, end = (int(value) for value in piece.document_offsets[local : local + 2])
        if of == 1:
            return piece, begin, end, end
        offsets = piece.sentence_offsets[begin : end + 1]
        cuts = offsets[0] + np.array([part, part + 1]) * int(offsets[-1] - offsets[0]) // of
        first, own = (begin + int(value) for value in np.searchsorted(offsets, cuts))
        ahead = piece.sentence_offsets[own] + look_ahead_tokens
        last = min(end, begin + int(np.searchsorted(offsets, ahead)) + 1)
        return piece, first, own, max(last, own)


def _map(path: Path) -> np.ndarray:
    """Return an array on disk as a plain one, which numpy slices faster than a memmap."""
    return np.asarray(np.load(path, mmap_mode="r"))


def piece_folder(store: Path, number: int) -> Path:
    """Return where a piece of the store lies."""
    return store / f"part-{number:05d}"
