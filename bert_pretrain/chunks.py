"""Cutting UTF-8 where BERT's text processing always cuts: at blanks, around ASCII punctuation and CJK characters.

Its normaliser and pre-tokeniser never look across these places, so what holds for a chunk holds wherever it stands:
the encoder tokenises each distinct chunk once, the vocabulary counts them. All of it is arithmetic on bytes.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from bert_pretrain import ragged

# The bytes that BERT's clean-up turns into blanks, and the ASCII punctuation it splits at.
BLANK = np.isin(np.arange(256), list(b" \t\n\r"))
PUNCTUATION = np.isin(np.arange(256), list(b"!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"))

# The unified ideographs U+4E00–U+9FFF: nearly all CJK text. BERT sets blanks around further blocks too; their rare
# characters stay inside chunks, where the library deals with them.
CJK_FIRST, CJK_LAST = 0x4E00, 0x9FFF


@dataclass(frozen=True)
class Cut:
    """A text cut into chunks; the CJK characters among them are taken out of the text."""

    starts: np.ndarray  # (chunks,) int64: where each begins in the text; a blank belongs to the chunk before it
    is_cjk: np.ndarray  # (chunks,) bool: a single CJK character, with the blanks after it
    cjk_points: np.ndarray | None  # (CJK chunks,) int64: their code points; None where there are none
    rest: np.ndarray  # (bytes,) uint8: the text without the CJK characters
    rest_starts: np.ndarray  # (other chunks,) int64: where the others begin in `rest`


def cut_text(text: np.ndarray, starts: np.ndarray, *, around_cjk: bool) -> Cut:
    """Cut valid UTF-8 (bytes,) at blanks, around CJK characters and at the ascending `starts`, whose first is 0."""
    blank = BLANK[text]
    is_start = np.zeros(len(text), dtype=bool)
    np.greater(blank[:-1], blank[1:], out=is_start[1:])
    is_start[starts] = True
    leads = _cjk_leads(text) if around_cjk else None
    if leads is None:
        chunk_starts = np.flatnonzero(is_start)
        return Cut(chunk_starts, np.zeros(len(chunk_starts), dtype=bool), None, text, chunk_starts)
    is_start |= leads
    is_start[3:] |= leads[:-3] & ~blank[3:]
    chunk_starts = np.flatnonzero(is_start)
    is_cjk = leads[chunk_starts]
    places = np.flatnonzero(leads)
    points = (text[places] & 0x0F).astype(np.int64) << 12
    points |= (text[places + 1] & 0x3F).astype(np.int64) << 6
    points |= text[places + 2] & 0x3F
    is_rest = ~leads
    is_rest[1:] &= ~leads[:-1]
    is_rest[2:] &= ~leads[:-2]
    cjk_before = np.cumsum(is_cjk) - is_cjk
    return Cut(chunk_starts, is_cjk, points, text[is_rest], (chunk_starts - 3 * cjk_before)[~is_cjk])


def _cjk_leads(text: np.ndarray) -> np.ndarray | None:
    """Mark the first byte of every character in U+4E00–U+9FFF (bytes E4 B8 80 to E9 BF BF); None if there is none."""
    leads = (text >= 0xE4) & (text <= 0xE9)
    if not leads.any():
        return None
    leads[:-1] &= (text[:-1] != 0xE4) | (text[1:] >= 0xB8)
    return leads if leads.any() else None


def cut_around_punctuation(text: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return where pieces begin when a text is cut at `starts` and around every ASCII punctuation mark and blank."""
    alone = PUNCTUATION[text] | BLANK[text]
    is_start = alone.copy()
    is_start[1:] |= alone[:-1]
    is_start[starts] = True
    return np.flatnonzero(is_start)


def distinct(text: np.ndarray, starts: np.ndarray) -> tuple[list[bytes], np.ndarray]:
    """Return the distinct chunks that begin at `starts` (the last one ends with the text), and the number of each."""
    offsets = np.append(starts, len(text)).astype(np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(text))]
    encoded = pa.Array.from_buffers(pa.binary(), len(starts), buffers).dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy()


def join(chunks: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Return chunks as one text (bytes,) and where each begins."""
    text = np.frombuffer(b"".join(chunks), dtype=np.uint8)
    return text, ragged.offsets_of(np.array([len(chunk) for chunk in chunks], dtype=np.int64))[:-1]
