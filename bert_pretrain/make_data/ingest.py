"""Write the token store: workers turn groups of byte ranges of the inputs into store shards.

Text is read, split into sentences, tokenized and appended block by block, so memory does not grow with the size of byte
ranges or documents. Dropped text is counted by reason.
"""

import hashlib
import heapq
import itertools
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from bert_pretrain import ragged
from bert_pretrain.config import DataConfig
from bert_pretrain.errors import InputError, needs_extra
from bert_pretrain.io import files
from bert_pretrain.io.manifest import exclusive
from bert_pretrain.io.pool import Pool, run_each
from bert_pretrain.make_data import summary
from bert_pretrain.make_data.token_store import TokenStore, split_long, store_key, store_shard_folder
from bert_pretrain.text import documents
from bert_pretrain.text.fast_tokenizer import Encoded, Encoder, cjk_leads
from bert_pretrain.text.readers import check_decoded, check_texts
from bert_pretrain.text.sentences import SentenceSplitter
from bert_pretrain.text.sources import MAX_SAMPLED_SOURCES, MIN_UNPACKED_BYTES, READ_ERRORS, Source, damaged
from bert_pretrain.text.text_files import ByteRange
from bert_pretrain.text.tokenizer import Tokenizer

MAX_SENTENCE_TOKENS = 256
BLOCK_CHARACTERS = 4 << 20
COUNT_BLOCK_SENTENCES = 1 << 13
MAX_COUNTED, MAX_REPORTED = 1 << 17, 1000  # distinct sentences counted in memory and reported per store shard
_CUTS, _SUMMARY = "parts.json", "summary.json"
# Index of each count of a store shard: sentences in the store, where long ones are divided; sentences; tokens; [UNK].
_STORED, _SENTENCES, _TOKENS, _UNK = range(4)


def ingest(
    sources: list[Source], tokenizer: Tokenizer, config: DataConfig, stores: Path, pool: Pool
) -> tuple[dict[str, Any], TokenStore]:
    """Tokenize all inputs into the token store; return the statistics of the corpus, and the store."""
    if config.segments_words:
        jieba()  # raises a clear error if it is missing; `store_key` needs its version
    folder = stores.absolute() / store_key(sources, tokenizer, config)
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder, waits=True):  # another command may be filling the same store
        files.remove_temporaries(folder)
        try:
            groups = _cut_inputs([source.absolute for source in sources], folder, pool)
            tasks = [(parts, store_shard_folder(folder, number)) for number, parts in enumerate(groups)]
            work, progress = partial(ensure_store_shard, tokenizer, config), documents.progress_of(groups)
            results = list(run_each(work, tasks, workers=pool, description="tokenize", **progress))
        except InputError:  # the same command would fail again, so nothing can reuse the unpacked text
            _remove_unpacked(folder)
            raise
        files.remove_temporaries(folder)  # left by workers that were killed
        _remove_unpacked(folder)
    for (parts, shard), (_, damage) in zip(tasks, results, strict=True):
        if damage:
            print(f"damaged store shard {shard}: {damage}; tokenized again from {parts[0].name} on")
    summaries = [shard_summary for shard_summary, _ in results]
    counts = itertools.chain.from_iterable(shard_summary["parts"] for shard_summary in summaries)
    by_part = zip(itertools.chain.from_iterable(groups), counts, strict=True)
    by_input = itertools.groupby(by_part, key=lambda pair: pair[0].source)
    corpus = summary.join_corpus([[each for _, each in group] for _, group in by_input], summaries)
    check_texts(corpus["repairs_and_drops"], corpus["documents"])
    check_decoded(corpus["repairs_and_drops"], corpus["tokens"], [source.location for source in sources])
    return corpus, TokenStore(folder, len(groups))


def _cut_inputs(sources: Sequence[Source], store: Path, pool: Pool) -> list[tuple[ByteRange, ...]]:
    """Return groups of byte ranges of all inputs, in order. The cuts are saved in the store and reused by later runs.

    A file that is compressed or not in UTF-8 cannot be divided, so a few large files would leave cores idle. If there
    are at most `MAX_SAMPLED_SOURCES` such files, the large ones are unpacked into the store as UTF-8. The unpacked
    copies are removed when all text is tokenized.
    """
    to_decode = [each for each in sources if each.is_local and each.has_documents_at_lines and each.needs_decoding]
    large = [source for source in to_decode if (source.size or 0) >= MIN_UNPACKED_BYTES]
    large = large if len(to_decode) <= MAX_SAMPLED_SOURCES else []
    unpacked = {source.location: store / f"unpacked-{number}" for number, source in enumerate(large)}
    if not (store / _CUTS).exists():
        documents.report_undivided(sources, pool.num_workers)
        if large:
            tasks = [ByteRange(source, unpacked=unpacked[source.location]) for source in large]
            weights = [float(source.size or 1) for source in large]
            list(run_each(_ensure_unpacked, tasks, workers=pool, description="unpack", unit="B", weights=weights))
        part_bytes = documents.part_bytes_of(sources)
        parts = [documents.cut(source, part_bytes, unpacked.get(source.location)) for source in sources]
        bounds = [[(part.start, part.stop) for part in source_parts] for source_parts in parts]
        files.write_checked_json(store / _CUTS, {"part_bytes": part_bytes, "parts": bounds})
    cuts = files.read_json(store / _CUTS, f"remove the folder {store}: it is a cache and will be written again")
    ranges = (
        ByteRange(source, start, stop, unpacked.get(source.location))
        for source, bounds in zip(sources, cuts["parts"], strict=True)
        for start, stop in bounds
    )
    return documents.group(ranges, cuts["part_bytes"])


def _ensure_unpacked(part: ByteRange) -> None:
    """Unpack the source of a byte range to `part.unpacked`, unless `part.unpacked` is None or already exists."""
    if part.unpacked is None or part.unpacked.exists():
        return
    with ByteRange(part.source).open() as packed, files.atomic_path(part.unpacked) as copy, copy.open("wb") as file:
        try:
            shutil.copyfileobj(packed, file, 1 << 20)
        except READ_ERRORS as error:
            raise damaged(part.source, error) from error


def _remove_unpacked(store: Path) -> None:
    for file in store.glob("unpacked-*"):
        file.unlink()


def ensure_store_shard(
    tokenizer: Tokenizer, config: DataConfig, shard: tuple[Sequence[ByteRange], Path]
) -> tuple[dict[str, Any], str | None]:
    """Write a store shard, given as (byte ranges, folder), unless it exists undamaged.

    Returns its summary, and a description of the damage of an earlier folder, if any.
    """
    parts, folder = shard
    damage = None
    if folder.exists():
        damage = files.damage_of_folder(folder)
        if damage is None:
            return files.read_json(folder / _SUMMARY), None
        shutil.rmtree(folder)
    for part in parts:
        _ensure_unpacked(part)
    shard_summary = write_store_shard(parts, folder, tokenizer, config)
    try:
        documents.check_unchanged(parts)
    except InputError:
        shutil.rmtree(folder)
        raise
    return shard_summary, damage


def write_store_shard(
    parts: Sequence[ByteRange], folder: Path, tokenizer: Tokenizer, config: DataConfig
) -> dict[str, Any]:
    """Tokenize byte ranges of the inputs, write the store shard atomically, and return its summary."""
    with files.atomic_folder(folder) as temporary:
        with ExitStack() as stack:
            writer = _StoreWriter(temporary, tokenizer, config, len(parts), stack)
            for number, part in enumerate(parts):
                splitter = SentenceSplitter(part.source.splitter, config.language)
                for document in documents.read(part, config, writer.counts):
                    sentences = splitter.split(document.text, ends_document=document.ends_document)
                    writer.add(sentences, len(document.text), number if document.ends_document else None)
            writer.write()
        shard_summary = writer.summary()
        files.write_json(temporary / _SUMMARY, shard_summary)
        files.write_checksums(temporary)
    return shard_summary


class _StoreWriter:
    """Tokenizes sentences and appends them to the arrays of a store shard, block by block."""

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, config: DataConfig, num_parts: int, stack: ExitStack
    ) -> None:
        def column(name: str, dtype: Any) -> GrowingArray:
            return stack.enter_context(GrowingArray(folder / f"{name}.npy", dtype))

        self._encoder = _encoder(tokenizer)
        self.counts: Counter[str] = Counter()  # repairs and drops by reason
        self._ids = column("ids", tokenizer.id_dtype)
        self._sentence_offsets = column("sentence_offsets", np.int64)
        self._is_continuation = column("is_continuation", bool)
        self._document_offsets = column("document_offsets", np.int64)
        self._document_hashes = column("document_hashes", np.uint64)
        self._continues_word = column("continues_word", bool) if config.segments_words else None
        self._sentence_offsets.append(np.zeros(1))
        self._document_offsets.append(np.zeros(1))
        self._clear()
        # The counts `_STORED` to `_UNK`, (4,): of all text written, and of the text up to the last document's end.
        self._written = self._at_last_end = np.zeros(4, dtype=np.int64)
        self._hash = hashlib.blake2b(digest_size=8)  # of the document that has not ended yet
        self._part_counts = np.zeros((num_parts, 4), dtype=np.int64)  # documents, sentences, tokens, [UNK]
        self._documents_by_sentences: Counter[int] = Counter()
        self._repeats: Counter[str] = Counter()  # occurrences of sentences, by their first characters
        self._num_counted = 0

    def _clear(self) -> None:
        self._sentences: list[str] = []
        self._ends: list[tuple[int, int]] = []  # for each document end: number of sentences before it, and byte range
        self._num_characters = 0

    def add(self, sentences: list[str], num_characters: int, part: int | None) -> None:
        """Add sentences of a document. `part` is the index of its byte range if the document ends here, else None."""
        self._sentences += sentences
        self._num_characters += num_characters
        if part is not None:
            self._ends.append((len(self._sentences), part))
        if self._num_characters >= BLOCK_CHARACTERS:
            self.write()

    def write(self) -> None:
        """Tokenize and write the sentences added since the last call, and the ends of their documents."""
        encoded = self._encode(self._sentences)
        lengths = np.diff(encoded.offsets)
        self._count_repeated(self._sentences)
        # A sentence of control characters has no tokens. A document without tokens counts as empty.
        kept_before = ragged.offsets_of(lengths > 0)
        self.counts["sentences_without_tokens"] += len(lengths) - int(kept_before[-1])
        offsets, first_stored = split_long(ragged.offsets_of(lengths[lengths > 0]), MAX_SENTENCE_TOKENS)
        is_continuation = np.ones(len(offsets) - 1, dtype=bool)
        is_continuation[first_stored[:-1]] = False
        ends, parts = np.array([*self._ends, (len(lengths), 0)], dtype=np.int64).T  # the last one is the block's end
        sentences, stored = kept_before[ends], first_stored[kept_before[ends]]
        tokens = offsets[stored]
        num_unknown = np.searchsorted(encoded.unknown, tokens)
        totals = self._written[:, None] + np.stack([stored, sentences, tokens, num_unknown])
        counts = np.diff(totals[:, :-1], prepend=self._at_last_end[:, None])  # (4, documents)
        kept = np.flatnonzero(counts[_TOKENS])
        self.counts["empty_documents"] += counts.shape[1] - len(kept)
        np.add.at(self._part_counts, parts[kept], np.stack([np.ones_like(kept), *counts[_SENTENCES:, kept]], axis=1))
        self._documents_by_sentences.update(counts[_SENTENCES, kept].tolist())
        self._document_offsets.append(totals[_STORED, kept])
        self._document_hashes.append(self._hashes(encoded, tokens[kept]))
        self._ids.append(encoded.ids)
        self._sentence_offsets.append(offsets[1:] + self._written[_TOKENS])
        self._is_continuation.append(is_continuation)
        self._at_last_end = totals[:, -2] if self._ends else self._at_last_end
        self._written = totals[:, -1]
        self._clear()

    def _encode(self, sentences: list[str]) -> Encoded:
        """Tokenize sentences. With a segmenter, also write `continues_word`."""
        text = np.frombuffer("\n".join(sentences).encode(), dtype=np.uint8)
        starts = np.concatenate([[0], np.flatnonzero(text == ord("\n")) + 1])[: len(sentences)]
        encoded = self._encoder.encode(text, starts)
        if self._continues_word is not None:
            continues = np.zeros(len(encoded.ids), dtype=bool)
            continues[encoded.chunk_offsets[:-1][continues_word(text, encoded.chunk_starts)]] = True
            self._continues_word.append(continues)
        return encoded

    def _hashes(self, encoded: Encoded, ends: np.ndarray) -> np.ndarray:
        """Return the hashes of the documents that end at the token positions `ends`, (ends,) uint64.

        The id of each [UNK] is followed by the hash of its text, so that unknown words are told apart. Tokens after the
        last end are part of the next document's hash.
        """
        ids, unknown, hashes = encoded.ids, encoded.unknown, encoded.unknown_hashes
        per_hash = hashes.itemsize // ids.itemsize
        values = np.insert(ids, np.repeat(unknown + 1, per_hash), hashes.view(ids.dtype))
        ends = ends + per_hash * np.searchsorted(unknown, ends)
        digests = []
        start = 0
        for end in ends.tolist():
            self._hash.update(values[start:end].data)
            digests.append(self._hash.digest())
            self._hash = hashlib.blake2b(digest_size=8)
            start = end
        self._hash.update(values[start:].data)
        return np.array(digests, dtype="S8").view("<u8")

    def _count_repeated(self, sentences: list[str]) -> None:
        """Count sentences by their first 200 characters. To bound memory, drop the rarest when there are too many."""
        while sentences:
            # Drop after fixed numbers of sentences, so that the counts do not depend on the calls of `write`.
            num_until_drop = COUNT_BLOCK_SENTENCES - self._num_counted % COUNT_BLOCK_SENTENCES
            self._repeats.update([sentence[:200] for sentence in sentences[:num_until_drop]])
            self._num_counted += min(num_until_drop, len(sentences))
            if len(self._repeats) > MAX_COUNTED and self._num_counted % COUNT_BLOCK_SENTENCES == 0:
                self._repeats = Counter(_frequent(self._repeats, MAX_COUNTED // 2))
            sentences = sentences[num_until_drop:]

    def summary(self) -> dict[str, Any]:
        """Return the counts of each byte range and of the store shard, for its `summary.json`."""
        return {
            "parts": [dict(zip(summary.TEXT_COUNTS, counts, strict=True)) for counts in self._part_counts.tolist()],
            "sentences_a_document": sorted(self._documents_by_sentences.items()),
            "repairs_and_drops": +self.counts,
            "repeated": [[sentence, count] for sentence, count in _frequent(self._repeats, MAX_REPORTED).items()],
        }


def _frequent(counts: Counter[str], limit: int) -> dict[str, int]:
    """Return the counts of the most frequent sentences, at most `limit`, that occur more than once."""
    repeated = [(-count, sentence) for sentence, count in counts.items() if count > 1]
    return {sentence: -count for count, sentence in heapq.nsmallest(limit, repeated)}


_encoder = lru_cache(maxsize=1)(Encoder)  # kept for the process, because an encoder caches the words it has tokenized


class GrowingArray(AbstractContextManager["GrowingArray"]):
    """A one-dimensional `.npy` file that grows. Its header is complete when it is closed."""

    def __init__(self, path: Path, dtype: Any) -> None:
        self.size = 0
        self._dtype = np.dtype(dtype)
        self._file = path.open("wb")
        self._write_header()

    def append(self, values: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(values, dtype=self._dtype).data)
        self.size += len(values)

    def _write_header(self) -> None:
        # NumPy pads the header, so that the first dimension can grow in place.
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self.size,)}
        self._file.seek(0)
        np.lib.format.write_array_header_1_0(self._file, header)

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._write_header()


def continues_word(text: np.ndarray, chunk_starts: np.ndarray) -> np.ndarray:
    """Return which chunks are CJK characters inside a word, (chunks,) bool.

    `text` is valid UTF-8, (bytes,) uint8. `chunk_starts` are ascending byte positions, (chunks,). The tokenizer makes
    every CJK character a chunk, so a segmenter finds the words.
    """
    leads = cjk_leads(text)
    if leads is None:
        return np.zeros(len(chunk_starts), dtype=bool)
    words = jieba().cut(text.tobytes().decode())
    word_offsets = ragged.offsets_of(np.fromiter(map(len, words), dtype=np.int64, count=len(words)))
    characters = np.flatnonzero((text & 0xC0) != 0x80)  # the first byte of each
    assert word_offsets[-1] == len(characters)
    is_word_start = np.zeros(len(text), dtype=bool)
    is_word_start[characters[word_offsets[:-1]]] = True
    is_inside = leads[chunk_starts] & ~is_word_start[chunk_starts]
    is_inside[1:] &= leads[chunk_starts[:-1]] & (np.diff(chunk_starts) == 3)
    is_inside[:1] = False
    return is_inside


def jieba() -> Any:
    """Import and return the segmenter `rjieba`. Raise ConfigError if it is not installed."""
    otherwise = ", or mask single characters: --set data.word_segmenter=characters"
    with needs_extra("chinese", "whole Chinese words", where="data.word_segmenter", otherwise=otherwise):
        import rjieba
    return rjieba
