"""Counts of the chunks of raw text.

Chunks of bytes are counted while the text is read. Only the distinct chunks are then normalized and split into words.
Memory is bounded by dropping the rarest chunks.
"""

import itertools
import marshal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np

from bert_pretrain.config import Config, VocabConfig
from bert_pretrain.rng import stream
from bert_pretrain.text import documents
from bert_pretrain.text.fast_tokenizer import BLANKS, ChunkTable
from bert_pretrain.text.text_files import ByteRange
from bert_pretrain.text.tokenizer_folder import TextRules

HELD_OUT_SHARE = 0.01
MAX_DISTINCT = 1 << 21  # number of distinct chunks; they take about 300 MB
MAX_DISTINCT_BYTES = 1 << 27
_BLOCK_BYTES = 4 << 20


@dataclass
class Counts:
    """Counts of chunks of bytes in training text and held-out text."""

    training: Counter[bytes] = field(default_factory=Counter)
    held_out: Counter[bytes] = field(default_factory=Counter)
    documents: int = 0
    repairs_and_drops: Counter[str] = field(default_factory=Counter)
    dropped_occurrences: int = 0  # of rare chunks, dropped to bound memory
    undercount: int = 0  # maximum number of dropped occurrences of a single chunk

    def add(self, other: "Counts") -> None:
        """Add the counts of more text. The result depends on the order of the calls."""
        self.training.update(other.training)
        self.held_out.update(other.held_out)
        self.documents += other.documents
        self.repairs_and_drops.update(other.repairs_and_drops)
        self.dropped_occurrences += other.dropped_occurrences
        self.undercount += other.undercount
        self.prune()

    def add_text(
        self,
        text: bytearray,
        config: VocabConfig,
        *,
        is_held_out: bool,
    ) -> None:
        """Add the chunks of a text in UTF-8."""
        rules = TextRules(
            lowercase=None,
            handle_chinese_chars=config.handle_chinese_chars,
            whole_words=config.tokens == "words",
        )
        start = np.zeros(1, dtype=np.int64)
        chunks = ChunkTable(rules).number(np.frombuffer(text, dtype=np.uint8), start)
        counter = self.held_out if is_held_out else self.training
        for chunk, count in zip(chunks.new, np.bincount(chunks.numbers).tolist(), strict=True):
            if chunk.strip(BLANKS):
                counter[chunk] += count
        if len(counter) > MAX_DISTINCT:
            self.prune()

    def prune(self) -> None:
        """Drop rare chunks above `MAX_DISTINCT` or `MAX_DISTINCT_BYTES`, and keep at most half of this maximum."""
        for counter in (self.training, self.held_out):
            num_bytes = sum(map(len, counter))
            max_chunks = min(MAX_DISTINCT, max(2, MAX_DISTINCT_BYTES * len(counter) // max(1, num_bytes)))
            if len(counter) <= max_chunks:
                continue
            ranked = np.sort(np.fromiter(counter.values(), dtype=np.int64, count=len(counter)))
            max_dropped_count = int(ranked[-max_chunks // 2])
            rare = [chunk for chunk, count in counter.items() if count <= max_dropped_count]
            self.dropped_occurrences += sum(counter.pop(chunk) for chunk in rare)
            self.undercount += max_dropped_count

    def save(self, file: Path) -> None:
        """Write the counts to a file for another process."""
        fields = [dict(value) if isinstance(value, Counter) else value for value in vars(self).values()]
        file.write_bytes(marshal.dumps(fields))

    @classmethod
    def load(cls, file: Path) -> Self:
        """Read the counts from a file of `save`."""
        training, held_out, num_documents, repairs, dropped, undercount = marshal.loads(file.read_bytes())
        return cls(
            Counter(training),
            Counter(held_out),
            num_documents,
            Counter(repairs),
            dropped,
            undercount,
        )


def count_groups(groups: Sequence[tuple[int, Sequence[ByteRange]]], config: Config) -> Counts:
    """Count the chunks of numbered groups of byte ranges. Count 1 % of the documents, at random, as held out."""
    counts = Counts()
    for number, parts in groups:
        rng = stream(config.vocab.seed, "held out", group=number)
        blocks = {False: bytearray(), True: bytearray()}
        is_held_out = bool(rng.random() < HELD_OUT_SHARE)
        pieces = (documents.read(part, config.data, counts.repairs_and_drops) for part in parts)
        for text, ends_document in itertools.chain.from_iterable(pieces):
            blocks[is_held_out] += text.encode() + b"\n"
            if len(blocks[is_held_out]) >= _BLOCK_BYTES:
                counts.add_text(blocks[is_held_out], config.vocab, is_held_out=is_held_out)
                blocks[is_held_out] = bytearray()
            if ends_document:
                counts.documents += 1
                is_held_out = bool(rng.random() < HELD_OUT_SHARE)
        for is_held_out, block in blocks.items():
            counts.add_text(block, config.vocab, is_held_out=is_held_out)
        counts.prune()
        documents.check_unchanged(parts)
    return counts


def count_words(chunks: Mapping[bytes, int], rules: TextRules) -> Counter[str]:
    """Normalize counted chunks and split them into counted words."""
    words: Counter[str] = Counter()
    for chunk, count in chunks.items():
        for word in rules.words(chunk):
            words[word] += count
    return words
