"""Raw text to counts of normalised words: all that a vocabulary needs to know of a corpus.

Distinct chunks of bytes are counted as the text streams by; only these are then normalised and split as BERT does.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from tokenizers import pre_tokenizers

from bert_pretrain import chunks, documents
from bert_pretrain.config import Config, VocabConfig
from bert_pretrain.documents import Part
from bert_pretrain.rng import stream
from bert_pretrain.tokenizer import bert_normalizer

HELD_OUT_SHARE = 0.01
_BLOCK_BYTES = 8 << 20


@dataclass
class Counts:
    """Chunks of bytes and how often they occur, apart for the text to learn from and the text held out."""

    learned: Counter[bytes] = field(default_factory=Counter)
    held_out: Counter[bytes] = field(default_factory=Counter)
    documents: int = 0
    repairs_and_drops: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Counts") -> None:
        self.learned.update(other.learned)
        self.held_out.update(other.held_out)
        self.documents += other.documents
        self.repairs_and_drops.update(other.repairs_and_drops)


def count_part(part: Part, number: int, config: Config) -> Counts:
    """Count the chunks of one part of the inputs; about one document in a hundred is held out."""
    counts = Counts()
    rng = stream(config.vocab.seed, "held out", part=number)
    blocks: dict[bool, list[bytes]] = {False: [], True: []}
    sizes = {False: 0, True: 0}
    for text in documents.read(part, config.data, counts.repairs_and_drops):
        counts.documents += 1
        is_held_out = bool(rng.random() < HELD_OUT_SHARE)
        content = text.encode()
        blocks[is_held_out].append(content)
        sizes[is_held_out] += len(content)
        if sizes[is_held_out] >= _BLOCK_BYTES:
            _count_block(blocks[is_held_out], counts.held_out if is_held_out else counts.learned, config.vocab)
            blocks[is_held_out], sizes[is_held_out] = [], 0
    _count_block(blocks[False], counts.learned, config.vocab)
    _count_block(blocks[True], counts.held_out, config.vocab)
    return counts


def _count_block(block: list[bytes], counter: Counter[bytes], config: VocabConfig) -> None:
    if not block:
        return
    text = np.frombuffer(b"\n".join(block), dtype=np.uint8)
    cut = chunks.cut_text(text, np.zeros(1, dtype=np.int64), around_cjk=config.handle_chinese_chars)
    if cut.cjk_points is not None:
        numbers = np.bincount(cut.cjk_points - chunks.CJK_FIRST)
        found = np.flatnonzero(numbers)
        counter.update({chr(chunks.CJK_FIRST + int(point)).encode(): int(numbers[point]) for point in found})
    if len(cut.rest_starts) == 0:
        return
    distinct, indices = chunks.distinct(cut.rest, cut.rest_starts)
    weights = np.bincount(indices, minlength=len(distinct))
    # Only the distinct chunks are cut again, at punctuation; each piece counts as often as its chunk.
    joined, starts = chunks.join(distinct)
    piece_starts = chunks.cut_around_punctuation(joined, starts)
    piece_weights = weights[np.searchsorted(starts, piece_starts, side="right") - 1]
    pieces, piece_indices = chunks.distinct(joined, piece_starts)
    totals = np.bincount(piece_indices, weights=piece_weights, minlength=len(pieces)).astype(np.int64)
    counter.update(dict(zip(pieces, totals.tolist(), strict=True)))


def count_words(pieces: Mapping[bytes, int], config: VocabConfig) -> Counter[str]:
    """Normalise pieces and split them into words as BERT does, keeping the counts."""
    normalizer = bert_normalizer(
        lowercase=config.lowercase,
        strip_accents=config.strip_accents,
        handle_chinese_chars=config.handle_chinese_chars,
    )
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words: Counter[str] = Counter()
    for piece, count in pieces.items():
        if piece.isalnum():  # ASCII letters and digits alone: one word, nothing to clean
            words[(piece.lower() if config.lowercase else piece).decode()] += count
            continue
        for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(piece.decode())):
            words[word] += count
    return words
