"""Write the token store: workers turn groups of byte ranges of the inputs into store shards.

Text is read, split into sentences, tokenized and appended block by block, so memory does not grow with the size of byte
ranges or documents. Dropped text is counted by reason.
"""

import hashlib
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
from bert_pretrain.errors import needs_extra
from bert_pretrain.io import files
from bert_pretrain.io.manifest import exclusive
from bert_pretrain.io.pool import Pool, run_each
from bert_pretrain.make_data import summary
from bert_pretrain.make_data.token_store import DTYPES, TokenStore, split_long, store_key, store_shard_folder
from bert_pretrain.text import documents
from bert_pretrain.text.fast_tokenizer import Encoded, JsonEncoder, cjk_leads, make_encoder
from bert_pretrain.text.readers import check_decoded, check_texts
from bert_pretrain.text.sentences import SentenceSplitter
from bert_pretrain.text.sources import MAX_SAMPLED_SOURCES, MIN_UNPACKED_BYTES, READ_ERRORS, Source, damaged
from bert_pretrain.text.text_files import ByteRange
from bert_pretrain.text.tokenizer import Tokenizer

MAX_SENTENCE_TOKENS = 256
BLOCK_CHARACTERS = 4 << 20
_CUTS, _SUMMARY = "parts.json", "summary.json"


def ingest(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    config: DataConfig,
    stores: Path,
    pool: Pool,
) -> tuple[dict[str, Any], TokenStore]:
    """Tokenize all inputs into the token store; return the statistics of the corpus, and the store."""
    if config.segments_words:
        jieba()  # raises a clear error if it is missing; `store_key` needs its version
    folder = stores.absolute() / store_key(sources, tokenizer, config)
    absolute = [source.absolute for source in sources]
    with exclusive(folder, waits=True):  # another command may be filling the same store
        files.remove_temporaries(folder)
        try:
            groups = _cut_inputs(absolute, folder, pool)
            tasks = [(parts, store_shard_folder(folder, number)) for number, parts in enumerate(groups)]
            work = partial(ensure_store_shard, tokenizer, config)
            progress = documents.progress_of(groups)
            summaries = list(
                run_each(
                    work,
                    tasks,
                    workers=pool,
                    description="tokenize",
                    **progress,
                )
            )
        finally:
            for unpacked in folder.glob("unpacked-*"):
                unpacked.unlink()
        files.remove_temporaries(folder)  # left by workers that were killed
    by_input = {source: Counter(dict.fromkeys(summary.TEXT_COUNTS, 0)) for source in absolute}
    for parts, shard_summary in zip(groups, summaries, strict=True):
        for part, counts in zip(parts, shard_summary["parts"], strict=True):
            by_input[part.source].update(counts)
    corpus = summary.join_corpus(list(map(dict, by_input.values())), summaries)
    check_texts(corpus["repairs_and_drops"], corpus["documents"])
    check_decoded(corpus["repairs_and_drops"], corpus["tokens"], [source.location for source in sources])
    return corpus, TokenStore(folder, len(groups), tokenizer.id_dtype)


def _cut_inputs(sources: Sequence[Source], store: Path, pool: Pool) -> list[tuple[ByteRange, ...]]:
    """Return groups of byte ranges of all inputs, in order. The cuts are saved in the store and reused by later runs.

    A file that is compressed or not in UTF-8 cannot be divided, so a few large files would leave cores idle. If there
    are at most `MAX_SAMPLED_SOURCES` such files, the large ones are unpacked into the store as UTF-8. The unpacked
    copies are removed when all text is tokenized.
    """
    to_decode = [each for each in sources if each.is_local and each.has_documents_at_lines and each.needs_decoding]
    large = [source for source in to_decode if (source.size or 0) >= MIN_UNPACKED_BYTES]
    unpacked: dict[Source, Path] = {}
    if len(to_decode) <= MAX_SAMPLED_SOURCES:
        unpacked = {source: store / f"unpacked-{number}" for number, source in enumerate(large)}
    if not (store / _CUTS).exists():
        if unpacked:
            tasks = [ByteRange(source, unpacked=copy) for source, copy in unpacked.items()]
            weights = [task.num_bytes for task in tasks]
            list(
                run_each(
                    _ensure_unpacked,
                    tasks,
                    workers=pool,
                    description="unpack",
                    unit="B",
                    weights=weights,
                )
            )
        part_bytes = documents.part_bytes_of(sources)
        bounds: list[list[tuple[int, int | None]]] = []
        for source in sources:
            parts = documents.cut(source, part_bytes, unpacked.get(source))
            bounds.append([(part.start, part.stop) for part in parts])
        files.write_checked_json(store / _CUTS, {"part_bytes": part_bytes, "parts": bounds})
    cuts = files.read_json(store / _CUTS, f"remove the folder {store}: it is a cache and will be written again")
    ranges: list[ByteRange] = []
    for source, source_bounds in zip(sources, cuts["parts"], strict=True):
        ranges += [ByteRange(source, start, stop, unpacked.get(source)) for start, stop in source_bounds]
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


def ensure_store_shard(
    tokenizer: Tokenizer,
    config: DataConfig,
    shard: tuple[Sequence[ByteRange], Path],
) -> dict[str, Any]:
    """Write a store shard, given as (byte ranges, folder), unless it exists undamaged. Return its summary."""
    parts, folder = shard
    if folder.exists():
        damage = files.damage_of_folder(folder)
        if damage is None:
            return files.read_json(folder / _SUMMARY)
        print(f"damaged store shard {folder}: {damage}; tokenized again from {parts[0].name} on")
    for part in parts:
        _ensure_unpacked(part)
    with files.atomic_folder(folder) as temporary:
        with _StoreWriter(temporary, tokenizer, len(parts), has_words=tokenizer.stores_words(config)) as writer:
            for number, part in enumerate(parts):
                splitter = SentenceSplitter(part.source.splitter, config.language)
                for document in documents.read(part, config, writer.counts):
                    sentences = splitter.split(document.text, ends_document=document.ends_document)
                    writer.add(sentences, len(document.text), number if document.ends_document else None)
            writer.write()
        documents.check_unchanged(parts)
        shard_summary = writer.summary()
        files.write_json(temporary / _SUMMARY, shard_summary)
        files.write_checksums(temporary)
    return shard_summary


class _StoreWriter(ExitStack):
    """Tokenizes sentences and appends them to the arrays of a store shard, block by block."""

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        num_parts: int,
        *,
        has_words: bool,
    ) -> None:
        super().__init__()
        self._encoder = _encoder(tokenizer, with_words=has_words)
        self._tokenizer = tokenizer
        self._is_inside_document = False
        self._arrays: dict[str, GrowingArray] = {}
        for name, dtype in {"ids": tokenizer.id_dtype, **DTYPES}.items():
            if has_words or name != "continues_word":
                self._arrays[name] = self.enter_context(GrowingArray(folder / f"{name}.npy", dtype))
        for name in ("sentence_offsets", "document_offsets"):
            self._arrays[name].append(np.zeros(1))
        self.counts: Counter[str] = Counter()  # repairs and drops by reason
        self._part_counts = {name: np.zeros(num_parts, dtype=np.int64) for name in summary.TEXT_COUNTS}
        self._documents_by_sentences: Counter[int] = Counter()
        # Of the document that has not ended yet: its counts in the blocks before, and the hash of its text there.
        self._unfinished = dict.fromkeys(summary.TEXT_COUNTS, 0)
        self._hash = hashlib.blake2b(digest_size=8)
        self._clear()

    def _clear(self) -> None:
        self._sentences: list[str] = []
        self._ends: list[int] = []  # for each document end: number of sentences before it
        self._parts: list[int] = []  # for each document end: its byte range
        self._num_characters = 0

    def add(
        self,
        sentences: list[str],
        num_characters: int,
        part: int | None,
    ) -> None:
        """Add sentences of a document. `part` is the index of its byte range if the document ends here, else None."""
        if self._is_inside_document:
            sentences = self._tokenizer.separated(["", *sentences])[1:]
        else:
            sentences = self._tokenizer.separated(sentences)
        self._is_inside_document = part is None
        self._sentences += sentences
        self._num_characters += num_characters
        if part is not None:
            self._ends.append(len(self._sentences))
            self._parts.append(part)
        if self._num_characters >= BLOCK_CHARACTERS:
            self.write()

    def write(self) -> None:
        """Tokenize and write the sentences added since the last call, and the ends of their documents."""
        encoded = self._encode(self._sentences)
        lengths = np.diff(encoded.offsets)
        # A sentence of control characters has no tokens, and is left out.
        self.counts["sentences_without_tokens"] += int((lengths == 0).sum())
        stored_offsets, first_stored = split_long(np.unique(encoded.offsets), MAX_SENTENCE_TOKENS)
        is_continuation = np.ones(len(stored_offsets) - 1, dtype=bool)
        is_continuation[first_stored[:-1]] = False
        # The document of the last bounds has not ended yet.
        bounds = np.array([0, *self._ends, len(lengths)])
        token_bounds = encoded.offsets[bounds]
        table = {
            "documents": np.ones(len(self._ends) + 1, dtype=np.int64),
            "sentences": np.diff(ragged.offsets_of(lengths > 0)[bounds]),
            "tokens": np.diff(token_bounds),
            "unk_tokens": np.diff(np.searchsorted(encoded.unknown, token_bounds)),
        }
        for name in ("sentences", "tokens", "unk_tokens"):
            table[name][0] += self._unfinished[name]
            self._unfinished[name] = table[name][-1]
        kept = np.flatnonzero(table["tokens"][:-1])
        self.counts["empty_documents"] += len(self._ends) - len(kept)
        for name, column in table.items():
            np.add.at(self._part_counts[name], np.array(self._parts, dtype=np.int64)[kept], column[kept])
        self._documents_by_sentences.update(table["sentences"][kept].tolist())
        num_stored = ragged.offsets_of(-(-lengths // MAX_SENTENCE_TOKENS))  # before each sentence
        document_ends = self._arrays["is_continuation"].size + num_stored[bounds[1:]]
        self._arrays["document_offsets"].append(document_ends[kept])
        self._arrays["document_hashes"].append(self._hashes(encoded, token_bounds[1:][kept]))
        self._arrays["sentence_offsets"].append(self._arrays["ids"].size + stored_offsets[1:])
        self._arrays["is_continuation"].append(is_continuation)
        self._arrays["ids"].append(encoded.ids)
        self._clear()

    def _encode(self, sentences: list[str]) -> Encoded:
        """Tokenize sentences. If words are stored, also write `continues_word`."""
        if isinstance(self._encoder, JsonEncoder):
            encoded = self._encoder.encode_texts(sentences)
            if encoded.continues_word is not None:
                self._arrays["continues_word"].append(encoded.continues_word)
            return encoded
        text = np.frombuffer("\n".join(sentences).encode(), dtype=np.uint8)
        starts = np.concatenate([[0], np.flatnonzero(text == ord("\n")) + 1])[: len(sentences)]
        encoded = self._encoder.encode(text, starts)
        if "continues_word" in self._arrays:
            continues = self._tokenizer.is_subword[encoded.ids]
            continues[encoded.chunk_offsets[:-1][continues_word(text, encoded.chunk_starts)]] = True
            self._arrays["continues_word"].append(continues)
        return encoded

    def _hashes(self, encoded: Encoded, ends: np.ndarray) -> np.ndarray:
        """Return the hashes of the documents that end at the token positions `ends`, (ends,) uint64.

        The id of each [UNK] is followed by the hash of its text, so that unknown words are told apart. Tokens after the
        last end are part of the next document's hash.
        """
        ids = encoded.ids
        ids_per_hash = encoded.unknown_hashes.itemsize // ids.itemsize
        places = np.repeat(encoded.unknown + 1, ids_per_hash)
        values = np.insert(ids, places, encoded.unknown_hashes.view(ids.dtype))
        ends = ends + ids_per_hash * np.searchsorted(encoded.unknown, ends)
        *finished, rest = np.split(values, ends)
        digests: list[bytes] = []
        for document in finished:
            self._hash.update(document.data)
            digests.append(self._hash.digest())
            self._hash = hashlib.blake2b(digest_size=8)
        self._hash.update(rest.data)
        return np.array(digests, dtype="S8").view("<u8")

    def summary(self) -> dict[str, Any]:
        """Return the counts of each byte range and of the store shard, for its `summary.json`."""
        rows = np.stack(list(self._part_counts.values()), axis=1).tolist()
        return {
            "parts": [dict(zip(summary.TEXT_COUNTS, counts, strict=True)) for counts in rows],
            "sentences_a_document": sorted(self._documents_by_sentences.items()),
            "repairs_and_drops": +self.counts,
        }


# Kept for the process, because an encoder caches the words it has tokenized.
_encoder = lru_cache(maxsize=1)(make_encoder)


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
    word_offsets = ragged.offsets_of(np.array([len(word) for word in words]))
    characters = np.flatnonzero((text & 0xC0) != 0x80)  # the first byte of each
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
