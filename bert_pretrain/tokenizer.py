"""A tokenizer folder: a WordPiece vocabulary with BERT's text processing, written and read.

It opens in `transformers`, and `vocab.txt` in whatever reads Google's. One text is encoded by `tokenizers`; whole
corpora by `encoder.py`.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

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


@lru_cache(maxsize=1)
def load_once(folder: Path, tokenizer_hash: str) -> Tokenizer:
    """Open a tokenizer folder, once in the life of a process.

    Raises:
        DataError: when it is broken, or no longer the one of that hash.
    """
    tokenizer = Tokenizer.load(folder)
    if tokenizer.hash != tokenizer_hash:
        raise DataError("the tokenizer changed while it was used", where=str(folder), remedy="run the command again")
    return tokenizer


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
