"""Chinese words, for whole-word masking: which CJK characters continue the word of the previous character.

WordPiece takes CJK text character by character, so its tokens do not show words; a segmenter looks at the text itself.
"""

from typing import Any

import numpy as np

from bert_pretrain.errors import needs_extra
from bert_pretrain.text.fast_tokenizer import cjk_leads


def continues_word(text: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return which chunks of valid UTF-8, (bytes,) uint8, are CJK characters inside a word, (chunks,) bool.

    They begin at `places`, ascending, (chunks,); a CJK character is a chunk of its own.
    """
    leads = cjk_leads(text)
    if leads is None:
        return np.zeros(len(places), dtype=bool)
    is_inside = leads[places] & ~_word_begins(text)[places]
    is_inside[1:] &= leads[places[:-1]] & (np.diff(places) == 3)
    is_inside[:1] = False
    return is_inside


def _word_begins(text: np.ndarray) -> np.ndarray:
    """Mark the first byte of every word, (bytes,) bool."""
    words = jieba().cut(text.tobytes().decode())
    characters = np.flatnonzero((text & 0xC0) != 0x80)
    begins = np.zeros(len(text), dtype=bool)
    offsets = np.cumsum(np.fromiter(map(len, words), dtype=np.int64, count=len(words)))
    assert offsets[-1] == len(characters)
    begins[characters[offsets[:-1]]] = True
    begins[0] = True
    return begins


def jieba() -> Any:
    """Return the segmenter, or raise a ConfigError where it is not installed."""
    otherwise = ", or mask single characters: --set data.word_segmenter=characters"
    with needs_extra("chinese", "whole Chinese words", where="data.word_segmenter", otherwise=otherwise):
        import rjieba
    return rjieba
