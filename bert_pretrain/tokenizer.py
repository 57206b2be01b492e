"""A tokenizer folder, and text to ids at memory speed, exactly BERT's to the last id.

BERT's normaliser and pre-tokeniser never look across a blank, a CJK character or ASCII punctuation. So text is cut
there (in its UTF-8 bytes, with numpy), each distinct chunk is tokenised once by `tokenizers`, and the ids are gathered.
The price is a cache of the distinct chunks, which is emptied when it grows beyond a bound.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from bert_pretrain import chunks, ragged
from bert_pretrain.errors import DataError
from bert_pretrain.files import read_json, write_json, write_text

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
FILES = ("vocab.txt", "tokenizer.json", "tokenizer_config.json")


class Tokenizer:
    """A WordPiece vocabulary with BERT's text processing; text such as `[MASK]` is never a special token."""

    def __init__(
        self,
        tokens: Sequence[str],
        *,
        lowercase: bool,
        strip_accents: bool | None,
        handle_chinese_chars: bool,
        folder: Path | None = None,
    ) -> None:
        """Build from the tokens in the order of their ids.

        Raises:
            ValueError: when a special token is missing or a token stands twice.
        """
        ids = {token: index for index, token in enumerate(tokens)}
        if len(ids) < len(tokens):
            duplicate = next(token for index, token in enumerate(tokens) if ids[token] != index)
            raise ValueError(f"the token {duplicate!r} stands twice")
        missing = [token for token in SPECIAL_TOKENS if token not in ids]
        if missing:
            raise ValueError(f"the vocabulary lacks {', '.join(missing)}")
        self.tokens = list(tokens)
        self.folder = folder
        self.settings = {
            "do_lower_case": lowercase,
            "strip_accents": strip_accents,
            "tokenize_chinese_chars": handle_chinese_chars,
        }
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (ids[token] for token in SPECIAL_TOKENS)
        self.backend = _backend(ids, self.settings)
        self.backend.encode_special_tokens = True

    @staticmethod
    def load(folder: Path, flag: str = "--vocab") -> "Tokenizer":
        """Open a tokenizer folder: `vocab.txt` with `tokenizer_config.json`.

        Raises:
            DataError: when a file is missing or broken, or the casing is not stated.
        """
        remedy = "name a folder that 'bert-pretrain vocab' has written, or one of a BERT with vocab.txt"
        vocabulary = folder / "vocab.txt"
        if not vocabulary.is_file():
            raise DataError(f"{folder} has no vocab.txt", where=flag, remedy=remedy)
        config = read_json(folder / "tokenizer_config.json")
        if not isinstance(config, dict) or not isinstance(config.get("do_lower_case"), bool):
            raise DataError(
                "the casing of this vocabulary is not stated",
                where=str(folder / "tokenizer_config.json"),
                remedy='add "do_lower_case": true or false there',
            )
        for name, default in (("strip_accents", None), ("tokenize_chinese_chars", True)):
            if config.setdefault(name, default) not in (True, False, default):
                raise DataError(
                    f"{name} is {config[name]!r}",
                    where=str(folder / "tokenizer_config.json"),
                    remedy="give true or false there",
                )
        try:
            text = vocabulary.read_text(encoding="utf-8")
            return Tokenizer(
                text.removesuffix("\n").split("\n"),
                lowercase=config["do_lower_case"],
                strip_accents=config["strip_accents"],
                handle_chinese_chars=config["tokenize_chinese_chars"],
                folder=folder,
            )
        except ValueError as error:
            raise DataError(f"vocab.txt is broken: {error}", where=str(vocabulary), remedy=remedy) from error

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    @property
    def hash(self) -> str:
        """A SHA-256 of all that decides the ids of a text."""
        content = json.dumps([self.tokens, self.settings], ensure_ascii=False, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def id_dtype(self) -> Any:
        """The smallest type that holds every id: uint16, or uint32 above 65,536 tokens."""
        return np.uint16 if self.vocab_size <= 65536 else np.uint32

    @property
    def is_subword(self) -> np.ndarray:
        """Whether each token continues a word (`##…`), (vocab_size,) bool."""
        return np.array([token.startswith("##") for token in self.tokens])

    @property
    def word_piece_ids(self) -> np.ndarray:
        """The ids of real word pieces: neither special nor unused, ascending."""
        return np.flatnonzero([not is_reserved(token) for token in self.tokens])

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of one text, without [CLS] and [SEP]; for many texts use `Encoder`."""
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def save(self, folder: Path, model_max_length: int = 512) -> None:
        """Write `vocab.txt`, `tokenizer.json` and `tokenizer_config.json` into a folder, made if needed.

        All three are made from the vocabulary, also where it came from elsewhere, so that they agree.
        """
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "vocab.txt", "\n".join(self.tokens) + "\n")
        write_text(folder / "tokenizer.json", self.backend.to_str(pretty=True) + "\n")
        names = dict(
            zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL_TOKENS, strict=True)
        )
        # Another class would open in transformers too, but drop the token_type_ids without a word.
        config = {"tokenizer_class": "BertTokenizer", **self.settings, "model_max_length": model_max_length, **names}
        write_json(folder / "tokenizer_config.json", config)


def is_reserved(token: str) -> bool:
    """Whether a token is special or an unused slot, so never a piece of text."""
    return token in SPECIAL_TOKENS or (token.startswith("[unused") and token.endswith("]"))


def bert_normalizer(*, lowercase: bool, strip_accents: bool | None, handle_chinese_chars: bool) -> Any:
    """Return BERT's text clean-up as `tokenizers` has it."""
    return normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=handle_chinese_chars,
        strip_accents=strip_accents,
        lowercase=lowercase,
    )


def _backend(ids: dict[str, int], settings: dict[str, Any]) -> Backend:
    backend = Backend(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=100))
    backend.normalizer = bert_normalizer(
        lowercase=settings["do_lower_case"],
        strip_accents=settings["strip_accents"],
        handle_chinese_chars=settings["tokenize_chinese_chars"],
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )
    return backend


_MAX_CACHED_CHUNKS = 1 << 20


class Encoder:
    """Text to ids for whole arrays of text: two caches of chunks in front of the library.

    Chunks between blanks are the fast path; a new one is cut again at punctuation, which halves the number of distinct
    pieces that the library must see. CJK characters are looked up in a table.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces = _ChunkCache(self._encode_pieces, tokenizer.id_dtype)
        self._chunks = _ChunkCache(self._encode_chunks, tokenizer.id_dtype)
        self._cjk_ids = self._cjk_table() if tokenizer.settings["tokenize_chinese_chars"] else None

    def encode(self, text: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of consecutive sentences, each as if it were tokenised alone.

        Args:
            text: valid UTF-8, (bytes,) uint8, less than 2 GiB.
            starts: the byte where each sentence begins, ascending from 0, (sentences,); it ends where the next begins.

        Returns:
            ids (tokens,) and offsets (sentences + 1,) int64.
        """
        if len(text) == 0 or len(starts) == 0:
            return np.zeros(0, self._tokenizer.id_dtype), np.zeros(len(starts) + 1, np.int64)
        cut = chunks.cut_text(text, starts, around_cjk=self._cjk_ids is not None)
        ids, lengths = self._chunks.encode(cut.rest, cut.rest_starts)
        if cut.cjk_points is not None:
            assert self._cjk_ids is not None
            rest_ids, rest_lengths = ids, lengths
            lengths = np.ones(len(cut.starts), dtype=np.int64)
            lengths[~cut.is_cjk] = rest_lengths
            is_cjk_token = np.repeat(cut.is_cjk, lengths)
            ids = np.empty(len(is_cjk_token), dtype=self._tokenizer.id_dtype)
            ids[is_cjk_token] = self._cjk_ids[cut.cjk_points - chunks.CJK_FIRST]
            ids[~is_cjk_token] = rest_ids
        token_offsets = ragged.offsets_of(lengths)
        return ids, token_offsets[np.append(np.searchsorted(cut.starts, starts), len(cut.starts))]

    def _cjk_table(self) -> np.ndarray:
        known = {token: index for index, token in enumerate(self._tokenizer.tokens)}
        unk_id = self._tokenizer.unk_id
        points = range(chunks.CJK_FIRST, chunks.CJK_LAST + 1)
        return np.array([known.get(chr(point), unk_id) for point in points], dtype=self._tokenizer.id_dtype)

    def _encode_chunks(self, new: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Encode new chunks by cutting them around punctuation; returns ids and ids a chunk."""
        text, starts = chunks.join(new)
        piece_starts = chunks.cut_around_punctuation(text, starts)
        ids, lengths = self._pieces.encode(text, piece_starts)
        ends = np.append(np.searchsorted(piece_starts, starts), len(piece_starts))
        return ids, np.diff(ragged.offsets_of(lengths)[ends])

    def _encode_pieces(self, new: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Encode new pieces by the library; returns ids and ids a piece."""
        texts = [piece.decode() for piece in new]
        encodings = self._tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False)
        encoded = [encoding.ids for encoding in encodings]
        flat = [token for ids in encoded for token in ids]
        lengths = np.array([len(ids) for ids in encoded], dtype=np.int64)
        return np.array(flat, dtype=self._tokenizer.id_dtype), lengths


class _ChunkCache:
    """The ids of the distinct chunks seen so far; new ones are asked of `encode_new`."""

    def __init__(self, encode_new: Callable[[list[bytes]], tuple[np.ndarray, np.ndarray]], dtype: Any) -> None:
        self._encode_new = encode_new
        self._dtype = dtype
        self._clear()

    def _clear(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._ids = np.zeros(0, dtype=self._dtype)
        self._lengths = np.zeros(0, dtype=np.int64)

    def encode(self, text: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of the chunks that begin at `starts` (the last one ends with the text), and ids a chunk."""
        distinct, indices = chunks.distinct(text, starts)
        rows = self._rows(distinct)[indices]
        offsets = pa.array(ragged.offsets_of(self._lengths).astype(np.int32))
        ids = pa.ListArray.from_arrays(offsets, pa.array(self._ids)).take(pa.array(rows)).flatten()
        return ids.to_numpy(), self._lengths[rows]

    def _rows(self, distinct: list[bytes]) -> np.ndarray:
        """Return each distinct chunk's row in the table of ids, after adding the new ones."""
        if len(self._numbers) + len(distinct) > _MAX_CACHED_CHUNKS:
            self._clear()
        known = self._numbers
        rows = np.fromiter(map(known.get, distinct, itertools.repeat(-1)), dtype=np.int32, count=len(distinct))
        unknown = np.flatnonzero(rows < 0)
        if len(unknown):
            new = [distinct[place] for place in unknown]
            rows[unknown] = np.arange(len(known), len(known) + len(new))
            ids, lengths = self._encode_new(new)
            known.update(zip(new, rows[unknown].tolist(), strict=True))
            self._ids = np.concatenate([self._ids, ids])
            self._lengths = np.concatenate([self._lengths, lengths])
        return rows
