"""Writes a store shard: byte ranges of inputs are read, split into sentences, tokenised and appended, block by block.

Memory is bounded by a block, whatever the size of a byte range or of a document; what is dropped is counted by reason.
"""

import bisect
import contextlib
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np

from bert_pretrain.config import DataConfig
from bert_pretrain.io.files import atomic_folder, seal_folder, write_json
from bert_pretrain.make_data import segmenter
from bert_pretrain.make_data.summary import StoreShardSummary
from bert_pretrain.make_data.token_store import split_long
from bert_pretrain.text import documents, ragged
from bert_pretrain.text.fast_tokenizer import Encoder
from bert_pretrain.text.sentences import SentenceSplitter
from bert_pretrain.text.text_files import ByteRange
from bert_pretrain.text.tokenizer import Tokenizer

MAX_SENTENCE_TOKENS = 256
SUMMARY = "summary.json"
_BLOCK_CHARACTERS = 4 << 20


@dataclass
class _Block:
    """Sentences that are tokenised at once."""

    sentences: list[str] = field(default_factory=list)
    document_ends: list[int] = field(default_factory=list)  # the number of sentences at the end of each document
    part_ends: list[int] = field(default_factory=list)  # the number of document ends at the end of each byte range
    num_characters: int = 0


def write_store_shard(
    parts: Sequence[ByteRange], folder: Path, tokenizer: Tokenizer, config: DataConfig
) -> StoreShardSummary:
    """Tokenise byte ranges of inputs into a store shard, which appears whole or not at all; returns its summary."""
    counts: Counter[str] = Counter()
    with atomic_folder(folder) as temporary:
        with contextlib.ExitStack() as stack:
            writer = _Writer(temporary, tokenizer, config, counts, stack)
            block = _Block()
            for part in parts:
                splitter = SentenceSplitter(part.source.splitter, config.language)
                for document in documents.read(part, config, counts):
                    block.sentences += splitter.split(document.text, ends_document=document.ends_document)
                    block.num_characters += len(document.text)
                    if document.ends_document:
                        block.document_ends.append(len(block.sentences))
                    if block.num_characters >= _BLOCK_CHARACTERS:
                        writer.append(block)
                        block = _Block()
                block.part_ends.append(len(block.document_ends))
            writer.append(block)
        summary = writer.summary()
        write_json(temporary / SUMMARY, summary)
        seal_folder(temporary)
    return summary


class _Writer:
    """Appends blocks to the arrays of a store shard."""

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, config: DataConfig, counts: Counter[str], stack: contextlib.ExitStack
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
        self._totals_at_part_ends: list[tuple[int, int, int, int]] = []  # documents, sentences, tokens, [UNK]
        self._num_sentences = 0
        self._unk_tokens = 0
        # Of the document that has begun and not ended: where it begins, in stored and in read sentences, and its hash.
        self._document_begin = 0
        self._sentences_before = 0
        self._document_hash = hashlib.blake2b(digest_size=8)
        self._documents_by_sentences: Counter[int] = Counter()

    def append(self, block: _Block) -> None:
        """Write sentences, and the documents and byte ranges that end among them."""
        ids, lengths = self._encode(block.sentences)
        # A sentence of control characters alone has no token; a document of such sentences is empty.
        kept_before = ragged.offsets_of(lengths > 0)
        self._counts["sentences_without_tokens"] += len(lengths) - int(kept_before[-1])
        read_offsets = ragged.offsets_of(lengths[lengths > 0])
        offsets, first_stored = split_long(read_offsets, MAX_SENTENCE_TOKENS)
        is_continuation = np.ones(len(offsets) - 1, dtype=bool)
        is_continuation[first_stored[:-1]] = False
        num_stored, num_tokens = self._is_continuation.size, self._ids.size
        self._ids.append(ids)
        self._sentence_offsets.append(offsets[1:] + num_tokens)
        self._is_continuation.append(is_continuation)
        ends = kept_before[block.document_ends]
        tokens, sentences = offsets[first_stored[ends]], ends + self._num_sentences
        kept = self._end_documents(ids, tokens, sentences, first_stored[ends] + num_stored)
        unk_before = ragged.offsets_of(ids == self._unk_id)
        for end in block.part_ends:
            # A byte range ends where its last document does, or where it began if it has none in this block.
            last_token = int(tokens[end - 1]) if end else 0
            num_documents = self._document_hashes.size - len(kept) + bisect.bisect_left(kept, end)
            num_sentences = int(sentences[end - 1]) if end else self._num_sentences
            num_unk = self._unk_tokens + int(unk_before[last_token])
            self._totals_at_part_ends.append((num_documents, num_sentences, num_tokens + last_token, num_unk))
        self._unk_tokens += int(unk_before[-1])
        self._num_sentences += int(kept_before[-1])

    def _encode(self, sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of sentences, and ids per sentence; with a segmenter, write which of them continue a word."""
        text = np.frombuffer("\n".join(sentences).encode(), dtype=np.uint8)
        starts = np.concatenate([[0], np.flatnonzero(text == ord("\n")) + 1])[: len(sentences)]
        ids, places, offsets = self._encoder.encode_chunks(text, starts)
        lengths = np.diff(offsets[np.append(np.searchsorted(places, starts), len(places))])
        if self._continues_word is not None:
            continues = np.zeros(len(ids), dtype=bool)
            continues[offsets[:-1][segmenter.continues_word(text, places)]] = True
            self._continues_word.append(continues)
        return ids, lengths

    def _end_documents(
        self, ids: np.ndarray, tokens: np.ndarray, sentences: np.ndarray, stored: np.ndarray
    ) -> list[int]:
        """End documents, given the tokens of this block and the read and stored sentences of all before each end.

        Returns which of them are kept, because they are not empty.
        """
        begin = 0
        hashes, kept = [], []
        for number, (end, stored_end) in enumerate(zip(tokens.tolist(), stored.tolist(), strict=True)):
            if stored_end == self._document_begin:
                self._counts["empty_documents"] += 1
                continue
            self._document_hash.update(ids[begin:end].data)
            hashes.append(int.from_bytes(self._document_hash.digest(), "little"))
            kept.append(number)
            self._document_hash = hashlib.blake2b(digest_size=8)
            self._document_begin = stored_end
            begin = end
        self._document_hash.update(ids[begin:].data)
        self._document_hashes.append(np.array(hashes, dtype=np.uint64))
        self._document_offsets.append(stored[kept])
        counts = np.diff(sentences[kept], prepend=self._sentences_before)
        self._documents_by_sentences.update(counts.tolist())
        self._sentences_before = int(sentences[kept[-1]]) if kept else self._sentences_before
        return kept

    def summary(self) -> StoreShardSummary:
        """Return what was written, by byte range."""
        counts = np.diff(np.array(self._totals_at_part_ends), axis=0, prepend=0).tolist()
        return {
            "parts": [
                {"documents": documents, "sentences": sentences, "tokens": tokens, "unk_tokens": unk}
                for documents, sentences, tokens, unk in counts
            ],
            "sentences_a_document": sorted(self._documents_by_sentences.items()),
            "repairs_and_drops": +self._counts,
        }


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
