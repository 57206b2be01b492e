"""Raw text to the token store: the inputs in byte ranges, each group of them one store shard, on all workers.

A store shard is read, split into sentences, tokenised and appended, block by block: memory is bounded by a block,
for byte ranges and documents of any size. What is dropped is counted by reason.
"""

import contextlib
import hashlib
import heapq
import itertools
import shutil
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Self

import numpy as np

from bert_pretrain.config import DataConfig
from bert_pretrain.errors import InputError, needs_extra
from bert_pretrain.io.files import (
    atomic_folder,
    atomic_path,
    damage_of_folder,
    read_json,
    remove_temporaries,
    seal_folder,
    write_checked_json,
    write_json,
)
from bert_pretrain.io.manifest import exclusive
from bert_pretrain.io.pool import Pool, run_each
from bert_pretrain.make_data import summary
from bert_pretrain.make_data.token_store import TokenStore, split_long, store_key, store_shard_folder
from bert_pretrain.text import documents, ragged
from bert_pretrain.text.fast_tokenizer import Encoder, cjk_leads
from bert_pretrain.text.readers import check_texts
from bert_pretrain.text.sentences import SentenceSplitter
from bert_pretrain.text.sources import MAX_SAMPLED_SOURCES, READ_ERRORS, Source, damaged
from bert_pretrain.text.text_files import ByteRange
from bert_pretrain.text.tokenizer import Tokenizer

LARGE_ARCHIVE_BYTES = 4 << 20
MAX_SENTENCE_TOKENS = 256
BLOCK_CHARACTERS = 4 << 20
COUNTED_AT_ONCE = 1 << 13
MAX_COUNTED, MAX_REPEATED = 1 << 17, 1000  # distinct sentences in memory, and reported for a store shard
REPEATED_CHARACTERS = 200  # of each, which tell it from others
_CUTS, _SUMMARY = "parts.json", "summary.json"


def ingest(
    sources: list[Source], tokenizer: Tokenizer, config: DataConfig, stores: Path, pool: Pool
) -> tuple[dict[str, Any], TokenStore]:
    """Fill the token store; returns the statistics of the corpus, and the store."""
    if config.word_segmenter is not None:
        jieba()  # before its version is asked for
    folder = stores.absolute() / store_key(sources, tokenizer, config)
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder, waits=True):  # for another command with these inputs, whose store serves this one too
        remove_temporaries(folder)
        groups = _cut_inputs([source.absolute for source in sources], folder, pool)
        tasks = [(parts, store_shard_folder(folder, number)) for number, parts in enumerate(groups)]
        work, progress = partial(ensure_store_shard, tokenizer, config), documents.progress_of(groups)
        try:
            results = list(run_each(work, tasks, workers=pool, description="tokenise", **progress))
        except InputError:  # the same command would be refused again
            _remove_unpacked(folder)
            raise
        remove_temporaries(folder)  # of workers that were killed while this process was not
        _remove_unpacked(folder)
    for (parts, shard), (_, damage) in zip(tasks, results, strict=True):
        if damage:
            print(f"the token store was damaged, {shard}: {damage}; tokenised again from {parts[0].name} on")
    summaries = [found for found, _ in results]
    counts = (counts for found in summaries for counts in found["parts"])
    of_parts = zip(itertools.chain.from_iterable(groups), counts, strict=True)
    of_inputs = itertools.groupby(of_parts, key=lambda pair: pair[0].source)
    corpus = summary.join_corpus([[each for _, each in group] for _, group in of_inputs], summaries)
    check_texts(corpus["repairs_and_drops"], corpus["documents"])
    size = sum(file.stat().st_size for file in folder.rglob("*.npy"))
    boundaries = sorted({f"documents end at {source.boundary}, sentences by {source.splitter}" for source in sources})
    print(
        f"{corpus['documents']:,} documents, {corpus['sentences']:,} sentences "
        f"(median {corpus['median_sentences_per_document']:g} per document), {corpus['tokens']:,} tokens, "
        f"[UNK] {corpus['unk_share']:.3%}\n{'; '.join(boundaries)}\ntoken store: {folder} ({size / 1e6:.1f} MB)"
    )
    return corpus, TokenStore(folder, len(groups))


def _cut_inputs(sources: Sequence[Source], store: Path, pool: Pool) -> list[tuple[ByteRange, ...]]:
    """Return the byte ranges of all inputs, in order and in groups, the same in every run with this store.

    A few large archives, or files that are not UTF-8, would keep only as many cores busy: they are first unpacked into
    the store, as UTF-8, until all of it is tokenised. Where the inputs were cut is recorded in the store.
    """
    archives = [
        source for source in sources if source.is_local and source.has_documents_at_lines and source.needs_decoding
    ]
    large = [source for source in archives if (source.size or 0) >= LARGE_ARCHIVE_BYTES]
    large = large if len(archives) <= MAX_SAMPLED_SOURCES else []
    unpacked = {source.location: store / f"unpacked-{number}" for number, source in enumerate(large)}
    if not (store / _CUTS).exists():
        documents.report_undivided(sources, pool.num_workers)
        if large:
            tasks = [ByteRange(source, unpacked=unpacked[source.location]) for source in large]
            weights = [float(source.size or 1) for source in large]
            list(run_each(_ensure_unpacked, tasks, workers=pool, description="unpack", unit="B", weights=weights))
        part_bytes = documents.part_bytes_of(sources)
        parts = [documents.cut(source, part_bytes, unpacked.get(source.location)) for source in sources]
        bounds = [[(part.start, part.stop) for part in of_source] for of_source in parts]
        write_checked_json(store / _CUTS, {"part_bytes": part_bytes, "parts": bounds})
    cuts = read_json(store / _CUTS, f"remove the folder {store}: it is a cache, and is made again")
    parts_of_all = (
        ByteRange(source, start, stop, unpacked.get(source.location))
        for source, bounds in zip(sources, cuts["parts"], strict=True)
        for start, stop in bounds
    )
    return documents.group(parts_of_all, cuts["part_bytes"])


def _ensure_unpacked(part: ByteRange) -> None:
    """Unpack the archive of a byte range, if it is needed and not there."""
    if part.unpacked is None or part.unpacked.exists():
        return
    with (
        ByteRange(part.source).open() as packed,
        atomic_path(part.unpacked) as temporary,
        temporary.open("wb") as file,
    ):
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
    """Write a store shard, given by its byte ranges and folder, unless it is there undamaged.

    Returns its summary, and any damage found.
    """
    parts, folder = shard
    damage = None
    if folder.exists():
        damage = damage_of_folder(folder)
        if damage is None:
            return read_json(folder / _SUMMARY), None
        shutil.rmtree(folder)
    for part in parts:
        _ensure_unpacked(part)
    found = write_store_shard(parts, folder, tokenizer, config)
    try:
        documents.check_unchanged(parts)
    except InputError:
        shutil.rmtree(folder)
        raise
    return found, damage


def write_store_shard(
    parts: Sequence[ByteRange], folder: Path, tokenizer: Tokenizer, config: DataConfig
) -> dict[str, Any]:
    """Tokenise byte ranges of inputs into a store shard, which appears whole or not at all; returns its summary."""
    counts: Counter[str] = Counter()
    with atomic_folder(folder) as temporary:
        with contextlib.ExitStack() as stack:
            writer = _Writer(temporary, tokenizer, config, len(parts), counts, stack)
            for number, part in enumerate(parts):
                splitter = SentenceSplitter(part.source.splitter, config.language)
                for document in documents.read(part, config, counts):
                    sentences = splitter.split(document.text, ends_document=document.ends_document)
                    writer.add(sentences, len(document.text), number if document.ends_document else None)
            writer.write()
        found = writer.summary()
        write_json(temporary / _SUMMARY, found)
        seal_folder(temporary)
    return found


class _Writer:
    """Appends sentences to the arrays of a store shard, a block of them at once."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        config: DataConfig,
        num_parts: int,
        counts: Counter[str],
        stack: contextlib.ExitStack,
    ) -> None:
        def column(name: str, dtype: Any) -> GrowingArray:
            return stack.enter_context(GrowingArray(folder / f"{name}.npy", dtype))

        self._encoder = _encoder(tokenizer)
        self._unk_id = tokenizer.unk_id
        self._counts = counts
        self._ids = column("ids", tokenizer.id_dtype)
        self._sentence_offsets = column("sentence_offsets", np.int64)
        self._is_continuation = column("is_continuation", bool)
        self._document_offsets = column("document_offsets", np.int64)
        self._document_hashes = column("document_hashes", np.uint64)
        self._continues_word = column("continues_word", bool) if config.word_segmenter else None
        self._sentence_offsets.append(np.zeros(1))
        self._document_offsets.append(np.zeros(1))
        self._clear()
        # Stored sentences, read sentences, tokens and [UNK], written so far and up to the end of the last document.
        self._written = self._at_last_end = np.zeros(4, dtype=np.int64)
        self._hash = hashlib.blake2b(digest_size=8)  # of the document that has begun and not ended
        self._of_parts = np.zeros((num_parts, 4), dtype=np.int64)  # documents, sentences, tokens, [UNK]
        self._documents_by_sentences: Counter[int] = Counter()
        self._seen: Counter[str] = Counter()  # sentences, by their beginnings
        self._num_counted = 0

    def _clear(self) -> None:
        self._sentences: list[str] = []
        self._ends: list[tuple[int, int]] = []  # of documents: the number of sentences there, and the byte range
        self._num_characters = 0

    def add(self, sentences: list[str], num_characters: int, ends_in_part: int | None) -> None:
        """Add sentences of a document; if it ends with them, it is one of that byte range."""
        self._sentences += sentences
        self._num_characters += num_characters
        if ends_in_part is not None:
            self._ends.append((len(self._sentences), ends_in_part))
        if self._num_characters >= BLOCK_CHARACTERS:
            self.write()

    def write(self) -> None:
        """Tokenise and write the sentences that were added, and the documents that end among them."""
        ids, lengths = self._encode(self._sentences)
        self._count_repeated(self._sentences)
        # A sentence of control characters alone has no token; a document of such sentences is empty.
        kept_before = ragged.offsets_of(lengths > 0)
        self._counts["sentences_without_tokens"] += len(lengths) - int(kept_before[-1])
        offsets, first_stored = split_long(ragged.offsets_of(lengths[lengths > 0]), MAX_SENTENCE_TOKENS)
        is_continuation = np.ones(len(offsets) - 1, dtype=bool)
        is_continuation[first_stored[:-1]] = False
        num_unk = ragged.offsets_of(ids == self._unk_id)
        ends, parts = np.array([*self._ends, (len(lengths), 0)], dtype=np.int64).T  # and the end of the block
        sentences, stored = kept_before[ends], first_stored[kept_before[ends]]
        totals = self._written[:, None] + np.stack([stored, sentences, offsets[stored], num_unk[offsets[stored]]])
        counts = np.diff(totals[:, :-1], prepend=self._at_last_end[:, None])  # of each document, (4, documents)
        kept = np.flatnonzero(counts[2])
        self._counts["empty_documents"] += counts.shape[1] - len(kept)
        np.add.at(self._of_parts, parts[kept], np.stack([np.ones_like(kept), *counts[1:, kept]], axis=1))
        self._documents_by_sentences.update(counts[1, kept].tolist())
        self._document_offsets.append(totals[0, kept])
        self._document_hashes.append(self._hashes(ids, offsets[stored[kept]]))
        self._ids.append(ids)
        self._sentence_offsets.append(offsets[1:] + self._written[2])
        self._is_continuation.append(is_continuation)
        self._at_last_end = totals[:, -2] if self._ends else self._at_last_end
        self._written = totals[:, -1]
        self._clear()

    def _encode(self, sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of sentences, and ids per sentence; with a segmenter, write which of them continue a word."""
        text = np.frombuffer("\n".join(sentences).encode(), dtype=np.uint8)
        starts = np.concatenate([[0], np.flatnonzero(text == ord("\n")) + 1])[: len(sentences)]
        ids, places, offsets = self._encoder.encode_chunks(text, starts)
        lengths = np.diff(offsets[np.append(np.searchsorted(places, starts), len(places))])
        if self._continues_word is not None:
            continues = np.zeros(len(ids), dtype=bool)
            continues[offsets[:-1][continues_word(text, places)]] = True
            self._continues_word.append(continues)
        return ids, lengths

    def _hashes(self, ids: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Return the hashes of the documents that end at these tokens, (ends,) uint64; hash those after the last."""
        hashes = []
        for begin, end in itertools.pairwise([0, *ends.tolist()]):
            self._hash.update(ids[begin:end].data)
            hashes.append(int.from_bytes(self._hash.digest(), "little"))
            self._hash = hashlib.blake2b(digest_size=8)
        self._hash.update(ids[ends[-1] if len(ends) else 0 :].data)
        return np.array(hashes, dtype=np.uint64)

    def _count_repeated(self, sentences: list[str]) -> None:
        """Count sentences. Whenever there are too many, those that occur once are forgotten: memory is bounded."""
        while sentences:
            number = COUNTED_AT_ONCE - self._num_counted % COUNTED_AT_ONCE  # the same for blocks of any size
            self._seen.update([sentence[:REPEATED_CHARACTERS] for sentence in sentences[:number]])
            self._num_counted += min(number, len(sentences))
            if len(self._seen) > MAX_COUNTED and self._num_counted % COUNTED_AT_ONCE == 0:
                self._seen = Counter(_frequent(self._seen, MAX_COUNTED // 2))
            sentences = sentences[number:]

    def summary(self) -> dict[str, Any]:
        """Return what was written: of each byte range, documents by their sentences, and drops by reason."""
        return {
            "parts": [dict(zip(summary.TEXT_COUNTS, of_part, strict=True)) for of_part in self._of_parts.tolist()],
            "sentences_a_document": sorted(self._documents_by_sentences.items()),
            "repairs_and_drops": +self._counts,
            "repeated": [[sentence, count] for sentence, count in _frequent(self._seen, MAX_REPEATED).items()],
        }


def _frequent(counts: Counter[str], number: int) -> dict[str, int]:
    """Return the most frequent sentences of those that occur more than once."""
    repeated = [(-count, sentence) for sentence, count in counts.items() if count > 1]
    return {sentence: -count for count, sentence in heapq.nsmallest(number, repeated)}


@lru_cache(maxsize=1)
def _encoder(tokenizer: Tokenizer) -> Encoder:
    """Return the encoder of a process, which has a table of the words of the text before."""
    return Encoder(tokenizer)


class GrowingArray:
    """A one-dimensional `.npy` file that is appended to; its header has the size once it is closed."""

    def __init__(self, path: Path, dtype: Any) -> None:
        self.size = 0
        self._dtype = np.dtype(dtype)
        self._file = path.open("wb")
        self._write_header()

    def append(self, values: np.ndarray) -> None:
        """Write further values."""
        self._file.write(np.ascontiguousarray(values, dtype=self._dtype).data)
        self.size += len(values)

    def _write_header(self) -> None:
        # numpy leaves room in a header for its first dimension to grow.
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self.size,)}
        self._file.seek(0)
        np.lib.format.write_array_header_1_0(self._file, header)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._write_header()


def continues_word(text: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return which chunks of valid UTF-8, (bytes,) uint8, are CJK characters inside a word, (chunks,) bool.

    They begin at `places`, ascending, (chunks,); a CJK character is a chunk of its own, so that only a segmenter, which
    looks at the text itself, shows words.
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
