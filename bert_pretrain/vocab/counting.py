"""Raw text to counts of normalised words: all that training a vocabulary needs.

Distinct chunks of bytes are counted as the text is read; only these are then normalised and split as BERT does.
Memory is bounded: where there are too many distinct chunks, the rarest are dropped and counted.
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
from bert_pretrain.text.fast_tokenizer import FIRST_WORD_NUMBER, MAX_CACHED_BYTES, ChunkTable, characters
from bert_pretrain.text.text_files import ByteRange
from bert_pretrain.text.tokenizer import bert_normalizer, bert_pre_tokenizer

HELD_OUT_SHARE = 0.01
MAX_DISTINCT = 1 << 21
"""Distinct chunks that are kept; some 300 MB of them."""
MAX_DISTINCT_BYTES = 1 << 27
"""Bytes of the distinct chunks that are kept."""
_BLOCK_BYTES = 4 << 20


@dataclass
class Counts:
    """Chunks of bytes and how often they occur, separately for the training text and the text held out."""

    learned: Counter[bytes] = field(default_factory=Counter)
    held_out: Counter[bytes] = field(default_factory=Counter)
    documents: int = 0
    repairs_and_drops: Counter[str] = field(default_factory=Counter)
    dropped_occurrences: int = 0
    """Occurrences of rare chunks that were dropped to bound memory."""
    undercount: int = 0
    """Maximum number of occurrences that any one chunk can have lost this way."""

    def add(self, other: "Counts") -> None:
        """Add the counts of further text. The same texts in the same order give the same counts."""
        self.learned.update(other.learned)
        self.held_out.update(other.held_out)
        self.documents += other.documents
        self.repairs_and_drops.update(other.repairs_and_drops)
        self.dropped_occurrences += other.dropped_occurrences
        self.undercount += other.undercount
        self._prune()

    def save(self, file: Path) -> None:
        """Write the counts to a file, for another process."""
        fields = (dict(value) if isinstance(value, Counter) else value for value in vars(self).values())
        file.write_bytes(marshal.dumps(tuple(fields)))

    @classmethod
    def load(cls, file: Path) -> Self:
        """Return the counts of a file of `save`."""
        learned, held_out, num_documents, repairs, dropped, undercount = marshal.loads(file.read_bytes())
        return cls(Counter(learned), Counter(held_out), num_documents, Counter(repairs), dropped, undercount)

    def _prune(self) -> None:
        """Drop the rarest chunks where there are more than `MAX_DISTINCT`, down to half of that.

        Where they are long, fewer are kept: `MAX_DISTINCT_BYTES` of them.
        """
        for counter in (self.learned, self.held_out):
            num_bytes = sum(map(len, counter))
            most = min(MAX_DISTINCT, max(2, MAX_DISTINCT_BYTES * len(counter) // max(1, num_bytes)))
            if len(counter) <= most:
                continue
            ranked = np.sort(np.fromiter(counter.values(), dtype=np.int64, count=len(counter)))
            floor = int(ranked[-most // 2])
            rare = [chunk for chunk, count in counter.items() if count <= floor]
            self.dropped_occurrences += sum(counter.pop(chunk) for chunk in rare)
            self.undercount += floor


class _Counter:
    """Counts the chunks of blocks of text, by their numbers in a table."""

    def __init__(self, config: VocabConfig) -> None:
        self._config = config
        self._clear()

    def _clear(self) -> None:
        whole_words = self._config.tokens == "words"
        self._table = ChunkTable(around_cjk=self._config.handle_chinese_chars, whole_words=whole_words)
        self._counts = np.zeros((2, FIRST_WORD_NUMBER), dtype=np.int64)

    def count(self, block: list[bytes], is_held_out: bool, counts: Counts) -> None:
        """Count documents; whenever the table is full, and with `flush`, the counts are added to `counts`."""
        if not any(block):  # a document that ends where a block of its file does ends with an empty piece
            return
        text = np.frombuffer(b"\n".join(block), dtype=np.uint8)
        _, numbers = self._table.number(text, np.zeros(1, dtype=np.int64))
        missing = FIRST_WORD_NUMBER + len(self._table.words) - self._counts.shape[1]
        self._counts = np.pad(self._counts, ((0, 0), (0, missing)))
        self._counts[int(is_held_out)] += np.bincount(numbers, minlength=self._counts.shape[1])
        if len(self._table.words) > MAX_DISTINCT // 2 or self._table.num_bytes > MAX_CACHED_BYTES:
            self.flush(counts)

    def flush(self, counts: Counts) -> None:
        names = [character.encode() for character in characters()] + self._table.words
        found = Counts()
        for counter, numbers in zip((found.learned, found.held_out), self._counts, strict=True):
            for number in np.flatnonzero(numbers).tolist():
                counter[names[number]] = int(numbers[number])
        counts.add(found)
        self._clear()


def count_groups(groups: Sequence[tuple[int, Sequence[ByteRange]]], config: Config) -> Counts:
    """Count the chunks of numbered groups of byte ranges; about one document in a hundred is held out."""
    counts = Counts()
    counter = _Counter(config.vocab)
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
                counter.count(blocks[is_held_out], is_held_out, counts)
                blocks[is_held_out], sizes[is_held_out] = [], 0
            if ends_document:
                counts.documents += 1
                is_held_out = bool(rng.random() < HELD_OUT_SHARE)
        for is_held_out, block in blocks.items():
            counter.count(block, is_held_out, counts)
        documents.check_unchanged(parts)
    counter.flush(counts)
    return counts


def count_words(
    chunk_counts: Mapping[bytes, int], config: VocabConfig, *, split_clusters: bool = False
) -> Counter[str]:
    """Normalise chunks and split them into words as BERT does, keeping the counts; whole words stay as they are.

    With `split_clusters` the clusters of scripts without blanks are words.
    """
    words: Counter[str] = Counter()
    if config.tokens == "words":
        white_space = pre_tokenizers.WhitespaceSplit()
        for chunk, count in chunk_counts.items():
            for word, _ in white_space.pre_tokenize_str(chunk.decode()):
                words[word] += count
        return words
    normalizer = bert_normalizer(**config.model_dump(include={"lowercase", "strip_accents", "handle_chinese_chars"}))
    pre_tokenizer = bert_pre_tokenizer(split_clusters=split_clusters)
    for chunk, count in chunk_counts.items():
        if chunk.isalnum():  # ASCII letters and digits alone: one word, nothing to clean
            words[(chunk.lower() if config.lowercase else chunk).decode()] += count
            continue
        for word, _ in pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(chunk.decode())):
            words[word] += count
    return words
