"""A vectorized tokenizer with exactly the ids of `tokenizers`.

BERT's normalizer and pre-tokenizer never look across a blank, an ASCII punctuation mark or a CJK character. The text is
cut at these characters into chunks. Each distinct chunk is tokenized once, and the ids are gathered. Words of letters,
marks and digits are normalized by `tokenizers` and tokenized here in batches; `tokenizers` encodes all other chunks. A
chunk of up to 32 bytes is its own key in a hash table. The vocabulary counts the same chunks.
"""

import hashlib
import unicodedata
from typing import NamedTuple

import numpy as np

from bert_pretrain import ragged
from bert_pretrain.text.key_table import KEY_BYTES, MAX_KEY_BYTES, KeyTable, word_keys
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.text.tokenizer_folder import UNSPACED

_BLANKS = b" \t\n\r"  # BERT's clean-up replaces them by spaces
_PUNCTUATION_MARKS = b"!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_IN_WORD, _BLANK, _PUNCTUATION = range(3)
_BLANKS_ONLY = bytes(_BLANK if byte in _BLANKS else _IN_WORD for byte in range(256))
_CLASSES = bytes(_PUNCTUATION if byte in _PUNCTUATION_MARKS else _BLANKS_ONLY[byte] for byte in range(256))

# The CJK unified ideographs, nearly all CJK text. BERT also splits at characters of rarer CJK blocks. Here these are
# part of words, which `tokenizers` encodes.
CJK_FIRST, CJK_LAST = 0x4E00, 0x9FFF

# Chunks are numbered: ASCII punctuation marks by their byte, then CJK characters, then words.
_FIRST_CJK_NUMBER = 128
CHARACTERS = [chr(point).encode() for point in (*range(_FIRST_CJK_NUMBER), *range(CJK_FIRST, CJK_LAST + 1))]

_BATCH_WORDS = 1 << 17  # the keys of a batch fit the processor's cache
MAX_CACHED_CHUNKS = 1 << 20
MAX_CACHED_BYTES = 64 << 20  # of chunks longer than `MAX_KEY_BYTES`, such as data URIs


class Encoded(NamedTuple):
    """Sentences as ids. A chunk is a word, a punctuation mark or a CJK character."""

    ids: np.ndarray  # (tokens,)
    offsets: np.ndarray  # of the sentences in the ids, (sentences + 1,)
    chunk_starts: np.ndarray  # the first byte of each chunk, (chunks,)
    chunk_offsets: np.ndarray  # of the chunks in the ids, (chunks + 1,)
    unknown: np.ndarray  # positions of [UNK] in the ids, (unknown,)
    unknown_hashes: np.ndarray  # of the normalized chunk of each [UNK], (unknown,) S8


class Encoder:
    """Encodes large blocks of text, with a cache of the distinct chunks seen so far."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        ids = tokenizer.backend.get_vocab()
        character_ids = [ids.get(character.decode(), tokenizer.unk_id) for character in CHARACTERS]
        self._character_ids = np.array(character_ids, dtype=tokenizer.id_dtype)
        self._word_piece = _WordPiece(tokenizer)
        self._clear()

    def encode(self, text: np.ndarray, starts: np.ndarray) -> Encoded:
        """Tokenize consecutive sentences independently.

        Args:
            text: valid UTF-8, (bytes,) uint8; blocks of a few megabytes are fastest.
            starts: the first byte of each sentence, ascending from 0, (sentences,).
        """
        if len(self._table.chunks) > MAX_CACHED_CHUNKS or self._table.num_bytes > MAX_CACHED_BYTES:
            self._clear()
        chunk_starts, numbers = self._table.number(text, starts)
        self._encode_new_words()
        lengths = self._lengths[numbers]
        offsets = ragged.offsets_of(lengths)
        ids = self._gather(numbers, lengths, offsets)
        unknown = np.flatnonzero(ids == self._tokenizer.unk_id)
        unknown_numbers = numbers[np.searchsorted(offsets, unknown, side="right") - 1]
        distinct, indices = np.unique(unknown_numbers, return_inverse=True)
        hashes = np.array([self._hash(self._table.chunks[number]) for number in distinct], dtype="S8")[indices]
        sentence_offsets = offsets[np.append(np.searchsorted(chunk_starts, starts), len(chunk_starts))]
        return Encoded(ids, sentence_offsets, chunk_starts, offsets, unknown, hashes)

    def _hash(self, chunk: bytes) -> bytes:
        if not self._tokenizer.whole_words:
            chunk = self._tokenizer.backend.normalizer.normalize_str(chunk.decode()).encode()
        return hashlib.blake2b(chunk, digest_size=8).digest()

    def _clear(self) -> None:
        around_cjk = bool(self._tokenizer.settings["tokenize_chinese_chars"])
        self._table = ChunkTable(around_cjk=around_cjk, whole_words=self._tokenizer.whole_words)
        self._ids = self._character_ids
        self._begins = np.arange(len(self._ids), dtype=np.int64)
        self._lengths = np.ones(len(self._ids), dtype=np.int32)

    def _gather(self, numbers: np.ndarray, lengths: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return the concatenated ids of chunks."""
        if (lengths == 0).any():
            kept = np.flatnonzero(lengths)
            numbers, lengths, offsets = numbers[kept], lengths[kept], np.append(offsets[kept], offsets[-1])
        begins = self._begins[numbers]
        ids = np.empty(offsets[-1], dtype=self._tokenizer.id_dtype)
        ids[offsets[:-1]] = self._ids[begins]  # most chunks have one id
        several = np.flatnonzero(lengths > 1)
        rest = lengths[several] - 1
        ids[ragged.spans(offsets[several] + 1, rest)] = self._ids[ragged.spans(begins[several] + 1, rest)]
        return ids

    def _encode_new_words(self) -> None:
        """Compute the ids of the words of the table that have none yet."""
        words = self._table.chunks[len(self._lengths) :]
        if not words:
            return
        normalized = self._normalized(words)
        short = {number: word for number, word in enumerate(normalized) if word and len(word) <= MAX_KEY_BYTES}
        plain = np.array(list(short), dtype=np.int64)
        others = np.setdiff1d(np.arange(len(words)), plain, assume_unique=True)
        plain_ids, plain_lengths = self._word_piece.encode(list(short.values()))
        encoded = self._tokenizer.encode_texts([words[index].decode() for index in others])
        other_ids = np.array([token for ids in encoded for token in ids], dtype=self._tokenizer.id_dtype)
        order = np.argsort(np.concatenate([plain, others]))
        lengths = np.concatenate([plain_lengths, np.array([len(ids) for ids in encoded], dtype=np.int64)])
        begins = len(self._ids) + ragged.offsets_of(lengths)[:-1]
        self._begins = np.concatenate([self._begins, begins[order]])
        self._lengths = np.concatenate([self._lengths, lengths[order].astype(np.int32)])
        self._ids = np.concatenate([self._ids, plain_ids, other_ids])

    def _normalized(self, words: list[bytes]) -> list[bytes | None]:
        """Return each word as `tokenizers` normalizes it, or None if `tokenizers` must encode it.

        Words that are not ASCII letters and digits are normalized as one text, joined by commas. They have no commas.
        """
        if self._tokenizer.whole_words:
            return [None] * len(words)
        lowercase = self._tokenizer.settings["do_lower_case"]
        normalized = [(word.lower() if lowercase else word) if word.isalnum() else None for word in words]
        others = [number for number, word in enumerate(normalized) if word is None]
        if not others:
            return normalized
        joined = b",".join([words[number] for number in others]).decode()
        joined = self._tokenizer.backend.normalizer.normalize_str(joined)
        separators = {character for character in set(joined) - {","} if not self._is_plain(character)}
        for number, word in zip(others, joined.split(","), strict=True):
            normalized[number] = word.encode() if word and separators.isdisjoint(word) else None
        return normalized

    def _is_plain(self, character: str) -> bool:
        """Return whether the pre-tokenizer never splits a word at a character."""
        if self._tokenizer.split_clusters and UNSPACED.match(character):
            return False
        # The older Unicode tables of `tokenizers` have the Sharada sandhi mark as punctuation.
        return unicodedata.category(character)[0] in "LMN" and character != "\U000111c9"


class ChunkTable:
    """Assigns numbers to distinct chunks of text. With `whole_words`, text is cut at blanks only."""

    def __init__(self, *, around_cjk: bool, whole_words: bool = False) -> None:
        self.chunks = list(CHARACTERS)  # by their numbers
        self._around_cjk = around_cjk and not whole_words
        self._classes = _BLANKS_ONLY if whole_words else _CLASSES
        self._short = KeyTable(1)
        self._medium = KeyTable(MAX_KEY_BYTES // KEY_BYTES)
        self._long: dict[bytes, int] = {}
        self.num_bytes = 0  # of the chunks longer than `MAX_KEY_BYTES`

    def number(self, text: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cut valid UTF-8 (bytes,) uint8 at blanks, before and after punctuation and CJK characters, and at `starts`.

        Returns the first byte of each chunk (chunks,) int64, ascending, and the number of each chunk (chunks,) int32.
        """
        classes = np.frombuffer(text.tobytes().translate(self._classes), dtype=np.uint8)
        is_alone, is_word = classes == _PUNCTUATION, classes == _IN_WORD
        leads = cjk_leads(text) if self._around_cjk else None
        if leads is not None:
            is_alone |= leads
            for distance in range(3):  # a CJK character has three bytes
                is_word[distance:] &= ~leads[: len(leads) - distance]
        begins = is_word.copy()
        np.greater(is_word[1:], is_word[:-1], out=begins[1:])
        starts = starts[starts < len(text)]  # without empty sentences at the end
        begins[starts] = is_word[starts]
        is_last = is_word.copy()
        is_last[:-1] &= begins[1:] | ~is_word[1:]
        word_ends = np.flatnonzero(is_last) + 1
        begins |= is_alone
        chunk_starts = np.flatnonzero(begins)
        is_character = is_alone[chunk_starts]
        numbers = np.empty(len(chunk_starts), dtype=np.int32)
        numbers[is_character] = _numbers_of_characters(text, chunk_starts[is_character])
        words = np.flatnonzero(~is_character)
        padded = np.concatenate([text, np.zeros(MAX_KEY_BYTES, dtype=np.uint8)])
        for first in range(0, len(words), _BATCH_WORDS):
            batch = slice(first, first + _BATCH_WORDS)
            numbers[words[batch]] = self._number_words(padded, chunk_starts[words[batch]], word_ends[batch])
        return chunk_starts, numbers

    def _number_words(self, text: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return the numbers of words. `text` must have `MAX_KEY_BYTES` bytes after the last word."""
        lengths = ends - starts
        is_short = lengths <= KEY_BYTES
        if is_short.all():
            return self._number_keys(self._short, text, starts, lengths)
        numbers = np.empty(len(starts), dtype=np.int32)
        numbers[is_short] = self._number_keys(self._short, text, starts[is_short], lengths[is_short])
        longer = np.flatnonzero(~is_short)
        is_medium = lengths[longer] <= MAX_KEY_BYTES
        medium = longer[is_medium]
        numbers[medium] = self._number_keys(self._medium, text, starts[medium], lengths[medium])
        for index in longer[~is_medium]:
            word = text[starts[index] : ends[index]].tobytes()
            numbers[index] = self._long.setdefault(word, len(self.chunks))
            if numbers[index] == len(self.chunks):
                self.chunks.append(word)
                self.num_bytes += len(word)
        return numbers

    def _number_keys(self, table: KeyTable, text: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        keys = word_keys(text, starts, lengths, table.columns)
        numbers = table.find(keys)
        absent = np.flatnonzero(numbers < 0)
        if len(absent):
            numbers[absent], new = table.insert([key[absent] for key in keys], len(self.chunks))
            begins, ends = starts[absent[new]], starts[absent[new]] + lengths[absent[new]]
            self.chunks += [text[begin:end].tobytes() for begin, end in zip(begins, ends, strict=True)]
        return numbers


def cjk_leads(text: np.ndarray) -> np.ndarray | None:
    """Return the mask (bytes,) of the first bytes of U+4E00–U+9FFF (E4 B8 80 to E9 BF BF), or None without any."""
    leads = (text >= 0xE4) & (text <= 0xE9)
    if not leads.any():
        return None
    leads[:-1] &= (text[:-1] != 0xE4) | (text[1:] >= 0xB8)
    return leads if leads.any() else None


def _numbers_of_characters(text: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the numbers of the punctuation marks and CJK characters at the byte positions `starts`."""
    numbers = text[starts].astype(np.int32)
    is_cjk = np.flatnonzero(numbers >= 0x80)
    if len(is_cjk):
        begins = starts[is_cjk]
        points = (numbers[is_cjk] & 0x0F) << 12
        points |= (text[begins + 1] & 0x3F).astype(np.int32) << 6
        points |= text[begins + 2] & 0x3F
        numbers[is_cjk] = points + (_FIRST_CJK_NUMBER - CJK_FIRST)
    return numbers


def _join(words: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Return the joined words, padded with `MAX_KEY_BYTES` zeros, and the offsets (words + 1,) of the words."""
    text = np.frombuffer(b"".join(words) + bytes(MAX_KEY_BYTES), dtype=np.uint8)
    return text, ragged.offsets_of(np.array([len(word) for word in words], dtype=np.int64))


_TokenTables = list[tuple[KeyTable, np.ndarray]]  # from tokens to numbers, and from numbers to ids


def _token_tables(tokens: list[tuple[bytes, int]]) -> _TokenTables:
    """Return a table for tokens of up to `KEY_BYTES` bytes and a table for longer tokens; `tokens` have their ids."""
    short = [entry for entry in tokens if len(entry[0]) <= KEY_BYTES]
    long = [entry for entry in tokens if len(entry[0]) > KEY_BYTES]
    tables = []
    for entries, columns in ((short, 1), (long, MAX_KEY_BYTES // KEY_BYTES)):
        table = KeyTable(columns)
        text, offsets = _join([token for token, _ in entries])
        _, order = table.insert(word_keys(text, offsets[:-1], np.diff(offsets), columns), 0)
        ids = np.array([index for _, index in entries], dtype=np.int64)[order]
        tables.append((table, np.append(ids, -1)))  # an absent token has the number -1, so the id -1
    return tables


class _WordPiece:
    """WordPiece (longest match first: Wu et al., 2016; Devlin et al., 2018) for many normalized words at once.

    Tokens are compared as UTF-8 bytes. Each token ends at the end of a character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._unk_id = tokenizer.unk_id
        self._dtype = tokenizer.id_dtype
        tokens = [(token.removeprefix("##").encode(), index) for index, token in enumerate(tokenizer.tokens)]
        plain = [token for token in tokens if 0 < len(token[0]) <= MAX_KEY_BYTES]
        self._longest = max((len(token) for token, _ in plain), default=0)
        self._first = _token_tables([(token, index) for token, index in plain if not tokenizer.is_subword[index]])
        self._later = _token_tables([(token, index) for token, index in plain if tokenizer.is_subword[index]])

    def encode(self, words: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Return the concatenated ids of words of at most `MAX_KEY_BYTES` bytes, and the number of ids of each."""
        text, offsets = _join(words)
        position, ends = offsets[:-1].copy(), offsets[1:]
        active = np.arange(len(words))
        tables = self._first
        piece_words, piece_ids, unknown = [active[:0]], [np.zeros(0, dtype=np.int64)], [active[:0]]
        while len(active):
            ids, lengths = self._longest_matches(tables, text, position[active], ends[active])
            is_match = lengths > 0
            unknown.append(active[~is_match])
            active = active[is_match]
            piece_words.append(active)
            piece_ids.append(ids[is_match])
            position[active] += lengths[is_match]
            active = active[position[active] < ends[active]]
            tables = self._later
        # A word with an unknown piece becomes a single [UNK].
        unknown_words = np.concatenate(unknown)
        is_unknown = np.zeros(len(words), dtype=bool)
        is_unknown[unknown_words] = True
        word, ids = np.concatenate(piece_words), np.concatenate(piece_ids)
        kept = ~is_unknown[word]
        word = np.concatenate([word[kept], unknown_words])
        ids = np.concatenate([ids[kept], np.full(len(unknown_words), self._unk_id)])
        order = np.argsort(word, kind="stable")
        return ids[order].astype(self._dtype), np.bincount(word, minlength=len(words))

    def _longest_matches(
        self, tables: _TokenTables, text: np.ndarray, starts: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the id and length in bytes of the longest token at each start. The length is 0 if no token matches."""
        ids = np.zeros(len(starts), dtype=np.int64)
        lengths = np.zeros(len(starts), dtype=np.int64)
        max_lengths = ends - starts
        pending = np.arange(len(starts))
        is_ascii = bool(text.max(initial=0) < 0x80)
        for length in range(min(self._longest, int(max_lengths.max())), 0, -1):
            tried = pending[max_lengths[pending] >= length]
            if not is_ascii:
                tried = tried[text[starts[tried] + length] & 0xC0 != 0x80]  # only ends of characters
            if len(tried) == 0:
                continue
            table, ids_of = tables[length > KEY_BYTES]
            matches = ids_of[table.find(word_keys(text, starts[tried], np.full(len(tried), length), table.columns))]
            hits = tried[matches >= 0]
            ids[hits] = matches[matches >= 0]
            lengths[hits] = length
            pending = pending[lengths[pending] == 0]
        return ids, lengths
