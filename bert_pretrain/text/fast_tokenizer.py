"""A fast tokenizer with exactly the ids of `tokenizers`.

BERT's normalizer and pre-tokenizer never look across a blank, an ASCII punctuation mark or a CJK character. So the text
is cut at these characters into chunks. Each distinct chunk is tokenized once, and its ids are copied to every
occurrence. The vocabulary counts the same chunks.
"""

import hashlib
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow._compute import (
    call_function,  # `pyarrow.compute` takes 0.2 s to import; `array` and `to_numpy` need pandas
)

from bert_pretrain import ragged
from bert_pretrain.text.tokenizer import JsonTokenizer, Tokenizer
from bert_pretrain.text.tokenizer_folder import TextRules

BLANKS = b" \t\n\r"  # BERT's clean-up replaces them by spaces
_PUNCTUATION_MARKS = b"!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_IN_WORD, _BLANK, _PUNCTUATION = range(3)
_KINDS_OF_BLANKS = bytes(_BLANK if byte in BLANKS else _IN_WORD for byte in range(256))
_KINDS = bytes(_PUNCTUATION if byte in _PUNCTUATION_MARKS else _KINDS_OF_BLANKS[byte] for byte in range(256))
_CJK_BYTES = 3  # the length in UTF-8 of U+4E00–U+9FFF

_BATCH_TEXTS = 1 << 13  # bounds the memory of a `JsonEncoder`
MAX_CACHED_BYTES = 16 << 20  # of the distinct chunks: about a million words, or few data URIs


class Chunks(NamedTuple):
    """A text, cut into words, punctuation marks, CJK characters, and the blanks between them."""

    starts: np.ndarray  # the first byte of each chunk, ascending from 0, (chunks,) int64
    numbers: np.ndarray  # (chunks,) int32
    new: list[bytes]  # the distinct chunks that were numbered last, by their numbers


class ChunkTable:
    """Numbers the distinct chunks of texts in the order of their first occurrence."""

    def __init__(self, rules: TextRules) -> None:
        self._around_cjk = rules.handle_chinese_chars and not rules.whole_words
        self._kinds = _KINDS_OF_BLANKS if rules.whole_words else _KINDS
        self._distinct = _slices(np.zeros(0, dtype=np.uint8), np.zeros(1, dtype=np.int64))

    @property
    def num_bytes(self) -> int:
        return int(self._distinct.nbytes)

    def number(self, text: np.ndarray, starts: np.ndarray) -> Chunks:
        """Cut valid UTF-8, (bytes,) uint8, where BERT always cuts and at `starts`, (sentences,), and number the chunks.

        The cuts are before and after blanks, punctuation and CJK characters; for whole words, at blanks only.
        """
        kinds = np.frombuffer(text.tobytes().translate(self._kinds), dtype=np.uint8)
        is_cut = np.ones(len(text) + 1, dtype=bool)
        is_cut[1:-1] = (kinds[1:] != kinds[:-1]) | (kinds[1:] == _PUNCTUATION)
        is_cut[starts] = True
        leads = cjk_leads(text) if self._around_cjk else None
        if leads is not None:
            is_cut[:-1] |= leads
            is_cut[_CJK_BYTES:] |= leads[: 1 - _CJK_BYTES]
        offsets = np.flatnonzero(is_cut)
        # Chunks seen before come first, so they keep their numbers.
        num_known = len(self._distinct)
        encoded = call_function("dictionary_encode", [pa.concat_arrays([self._distinct, _slices(text, offsets)])])
        self._distinct = encoded.dictionary
        new = encoded.dictionary[num_known:].to_pylist()
        numbers = np.frombuffer(encoded.indices.buffers()[1], dtype=np.int32)
        return Chunks(offsets[:-1], numbers[num_known : len(encoded)], new)


def _slices(text: np.ndarray, offsets: np.ndarray) -> pa.LargeBinaryArray:
    """Return the byte strings between offsets, without a copy."""
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(text)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)


def cjk_leads(text: np.ndarray) -> np.ndarray | None:
    """Return the mask (bytes,) of the first bytes of U+4E00–U+9FFF (E4 B8 80 to E9 BF BF), or None without any.

    These are nearly all CJK text. BERT also splits at characters of rarer blocks. Here these are part of words.
    """
    leads = (text >= 0xE4) & (text <= 0xE9)
    if not leads.any():
        return None
    leads[:-1] &= (text[:-1] != 0xE4) | (text[1:] >= 0xB8)
    return leads if leads.any() else None


class Encoded(NamedTuple):
    """Sentences as ids."""

    ids: np.ndarray  # (tokens,)
    offsets: np.ndarray  # of the sentences in the ids, (sentences + 1,)
    chunk_starts: np.ndarray  # the first byte of each chunk, (chunks,)
    chunk_offsets: np.ndarray  # of the chunks in the ids, (chunks + 1,)
    unknown: np.ndarray  # positions of [UNK] in the ids, (unknown,)
    unknown_hashes: np.ndarray  # of the normalized chunk of each [UNK], (unknown,) S8
    continues_word: np.ndarray | None = None  # (tokens,) bool, of a `JsonEncoder`


class Encoder:
    """Encodes large blocks of text, with a cache of the distinct chunks seen so far."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._clear()

    def _clear(self) -> None:
        self._table = ChunkTable(self._tokenizer.rules)
        self._chunks: list[bytes] = []  # by their numbers
        self._ids = np.zeros(0, dtype=self._tokenizer.id_dtype)  # of all chunks, concatenated
        self._offsets = np.zeros(1, dtype=np.int64)  # of the chunks in these ids

    def encode(self, text: np.ndarray, starts: np.ndarray) -> Encoded:
        """Tokenize consecutive sentences independently.

        Args:
            text: valid UTF-8, (bytes,) uint8; blocks of a few megabytes are fastest.
            starts: the first byte of each sentence, ascending from 0, (sentences,).
        """
        if self._table.num_bytes > MAX_CACHED_BYTES:
            self._clear()
        chunks = self._table.number(text, starts)
        self._encode_new(chunks.new)
        ids, offsets = ragged.take(self._ids, self._offsets, chunks.numbers)
        first_chunks = np.append(np.searchsorted(chunks.starts, starts), len(chunks.starts))
        unknown = np.flatnonzero(ids == self._tokenizer.unk_id)
        unknown_chunks = np.searchsorted(offsets, unknown, side="right") - 1
        distinct, indices = np.unique(chunks.numbers[unknown_chunks], return_inverse=True)
        hashes = np.array([self._hash(self._chunks[number]) for number in distinct], dtype="S8")
        return Encoded(
            ids,
            offsets[first_chunks],
            chunks.starts,
            offsets,
            unknown,
            hashes[indices],
        )

    def encode_texts(self, texts: Sequence[str]) -> Encoded:
        """Tokenize texts independently."""
        encoded = [text.encode() for text in texts]
        starts = ragged.offsets_of(np.array([len(text_bytes) for text_bytes in encoded]))[:-1]
        return self.encode(np.frombuffer(b"".join(encoded), dtype=np.uint8), starts)

    def _encode_new(self, chunks: list[bytes]) -> None:
        """Append the ids of chunks that the table numbered last."""
        ids: list[int] = []
        ends = []
        for chunk in chunks:
            for word in self._tokenizer.rules.words(chunk):
                ids += self._tokenizer.encode_word(word)
            ends.append(len(ids))
        self._chunks += chunks
        self._offsets = np.append(self._offsets, len(self._ids) + np.array(ends, dtype=np.int64))
        self._ids = np.append(self._ids, np.array(ids, dtype=self._tokenizer.id_dtype))

    def _hash(self, chunk: bytes) -> bytes:
        return _digest(self._tokenizer.rules.normalizer.normalize_str(chunk.decode()))


class JsonEncoder:
    """Encodes texts with a `JsonTokenizer`. Words are those of its pre-tokenizer."""

    def __init__(self, tokenizer: JsonTokenizer, *, with_words: bool = False) -> None:
        self._tokenizer = tokenizer
        self._with_words = with_words

    def encode_texts(self, texts: Sequence[str]) -> Encoded:
        """Tokenize texts independently. With words, `continues_word` tells which tokens do not start one."""
        backend = self._tokenizer.backend
        encode_batch = backend.encode_batch if self._with_words else backend.encode_batch_fast  # which has no words
        lengths: list[int] = []
        ids = [np.zeros(0, dtype=self._tokenizer.id_dtype)]
        words = [np.zeros(0)]  # the number of each token's word in its text
        for first in range(0, len(texts), _BATCH_TEXTS):
            encodings = encode_batch(list(texts[first : first + _BATCH_TEXTS]), add_special_tokens=False)
            lists = [encoding.ids for encoding in encodings]
            lengths += map(len, lists)
            ids.append(np.fromiter(itertools.chain.from_iterable(lists), dtype=ids[0].dtype))
            if self._with_words:
                numbers = itertools.chain.from_iterable(encoding.word_ids for encoding in encodings)
                words.append(np.array(list(numbers), dtype=np.float64))  # NaN, which is unlike all, for none
        all_ids = np.concatenate(ids)
        offsets = ragged.offsets_of(np.array(lengths, dtype=np.int64))
        unknown = np.flatnonzero(all_ids == self._tokenizer.unk_id)
        owners = np.searchsorted(offsets, unknown, side="right") - 1
        hashes = [_digest(texts[owner]) for owner in owners]
        no_chunks = np.zeros(0, dtype=np.int64)
        return Encoded(
            all_ids,
            offsets,
            no_chunks,
            no_chunks,
            unknown,
            np.array(hashes, dtype="S8"),
            _continues_word(np.concatenate(words), offsets) if self._with_words else None,
        )


def _continues_word(words: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return which tokens have the word number of the token before them in their text, (tokens,) bool."""
    continues = np.zeros(len(words), dtype=bool)
    continues[1:] = words[1:] == words[:-1]
    starts = offsets[:-1]
    continues[starts[starts < len(words)]] = False
    return continues


def make_encoder(tokenizer: Tokenizer, *, with_words: bool = False) -> Encoder | JsonEncoder:
    """Return the encoder of a tokenizer. `with_words` is that of `JsonEncoder`."""
    if isinstance(tokenizer, JsonTokenizer):
        return JsonEncoder(tokenizer, with_words=with_words)
    return Encoder(tokenizer)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
