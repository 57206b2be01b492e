"""Parts of the text to a piece of the token store: read, split into sentences, tokenise, write, block by block.

Memory is bounded by a block, whatever the size of a part or of a document; what is dropped is counted by reason.
"""

import bisect
import contextlib
import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np

from bert_pretrain import documents, ragged
from bert_pretrain.config import DataConfig
from bert_pretrain.documents import Part
from bert_pretrain.encoder import Encoder
from bert_pretrain.files import atomic_folder, read_json, seal_folder, write_json
from bert_pretrain.make_data import segmenter
from bert_pretrain.make_data.sentences import SentenceSplitter
from bert_pretrain.make_data.token_store import split_long
from bert_pretrain.tokenizer import Tokenizer

MAX_SENTENCE_TOKENS = 256
_BLOCK_CHARACTERS = 4 << 20


def ingest(parts: Sequence[Part], folder: Path, tokenizer: Tokenizer, config: DataConfig) -> dict[str, Any]:
    """Tokenise parts into a piece of the store, unless it is there; returns the piece's summary."""
    if not (folder / "summary.json").exists():
        with atomic_folder(folder) as temporary:
            _write_piece(parts, temporary, tokenizer, config)
            seal_folder(temporary)
    summary: dict[str, Any] = read_json(folder / "summary.json")
    return summary


@dataclass
class _Block:
    """Sentences that are tokenised at once."""

    sentences: list[str] = field(default_factory=list)
    document_ends: list[int] = field(default_factory=list)  # how many of the sentences are there where a document ends
    part_ends: list[int] = field(default_factory=list)  # how many documents have ended where a part does
    num_characters: int = 0


def _write_piece(parts: Sequence[Part], folder: Path, tokenizer: Tokenizer, config: DataConfig) -> None:
    counts: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        writer = _PieceWriter(folder, tokenizer, config, counts, stack)
        block = _Block()
        for part in parts:
            splitter = SentenceSplitter(part.source.splitter, config.language)
            for passage in documents.read(part, config, counts):
                block.sentences += splitter.split(passage.text, ends_document=passage.ends_document)
                block.num_characters += len(passage.text)
                if passage.ends_document:
                    block.document_ends.append(len(block.sentences))
                if block.num_characters >= _BLOCK_CHARACTERS:
                    writer.append(block)
                    block = _Block()
            block.part_ends.append(len(block.document_ends))
        writer.append(block)
    figures = zip((part.name for part in parts), writer.figures_of_parts(), strict=True)
    write_json(
        folder / "summary.json",
        {
            "parts": [{"name": name, **each} for name, each in figures],
            "sentences_a_document": writer.sentences_a_document,
            "repairs_and_drops": +counts,
        },
    )


class _PieceWriter:
    """Writes a piece of the store block by block, so that memory is bounded whatever the size of the part."""

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
        self._num_sentences = 0
        self._unk_tokens = 0
        self._at_part_ends: list[dict[str, int]] = []
        self._document_end = 0  # sentences (of the store) before the document that is not at its end
        self._document_hash = hashlib.blake2b(digest_size=8)
        self._sentences_a_document: Counter[int] = Counter()
        self._sentences_before = 0  # sentences (of the text) before that document

    def append(self, block: _Block) -> None:
        """Write sentences, and the documents and parts that end among them."""
        ids, lengths = self._encode(block.sentences)
        # A sentence of control characters alone has no token; a document of such sentences is empty.
        kept_before = ragged.offsets_of(lengths > 0)
        self._counts["sentences_without_tokens"] += len(lengths) - int(kept_before[-1])
        offsets, first_pieces = split_long(ragged.offsets_of(lengths[lengths > 0]), MAX_SENTENCE_TOKENS)
        is_continuation = np.ones(len(offsets) - 1, dtype=bool)
        is_continuation[first_pieces[:-1]] = False
        num_pieces, num_tokens = self._is_continuation.size, self._ids.size
        self._ids.append(ids)
        self._sentence_offsets.append(offsets[1:] + num_tokens)
        self._is_continuation.append(is_continuation)
        ends = kept_before[block.document_ends]
        tokens, sentences = offsets[first_pieces[ends]], ends + self._num_sentences
        kept = self._end_documents(ids, tokens, sentences, first_pieces[ends] + num_pieces)
        is_unk = ids == self._unk_id
        for end in block.part_ends:
            # A part ends where its last document does, or where it began if it has none in this block.
            last_token = int(tokens[end - 1]) if end else 0
            figures = {
                "documents": self._document_hashes.size - len(kept) + bisect.bisect_left(kept, end),
                "sentences": int(sentences[end - 1]) if end else self._num_sentences,
                "tokens": num_tokens + last_token,
                "unk_tokens": self._unk_tokens + int(is_unk[:last_token].sum()),
            }
            self._at_part_ends.append(figures)
        self._unk_tokens += int(is_unk.sum())
        self._num_sentences += int(kept_before[-1])

    def _encode(self, sentences: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of sentences, and ids a sentence; with a segmenter, write which of them continue a word."""
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
        self, ids: np.ndarray, tokens: np.ndarray, sentences: np.ndarray, pieces: np.ndarray
    ) -> list[int]:
        """Close documents, by the tokens of this block and the sentences and pieces of all before each end.

        Returns:
            which of them are kept, because they hold anything.
        """
        begin = 0
        hashes, kept = [], []
        for place, (end, piece) in enumerate(zip(tokens.tolist(), pieces.tolist(), strict=True)):
            if piece == self._document_end:
                self._counts["empty_documents"] += 1
                continue
            self._document_hash.update(ids[begin:end].data)
            hashes.append(int.from_bytes(self._document_hash.digest(), "little"))
            kept.append(place)
            self._document_hash = hashlib.blake2b(digest_size=8)
            self._document_end = piece
            begin = end
        self._document_hash.update(ids[begin:].data)
        self._document_hashes.append(np.array(hashes, dtype=np.uint64))
        self._document_offsets.append(pieces[kept])
        counts = np.diff(sentences[kept], prepend=self._sentences_before)
        self._sentences_a_document.update(counts.tolist())
        self._sentences_before = int(sentences[kept[-1]]) if kept else self._sentences_before
        return kept

    @property
    def sentences_a_document(self) -> list[tuple[int, int]]:
        """How many documents there are of each number of sentences."""
        return sorted(self._sentences_a_document.items())

    def figures_of_parts(self) -> list[dict[str, int]]:
        """Return what is there of each part."""
        nothing = dict.fromkeys(self._at_part_ends[0], 0)
        return [
            {name: after[name] - before[name] for name in after}
            for before, after in itertools.pairwise([nothing, *self._at_part_ends])
        ]


@lru_cache(maxsize=1)
def _encoder(tokenizer: Tokenizer) -> Encoder:
    """Return the encoder of a process, which knows the words of the parts before."""
    return Encoder(tokenizer)


class GrowingArray:
    """A one-dimensional `.npy` file that is appended to; its header tells the size once it is closed."""

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
