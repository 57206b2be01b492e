"""The tokenizer: a WordPiece vocabulary with BERT's text processing, or a vocabulary of whole words.

Its folder opens in `transformers`, and its `vocab.txt` in tools for Google's BERT. Single texts are encoded by
`tokenizers`, corpora by `text/fast_tokenizer.py`. A `JsonTokenizer` is any other tokenizer, such as byte-level BPE.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, processors

from bert_pretrain.config import DataConfig
from bert_pretrain.errors import DataError
from bert_pretrain.io.files import json_text, write_text
from bert_pretrain.text.tokenizer_folder import (
    CLS,
    CONFIG,
    FILES,
    MASK,
    MAX_WORD_CHARACTERS,
    NORMALIZER_NAMES,
    PAD,
    SEP,
    SPECIAL_TOKENS,
    TOKENIZER,
    UNKNOWN,
    UNSPACED,
    VOCABULARY,
    Definition,
    TextRules,
    is_reserved,
    is_unused,
    read_tokenizer_folder,
)

_BLANK_SIGNS = ("Ġ", "Ċ", "▁")  # a blank or line end in byte-level BPE, and a blank in SentencePiece
# The scripts without blanks between words.
_STARTS_UNSPACED = re.compile(rf"[{UNSPACED}\u2E80-\u9FFF\uF900-\uFAFF\uFF00-\uFFEF\U00020000-\U0003FFFF]")
_BATCH_TEXTS = 1 << 16  # bounds memory: the results of `tokenizers` take 800 bytes per word
MAX_UNK_SHARE = 0.05  # share of tokens; a vocabulary with more [UNK] is probably for another language or casing


class Tokenizer:
    """A WordPiece tokenizer with BERT's text processing. With `whole_words`, a tokenizer that splits at white space.

    Text such as `[MASK]` is never encoded as a special token.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        *,
        folder: Path | None = None,
        **rules: Any,
    ) -> None:
        """Build a tokenizer from the tokens in the order of their ids.

        Args:
            folder: the folder that the tokenizer was loaded from; pickling needs it.
            rules: fields of `TextRules`.

        Raises:
            ValueError: a special token is missing, or a token occurs twice.
        """
        self.rules = TextRules(**rules)
        ids = self._number(tokens, folder, SPECIAL_TOKENS)
        if self.whole_words:
            self.backend = Backend(models.WordLevel(ids, unk_token=UNKNOWN))
        else:
            self.backend = Backend(word_piece(ids))
            self.backend.normalizer = self.rules.normalizer
            self.backend.decoder = decoders.WordPiece(prefix="##")
        self.backend.pre_tokenizer = self.rules.pre_tokenizer
        self.backend.add_special_tokens(list(SPECIAL_TOKENS))
        self.backend.post_processor = self._template(CLS, SEP)
        self.backend.encode_special_tokens = True
        self._model = self.backend.model

    def _number(
        self,
        tokens: Sequence[str],
        folder: Path | None,
        special_tokens: Sequence[str],
    ) -> dict[str, int]:
        """Set the tokens and the special ids; return the ids of all tokens."""
        ids = {token: index for index, token in enumerate(tokens)}
        if len(ids) < len(tokens):
            duplicate = next(token for index, token in enumerate(tokens) if ids[token] != index)
            raise ValueError(f"the token {duplicate!r} occurs twice")
        if missing := [token for token in special_tokens if token not in ids]:
            raise ValueError(f"the vocabulary lacks {', '.join(missing)}")
        self.tokens = list(tokens)
        self.folder = folder
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = map(ids.__getitem__, special_tokens)
        return ids

    def _template(self, cls: str, sep: str) -> processors.TemplateProcessing:
        return processors.TemplateProcessing(
            single=f"{cls}:0 $A:0 {sep}:0",
            pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
            special_tokens=[(cls, self.cls_id), (sep, self.sep_id)],
        )

    @staticmethod
    def load(folder: Path, flag: str = "--vocab", *, lowercase: bool | None = None) -> "Tokenizer":
        """Load a tokenizer folder.

        `flag` is the option that named the folder, for messages. `lowercase` is the casing if the files do not set it.
        """
        tokens, rules, definition = read_tokenizer_folder(folder, flag)
        casing = lowercase if rules.lowercase is None else rules.lowercase
        if casing is None:
            what = "the files do not say whether this vocabulary is lowercase"
            remedy = 'write {"do_lower_case": true} or {"do_lower_case": false} there, or pass --lowercase or '
            remedy += "--no-lowercase to vocab --extend or make-data"
            raise DataError(what, where=str(folder / CONFIG), remedy=remedy)
        if lowercase not in (None, casing):
            raise DataError(
                f"do_lower_case of {folder} is {json.dumps(casing)}",
                where="--lowercase" if lowercase else "--no-lowercase",
                remedy=f"leave the flag out, or correct {CONFIG}",
            )
        try:
            if definition is not None:
                return JsonTokenizer(tokens, folder, definition)
            return Tokenizer(tokens, folder=folder, **{**asdict(rules), "lowercase": casing})
        except ValueError as error:
            name = VOCABULARY if (folder / VOCABULARY).is_file() else TOKENIZER
            remedy = f"the file needs each of {', '.join(SPECIAL_TOKENS)} once; rename tokens such as <pad> or <s>"
            if definition is not None:
                remedy = (
                    f"add the token, and name it in {CONFIG}: pad_token, unk_token, cls_token, sep_token, mask_token"
                )
            raise DataError(str(error), where=str(folder / name), remedy=remedy) from error

    def with_tokens(self, tokens: Sequence[str]) -> "Tokenizer":
        """Return a tokenizer with another vocabulary and the same text processing."""
        return Tokenizer(tokens, **asdict(self.rules))

    @property
    def whole_words(self) -> bool:
        return self.rules.whole_words

    @property
    def is_word_piece(self) -> bool:
        return not self.rules.whole_words

    def stores_words(self, config: DataConfig) -> bool:
        """Whether the data must store which tokens continue a word, because the tokens themselves do not tell."""
        return config.segments_words

    @property
    def strips_accents(self) -> bool:
        return self.rules.strips_accents

    @property
    def settings(self) -> dict[str, bool | None]:
        """The settings of the text processing by their names in `tokenizer_config.json`."""
        return {name: getattr(self.rules, key) for name, key in NORMALIZER_NAMES.items()}

    @property
    def files(self) -> tuple[str, ...]:
        """The files that `save` writes. They include `vocab.txt` only if text is split as in Google's BERT."""
        return (TOKENIZER, CONFIG) if self.whole_words or self.rules.split_clusters else FILES

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    @cached_property
    def hash(self) -> str:
        """The SHA-256 of the vocabulary and the settings that affect the ids of a text."""
        content = [self.tokens, "whole words" if self.whole_words else self.settings]
        if self.rules.split_clusters:
            content.append("clusters")
        text = json.dumps(content, ensure_ascii=False, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        assert self.folder is not None  # only the path is pickled, and each worker loads the folder once
        return _load_once, (self.folder.absolute(), self.rules.lowercase, self.hash)

    @property
    def id_dtype(self) -> Any:
        """The smallest dtype for the ids: uint16, or uint32 above 65,536 tokens."""
        return np.uint16 if self.vocab_size <= 65536 else np.uint32

    @cached_property
    def is_subword(self) -> np.ndarray:
        """The mask of tokens that continue a word (`##…`), (vocab_size,) bool."""
        return np.array([token.startswith("##") and not self.whole_words for token in self.tokens])

    @cached_property
    def is_reserved_id(self) -> np.ndarray:
        """The mask of special tokens and unused slots, (vocab_size,) bool."""
        return np.array([is_reserved(token) for token in self.tokens])

    @cached_property
    def word_piece_ids(self) -> np.ndarray:
        """The ascending ids of all tokens that are neither special nor unused."""
        return np.flatnonzero(~self.is_reserved_id)

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a text, without [CLS] and [SEP]."""
        return self.encode_texts([text])[0]

    def encode_texts(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of each text, without [CLS] and [SEP]."""
        encoded: list[list[int]] = []
        for first in range(0, len(texts), _BATCH_TEXTS):
            batch = texts[first : first + _BATCH_TEXTS]
            encoded += [encoding.ids for encoding in self.backend.encode_batch_fast(batch, add_special_tokens=False)]
        if not self.whole_words:
            return encoded
        # `tokenizers` finds words such as [MASK] in the vocabulary; they become [UNK].
        text_ids = np.where(self.is_reserved_id, self.unk_id, np.arange(self.vocab_size)).tolist()
        return [[text_ids[index] for index in ids] for ids in encoded]

    def encode_word(self, word: str) -> list[int]:
        """Return the ids of one of the words of `rules.words`."""
        if self.whole_words and is_reserved(word):
            return [self.unk_id]
        return [piece.id for piece in self._model.tokenize(word)]

    def separated(self, words: list[str]) -> list[str]:
        """Return consecutive words or sentences with the blanks between them, if they change the ids."""
        return words

    def text_of(self, token_id: int) -> str:
        """Return a token as WordPiece writes it: with `##` if no blank is before it."""
        return self.tokens[token_id]

    def long_word_hint(self, texts: Iterable[str]) -> str:
        """Return a hint if most [UNK] tokens of texts are words that are too long for WordPiece, or else ""."""
        lengths: list[int] = []
        for text in texts:
            encoding = self.backend.encode(text, add_special_tokens=False)
            pairs = zip(encoding.ids, encoding.offsets, strict=True)
            lengths += [end - start for token, (start, end) in pairs if token == self.unk_id]
        if self.whole_words or not lengths or np.median(lengths) <= MAX_WORD_CHARACTERS:
            return ""
        return (
            f"a word of more than {MAX_WORD_CHARACTERS} characters is always [UNK]; separate the symbols of sequences, "
            "such as DNA or proteins, by blanks, and make the vocabulary with 'vocab --tokens words'"
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, including special tokens."""
        return str(self.backend.decode(list(ids), skip_special_tokens=False))

    def save(self, folder: Path, model_max_length: int = 512) -> None:
        """Write `files` to a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.contents(model_max_length).items():
            write_text(folder / name, text)

    def contents(self, model_max_length: int = 512) -> dict[str, str]:
        """Return the content of each of `files`."""
        config: dict[str, Any] = {"tokenizer_class": "BertTokenizer"}
        if VOCABULARY not in self.files:  # BertTokenizer would replace the pre-tokenizer of tokenizer.json
            config = {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],  # default: no token_type_ids
                "clean_up_tokenization_spaces": False,
            }
        if not self.whole_words:
            config |= self.settings
        config |= {
            "model_max_length": model_max_length,
            "pad_token": PAD,
            "unk_token": UNKNOWN,
            "cls_token": CLS,
            "sep_token": SEP,
            "mask_token": MASK,
        }
        texts = {
            VOCABULARY: "\n".join(self.tokens) + "\n",
            TOKENIZER: self.backend.to_str(pretty=True) + "\n",
            CONFIG: json_text(config),
        }
        return {name: texts[name] for name in self.files}


class JsonTokenizer(Tokenizer):
    """A tokenizer that a `tokenizer.json` defines, such as byte-level BPE. `tokenizers` encodes all texts.

    It has no `[UNK]` for long words, and its own rules for text: `rules` has no effect.
    """

    def __init__(self, tokens: Sequence[str], folder: Path, definition: Definition) -> None:
        """Build a tokenizer from the tokens in the order of their ids. Raise ValueError if a special one is missing."""
        self.rules = TextRules(lowercase=False)
        self._number(tokens, folder, definition.special_tokens)
        self.definition = definition
        self._content = definition.content
        self.backend = Backend.from_str(json.dumps(self._content))
        wrapped = self.backend.encode("a").ids
        if wrapped[:1] != [self.cls_id] or wrapped[-1:] != [self.sep_id]:
            _, _, cls, sep, _ = definition.special_tokens
            self.backend.post_processor = self._template(cls, sep)
            self._content["post_processor"] = json.loads(self.backend.to_str())["post_processor"]
        self.backend.encode_special_tokens = True

    @property
    def is_word_piece(self) -> bool:
        return False

    def stores_words(self, config: DataConfig) -> bool:
        return config.whole_word_mask

    @property
    def files(self) -> tuple[str, ...]:
        return (TOKENIZER, CONFIG)

    @cached_property
    def hash(self) -> str:
        return self.definition.hash()

    @cached_property
    def is_subword(self) -> np.ndarray:
        """The mask of tokens that start with a letter or digit, not with the sign of a blank, (vocab_size,) bool."""
        starts = [token[:1].isalnum() and not token.startswith(_BLANK_SIGNS) for token in self.tokens]
        return np.array(starts) & ~self.is_reserved_id

    @cached_property
    def is_reserved_id(self) -> np.ndarray:
        is_reserved_id = np.array([is_unused(token) for token in self.tokens])
        for entry in self._content.get("added_tokens") or []:
            is_reserved_id[entry["id"]] |= entry["special"]
        is_reserved_id[[self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id]] = True
        return is_reserved_id

    def separated(self, words: list[str]) -> list[str]:
        return words[:1] + [word if _STARTS_UNSPACED.match(word) else f" {word}" for word in words[1:]]

    def text_of(self, token_id: int) -> str:
        if self.is_reserved_id[token_id]:
            return self.tokens[token_id]
        text = self.decode([token_id]).lstrip(" ")
        return text if self.tokens[token_id].startswith(_BLANK_SIGNS) else f"##{text}"

    def long_word_hint(self, texts: Iterable[str]) -> str:
        return ""

    def contents(self, model_max_length: int = 512) -> dict[str, str]:
        config = {**self.definition.config, "model_max_length": model_max_length}
        return {TOKENIZER: json.dumps(self._content, ensure_ascii=False, indent=2) + "\n", CONFIG: json_text(config)}


def word_piece(ids: dict[str, int]) -> models.WordPiece:
    return models.WordPiece(ids, unk_token=UNKNOWN, max_input_chars_per_word=MAX_WORD_CHARACTERS)


@lru_cache(maxsize=1)
def _load_once(folder: Path, lowercase: bool, hash_: str) -> Tokenizer:
    tokenizer = Tokenizer.load(folder, lowercase=lowercase)
    if tokenizer.hash != hash_:
        raise DataError("the tokenizer changed during the run", where=str(folder), remedy="run the command again")
    return tokenizer


@dataclass(frozen=True)
class Extension:
    """The new tokens of an extended vocabulary."""

    num_old_tokens: int
    num_tokens: int
    pieces: dict[int, list[int]]  # id of each new token -> ids of the old tokens it was split into


def find_extension(old: Sequence[str], new: Sequence[str]) -> Extension | None:
    """Return the extension of vocabulary `old` to `new`, or None if `new` is not an extension.

    In an extension, every old token keeps its id, and new tokens replace unused slots or follow the last token.
    """
    added = [index for index, token in enumerate(new) if index >= len(old) or token != old[index]]
    replaced = [old[index] for index in added if index < len(old)]
    if len(new) < len(old) or not all(map(is_unused, replaced)):
        return None
    pieces = word_piece({token: index for index, token in enumerate(old)})
    return Extension(len(old), len(new), {index: old_pieces(new[index], pieces) for index in added})


def old_pieces(token: str, model: models.WordPiece) -> list[int]:
    """Return the ids of the pieces of a new token in an old vocabulary, or the id of [UNK] if it cannot be split.

    The first piece of a token `##…` also starts with `##`: the longest one that matches the start of the token does.
    """
    return [piece.id for piece in model.tokenize(token)]
