"""Text to ids at memory speed, exactly those of `tokenizers` to the last id.

Text is cut where BERT cuts anyway, each distinct chunk is tokenised once, and the ids are gathered. Words of ASCII
letters and digits are tokenised here, all new ones at once; all else goes to `tokenizers`. The price is a
table of the distinct chunks, which is emptied when it grows beyond a bound.
"""

import numpy as np

from bert_pretrain.text import chunks, ragged
from bert_pretrain.text.tokenizer import Tokenizer

_MAX_CACHED_WORDS = 1 << 20


class Encoder:
    """Text to ids for whole arrays of text: a table of the distinct chunks seen so far in front of the library."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._characters = self._encode_characters()
        self._word_piece = WordPiece(tokenizer)
        self._clear()

    def encode(self, text: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of consecutive sentences, each as if it were tokenised alone, (tokens,), and their offsets.

        The text is valid UTF-8, (bytes,) uint8; some megabytes at once are fastest. A sentence begins at each of the
        bytes `starts`, ascending from 0, (sentences,), and ends where the next begins.
        """
        ids, places, offsets = self.encode_chunks(text, starts)
        return ids, offsets[np.append(np.searchsorted(places, starts), len(places))]

    def encode_chunks(self, text: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the ids of the chunks of a text, cut at `starts` as well: ids of words, punctuation, CJK characters.

        With them, the byte where each chunk begins (chunks,) int64, and offsets (chunks + 1,) int64 into ids (tokens,).
        """
        if len(text) == 0:
            empty = np.zeros(0, dtype=np.int64)
            return empty.astype(self._tokenizer.id_dtype), empty, ragged.offsets_of(empty)
        if len(self._table.words) > _MAX_CACHED_WORDS:
            self._clear()
        places, numbers = self._table.number(text, starts)
        self._encode_new_words()
        lengths = self._lengths[numbers]
        offsets = ragged.offsets_of(lengths)
        return self._gather(numbers, lengths, offsets), places, offsets

    def _clear(self) -> None:
        around_cjk = bool(self._tokenizer.settings["tokenize_chinese_chars"])
        self._table = chunks.ChunkTable(around_cjk=around_cjk, whole_words=self._tokenizer.whole_words)
        self._ids = self._characters
        self._begins = np.arange(len(self._ids), dtype=np.int64)
        self._lengths = np.ones(len(self._ids), dtype=np.int32)

    def _gather(self, numbers: np.ndarray, lengths: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Return the ids of chunks, one after the other; most have one, which is written first."""
        if (lengths == 0).any():
            kept = np.flatnonzero(lengths)
            numbers, lengths, offsets = numbers[kept], lengths[kept], np.append(offsets[kept], offsets[-1])
        begins = self._begins[numbers]
        ids = np.empty(offsets[-1], dtype=self._tokenizer.id_dtype)
        ids[offsets[:-1]] = self._ids[begins]
        several = np.flatnonzero(lengths > 1)
        rest = lengths[several] - 1
        ids[ragged.spans(offsets[several] + 1, rest)] = self._ids[ragged.spans(begins[several] + 1, rest)]
        return ids

    def _encode_characters(self) -> np.ndarray:
        """Return the ids of the characters that are chunks; each is one token, or [UNK]."""
        known = {token: index for index, token in enumerate(self._tokenizer.tokens)}
        ids = [known.get(character, self._tokenizer.unk_id) for character in chunks.characters()]
        return np.array(ids, dtype=self._tokenizer.id_dtype)

    def _encode_new_words(self) -> None:
        """Tokenise the words of the table that have no ids yet."""
        words = self._table.words[len(self._lengths) - chunks.FIRST_WORD_NUMBER :]
        if not words:
            return
        is_plain = np.array([word.isalnum() and len(word) <= chunks.MAX_KEY_BYTES for word in words])
        is_plain &= not self._tokenizer.whole_words
        plain, others = np.flatnonzero(is_plain), np.flatnonzero(~is_plain)
        plain_ids, plain_lengths = self._word_piece.encode([words[place] for place in plain])
        other_ids, other_lengths = self._encode_by_library([words[place] for place in others])
        offsets = len(self._ids) + ragged.offsets_of(np.concatenate([plain_lengths, other_lengths]))
        begins = np.empty(len(words), dtype=np.int64)
        lengths = np.empty(len(words), dtype=np.int32)
        begins[plain], begins[others] = offsets[: len(plain)], offsets[len(plain) : -1]
        lengths[plain], lengths[others] = plain_lengths, other_lengths
        self._begins = np.concatenate([self._begins, begins])
        self._lengths = np.concatenate([self._lengths, lengths])
        self._ids = np.concatenate([self._ids, plain_ids, other_ids])

    def _encode_by_library(self, words: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        encoded = self._tokenizer.encode_texts([word.decode() for word in words])
        flat = np.array([token for ids in encoded for token in ids], dtype=self._tokenizer.id_dtype)
        return flat, np.array([len(ids) for ids in encoded], dtype=np.int64)


class WordPiece:
    """Longest match first (Wu et al., 2016; Devlin et al., 2018) for words of ASCII letters and digits, all at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._unk_id = tokenizer.unk_id
        self._lowercase = tokenizer.settings["do_lower_case"]
        self._dtype = tokenizer.id_dtype
        is_subword = tokenizer.is_subword
        tokens = [(token.removeprefix("##").encode(), index) for index, token in enumerate(tokenizer.tokens)]
        plain = [token for token in tokens if token[0].isalnum() and len(token[0]) <= chunks.MAX_KEY_BYTES]
        self._longest = max((len(token) for token, _ in plain), default=0)
        self._first = _TokenTable([(token, index) for token, index in plain if not is_subword[index]])
        self._later = _TokenTable([(token, index) for token, index in plain if is_subword[index]])

    def encode(self, words: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of words of at most `chunks.MAX_KEY_BYTES` bytes, one after the other, and ids per word."""
        text, starts = chunks.join([word.lower() for word in words] if self._lowercase else words)
        ends = np.append(starts[1:], len(text) - chunks.MAX_KEY_BYTES)[: len(starts)]
        position = starts.copy()
        active = np.arange(len(words))
        table = self._first
        found_words, found_ids, unknown = [active[:0]], [np.zeros(0, dtype=np.int64)], [active[:0]]
        while len(active):
            ids, lengths = self._longest_matches(table, text, position[active], ends[active])
            is_match = lengths > 0
            unknown.append(active[~is_match])
            active = active[is_match]
            found_words.append(active)
            found_ids.append(ids[is_match])
            position[active] += lengths[is_match]
            active = active[position[active] < ends[active]]
            table = self._later
        # A word of which any piece is unknown is [UNK] as a whole.
        is_unknown = np.zeros(len(words), dtype=bool)
        is_unknown[np.concatenate(unknown)] = True
        word, ids = np.concatenate(found_words), np.concatenate(found_ids)
        kept = ~is_unknown[word]
        lost = np.flatnonzero(is_unknown)
        word = np.concatenate([word[kept], lost])
        ids = np.concatenate([ids[kept], np.full(len(lost), self._unk_id)])
        order = np.argsort(word, kind="stable")
        return ids[order].astype(self._dtype), np.bincount(word, minlength=len(words))

    def _longest_matches(
        self, table: "_TokenTable", text: np.ndarray, starts: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the id and length of the longest token that begins at each start, length 0 where there is none."""
        ids = np.zeros(len(starts), dtype=np.int64)
        lengths = np.zeros(len(starts), dtype=np.int64)
        rooms = ends - starts
        pending = np.arange(len(starts))
        for length in range(min(self._longest, int(rooms.max())), 0, -1):
            tried = pending[rooms[pending] >= length]
            if len(tried) == 0:
                continue
            found = table.find(text, starts[tried], length)
            hits = tried[found >= 0]
            ids[hits] = found[found >= 0]
            lengths[hits] = length
            pending = pending[lengths[pending] == 0]
        return ids, lengths


class _TokenTable:
    """Finds tokens by their bytes."""

    def __init__(self, tokens: list[tuple[bytes, int]]) -> None:
        self._short = self._table([token for token in tokens if len(token[0]) <= chunks.KEY_BYTES], 1)
        longer = [token for token in tokens if len(token[0]) > chunks.KEY_BYTES]
        self._medium = self._table(longer, chunks.MAX_KEY_BYTES // chunks.KEY_BYTES)

    @staticmethod
    def _table(tokens: list[tuple[bytes, int]], columns: int) -> tuple[chunks.KeyTable, np.ndarray]:
        """Return a table from tokens to numbers, and the id of each number; -1 for the number -1, which is none."""
        table = chunks.KeyTable(columns)
        text, starts = chunks.join([token for token, _ in tokens])
        lengths = np.array([len(token) for token, _ in tokens], dtype=np.int64)
        _, order = table.insert(chunks.word_keys(text, starts, lengths, columns), 0)
        return table, np.append(np.array([index for _, index in tokens], dtype=np.int64)[order], -1)

    def find(self, text: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
        """Return the ids of the tokens of `length` bytes at `starts`, -1 where there is none."""
        table, ids = self._short if length <= chunks.KEY_BYTES else self._medium
        return ids[table.find(chunks.word_keys(text, starts, np.full(len(starts), length), table.columns))]
