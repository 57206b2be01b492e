"""A tokenizer folder: a WordPiece vocabulary with BERT's text processing, written and read.

It opens in `transformers`, and `vocab.txt` in whatever reads Google's. One text is encoded by `tokenizers`; whole
corpora by `text/encoder.py`.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from bert_pretrain.errors import DataError
from bert_pretrain.storage.files import write_json, write_text
from bert_pretrain.storage.paths import AnyPath
from bert_pretrain.text.tokenizer_folder import (
    FILES,
    MAX_WORD_CHARACTERS,
    REMEDY,
    SPECIAL_TOKENS,
    is_unused,
    read_tokenizer_folder,
)

__all__ = ["FILES", "SPECIAL_TOKENS", "Tokenizer", "bert_normalizer", "is_reserved", "load_once"]


class Tokenizer:
    """A WordPiece vocabulary with BERT's text processing; text such as `[MASK]` is never a special token."""

    def __init__(
        self,
        tokens: Sequence[str],
        *,
        lowercase: bool,
        strip_accents: bool | None,
        handle_chinese_chars: bool,
        folder: AnyPath | None = None,
    ) -> None:
        """Build from the tokens in the order of their ids.

        Raises:
            ValueError: when a special token is missing or a token occurs twice.
        """
        ids = {token: index for index, token in enumerate(tokens)}
        if len(ids) < len(tokens):
            duplicate = next(token for index, token in enumerate(tokens) if ids[token] != index)
            raise ValueError(f"the token {duplicate!r} occurs twice")
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

    def __repr__(self) -> str:
        casing = "lower case" if self.settings["do_lower_case"] else "cased"
        return f"<WordPiece tokenizer of {self.vocab_size:,} tokens, {casing}>"

    @staticmethod
    def load(folder: AnyPath, flag: str = "--vocab", *, lowercase: bool | None = None) -> "Tokenizer":
        """Open a tokenizer folder: `vocab.txt` or `tokenizer.json`, with `tokenizer_config.json`.

        `flag` named it, for messages; `lowercase` is the casing, for a folder that does not state it.

        Raises:
            DataError: when a file is missing or broken, the tokenizer is not BERT's, or its casing is not known.
        """
        found = read_tokenizer_folder(folder, flag)
        if found.lowercase is None and lowercase is None:
            raise DataError(
                "the casing of this vocabulary is not stated",
                where=str(folder / "tokenizer_config.json"),
                remedy='write {"do_lower_case": true} or {"do_lower_case": false} there, or add --lowercase or '
                "--no-lowercase to vocab --extend or make-data",
            )
        if None not in (found.lowercase, lowercase) and found.lowercase != lowercase:
            raise DataError(
                f"{folder} states do_lower_case {str(found.lowercase).lower()}",
                where="--lowercase" if lowercase else "--no-lowercase",
                remedy="leave the flag out, or correct the folder's tokenizer_config.json",
            )
        try:
            return Tokenizer(
                found.tokens,
                lowercase=bool(lowercase if found.lowercase is None else found.lowercase),
                strip_accents=found.strip_accents,
                handle_chinese_chars=found.handle_chinese_chars,
                folder=folder,
            )
        except ValueError as error:
            name = "vocab.txt" if (folder / "vocab.txt").is_file() else "tokenizer.json"
            raise DataError(f"{name} is broken: {error}", where=str(folder / name), remedy=REMEDY) from error

    def with_tokens(self, tokens: Sequence[str]) -> "Tokenizer":
        """Return a tokenizer with another vocabulary that treats text as this one does."""
        return Tokenizer(
            tokens,
            lowercase=bool(self.settings["do_lower_case"]),
            strip_accents=self.settings["strip_accents"],
            handle_chinese_chars=bool(self.settings["tokenize_chinese_chars"]),
        )

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    @property
    def hash(self) -> str:
        """A SHA-256 of all that decides the ids of a text."""
        content = json.dumps([self.tokens, self.settings], ensure_ascii=False, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def reference(self) -> "TokenizerReference":
        """What a worker needs to open this tokenizer, which came from a folder."""
        assert self.folder is not None
        return TokenizerReference(self.folder.absolute(), bool(self.settings["do_lower_case"]), self.hash)

    @property
    def id_dtype(self) -> Any:
        """The smallest type that holds every id: uint16, or uint32 above 65,536 tokens."""
        return np.uint16 if self.vocab_size <= 65536 else np.uint32

    @cached_property
    def is_subword(self) -> np.ndarray:
        """Whether each token continues a word (`##…`), (vocab_size,) bool."""
        return np.array([token.startswith("##") for token in self.tokens])

    @cached_property
    def word_piece_ids(self) -> np.ndarray:
        """The ids of real word pieces: neither special nor unused, ascending."""
        return np.flatnonzero([not is_reserved(token) for token in self.tokens])

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of one text, without [CLS] and [SEP]; for many texts use `Encoder`."""
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens among them, as far as the vocabulary has kept it."""
        return str(self.backend.decode(list(ids), skip_special_tokens=False))

    def save(self, folder: AnyPath, model_max_length: int = 512) -> None:
        """Write `vocab.txt`, `tokenizer.json` and `tokenizer_config.json` into a folder, made if needed.

        All three are made from the vocabulary, also where it came from elsewhere, so that they agree.
        """
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "vocab.txt", "\n".join(self.tokens) + "\n")
        write_text(folder / "tokenizer.json", self.backend.to_str(pretty=True) + "\n")
        names = dict(
            zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL_TOKENS, strict=True)
        )
        # Another class would open in transformers too, but drop the token_type_ids silently.
        config = {"tokenizer_class": "BertTokenizer", **self.settings, "model_max_length": model_max_length, **names}
        write_json(folder / "tokenizer_config.json", config)


@dataclass(frozen=True)
class TokenizerReference:
    """How another process opens the same tokenizer."""

    folder: AnyPath
    lowercase: bool
    hash: str


@lru_cache(maxsize=1)
def load_once(reference: TokenizerReference) -> Tokenizer:
    """Open a tokenizer folder, once in the life of a process.

    Raises:
        DataError: when it is broken, or has changed.
    """
    tokenizer = Tokenizer.load(reference.folder, lowercase=reference.lowercase)
    if tokenizer.hash != reference.hash:
        raise DataError(
            "the tokenizer changed while it was used", where=str(reference.folder), remedy="run the command again"
        )
    return tokenizer


def is_reserved(token: str) -> bool:
    """Whether a token is special or an unused slot, so never a piece of text."""
    return token in SPECIAL_TOKENS or is_unused(token)


def bert_normalizer(*, lowercase: bool, strip_accents: bool | None, handle_chinese_chars: bool) -> Any:
    """Return BERT's text clean-up as `tokenizers` has it."""
    return normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=handle_chinese_chars,
        strip_accents=strip_accents,
        lowercase=lowercase,
    )


def _backend(ids: dict[str, int], settings: dict[str, Any]) -> Backend:
    backend = Backend(models.WordPiece(ids, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARACTERS))
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
