"""Counts of normalized words in raw text.

Chunks of bytes are counted while the text is read. Only the distinct chunks are then normalized and split as in BERT.
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
from tokenizers import pre_tokenizers

from bert_pretrain.config import Config, VocabConfig
from bert_pretrain.rng import stream
from bert_pretrain.text import documents
from bert_pretrain.text.fast_tokenizer import CHARACTERS, MAX_CACHED_BYTES, ChunkTable
from bert_pretrain.text.text_files import ByteRange
from bert_pretrain.text.tokenizer import bert_normalizer, bert_pre_tokenizer

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
        self._prune()

    def save(self, file: Path) -> None:
        """Write the counts to a file for another process."""
        fields = (dict(value) if isinstance(value, Counter) else value for value in vars(self).values())
        file.write_bytes(marshal.dumps(tuple(fields)))

    @classmethod
    def load(cls, file: Path) -> Self:
        """Read the counts from a file of `save`."""
        training, held_out, num_documents, repairs, dropped, undercount = marshal.loads(file.read_bytes())
        return cls(Counter(training), Counter(held_out), num_documents, Counter(repairs), dropped, undercount)

    def _prune(self) -> None:
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


class _ChunkCounter:
    """Counts the chunks of blocks of text by their numbers in a table. Adds the table to `counts` when it is full."""

    def __init__(self, config: VocabConfig, counts: Counts) -> None:
        self._config = config
        self._total = counts
        self._clear()

    def _clear(self) -> None:
        whole_words = self._config.tokens == "words"
        self._table = ChunkTable(around_cjk=self._config.handle_chinese_chars, whole_words=whole_words)
        self._counts = np.zeros((2, len(CHARACTERS)), dtype=np.int64)

    def count(self, block: list[bytes], is_held_out: bool) -> None:
        if not any(block):  # only the empty last piece of a document
            return
        text = np.frombuffer(b"\n".join(block), dtype=np.uint8)
        _, numbers = self._table.number(text, np.zeros(1, dtype=np.int64))
        missing = len(self._table.chunks) - self._counts.shape[1]
        self._counts = np.pad(self._counts, ((0, 0), (0, missing)))
        self._counts[int(is_held_out)] += np.bincount(numbers, minlength=self._counts.shape[1])
        if len(self._table.chunks) > len(CHARACTERS) + MAX_DISTINCT // 2 or self._table.num_bytes > MAX_CACHED_BYTES:
            self.flush()

    def flush(self) -> None:
        counts = Counts()
        for counter, numbers in zip((counts.training, counts.held_out), self._counts, strict=True):
            for number in np.flatnonzero(numbers).tolist():
                counter[self._table.chunks[number]] = int(numbers[number])
        self._total.add(counts)
        self._clear()


def count_groups(groups: Sequence[tuple[int, Sequence[ByteRange]]], config: Config) -> Counts:
    """Count the chunks of numbered groups of byte ranges. Count 1 % of the documents, at random, as held out."""
    counts = Counts()
    counter = _ChunkCounter(config.vocab, counts)
    for number, parts in groups:
        rng = stream(config.vocab.seed, "held out", group=number)
        blocks: dict[bool, list[bytes]] = {False: [], True: []}
        sizes = {False: 0, True: 0}
        is_held_out = bool(rng.random() < HELD_OUT_SHARE)
        pieces = (documents.read(part, config.data, counts.repairs_and_drops) for part in parts)
        for text, ends_document in itertools.chain.from_iterable(pieces):
            content = text.encode()
            blocks[is_held_out].append(content)
            sizes[is_held_out] += len(content)
            if sizes[is_held_out] >= _BLOCK_BYTES:
                counter.count(blocks[is_held_out], is_held_out)
                blocks[is_held_out], sizes[is_held_out] = [], 0
            if ends_document:
                counts.documents += 1
                is_held_out = bool(rng.random() < HELD_OUT_SHARE)
        for is_held_out, block in blocks.items():
            counter.count(block, is_held_out)
        documents.check_unchanged(parts)
    counter.flush()
    return counts


def count_words(chunks: Mapping[bytes, int], config: VocabConfig, *, split_clusters: bool = False) -> Counter[str]:
    """Normalize counted chunks and split them into counted words as BERT does.

    Words of whole-word vocabularies are unchanged. With `split_clusters`, a cluster of an unspaced script is a word.
    """
    words: Counter[str] = Counter()
    if config.tokens == "words":
        white_space = pre_tokenizers.WhitespaceSplit()
        for chunk, count in chunks.items():
            for word, _ in white_space.pre_tokenize_str(chunk.decode()):
                words[word] += count
        return words
    normalizer = bert_normalizer(**config.model_dump(include={"lowercase", "strip_accents", "handle_chinese_chars"}))
    pre_tokenizer = bert_pre_tokenizer(split_clusters=split_clusters)
    for chunk, count in chunks.items():
        if chunk.isalnum():  # ASCII letters and digits: one word that needs no clean-up
            words[(chunk.lower() if config.lowercase else chunk).decode()] += count
            continue
        for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(chunk.decode())):
            words[word] += count
    return words
