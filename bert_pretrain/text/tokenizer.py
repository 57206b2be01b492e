"""The tokenizer: a WordPiece vocabulary with BERT's text processing, or a vocabulary of whole words.

Its folder opens in `transformers`, and its `vocab.txt` in tools for Google's BERT. Single texts are encoded by
`tokenizers`, corpora by `text/fast_tokenizer.py`.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from bert_pretrain.errors import DataError
from bert_pretrain.io.files import json_text, write_text
from bert_pretrain.text.tokenizer_folder import (
    CLUSTER,
    CONFIG,
    FILES,
    MAX_WORD_CHARACTERS,
    NORMALIZER_NAMES,
    SPECIAL_TOKENS,
    TOKENIZER,
    UNKNOWN,
    VOCABULARY,
    is_reserved,
    is_unused,
    read_tokenizer_folder,
)

_BATCH_TEXTS = 1 << 16  # bounds memory: the results of `tokenizers` take 800 bytes per word
MAX_UNK_SHARE = 0.05  # share of tokens; a vocabulary with more [UNK] is probably for another language or casing
bert_normalizer = normalizers.BertNormalizer  # BERT's text clean-up


class Tokenizer:
    """A WordPiece tokenizer with BERT's text processing. With `whole_words`, a tokenizer that splits at white space.

    Text such as `[MASK]` is never encoded as a special token.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        *,
        lowercase: bool,
        strip_accents: bool | None,
        handle_chinese_chars: bool,
        whole_words: bool = False,
        split_clusters: bool = False,
        folder: Path | None = None,
    ) -> None:
        """Build a tokenizer from the tokens in the order of their ids.

        Args:
            strip_accents: None means the same as `lowercase`.
            handle_chinese_chars: split at every CJK character.
            whole_words: each word is one token or [UNK]; the other settings have no effect.
            split_clusters: split scripts without spaces into clusters of characters, as BERT splits Chinese.
            folder: the folder that the tokenizer was loaded from; pickling needs it.

        Raises:
            ValueError: a special token is missing, or a token occurs twice.
        """
        ids = {token: index for index, token in enumerate(tokens)}
        if len(ids) < len(tokens):
            duplicate = next(token for index, token in enumerate(tokens) if ids[token] != index)
            raise ValueError(f"the token {duplicate!r} occurs twice")
        if missing := [token for token in SPECIAL_TOKENS if token not in ids]:
            raise ValueError(f"the vocabulary lacks {', '.join(missing)}")
        self.tokens = list(tokens)
        self.whole_words = whole_words
        self.split_clusters = split_clusters
        self.folder = folder
        self.settings = dict(zip(NORMALIZER_NAMES, (lowercase, strip_accents, handle_chinese_chars), strict=True))
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (ids[token] for token in SPECIAL_TOKENS)
        if whole_words:
            self.backend = Backend(models.WordLevel(ids, unk_token=UNKNOWN))
            self.backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        else:
            word_piece = models.WordPiece(ids, unk_token=UNKNOWN, max_input_chars_per_word=MAX_WORD_CHARACTERS)
            self.backend = Backend(word_piece)
            self.backend.normalizer = bert_normalizer(
                lowercase=lowercase, strip_accents=strip_accents, handle_chinese_chars=handle_chinese_chars
            )
            self.backend.pre_tokenizer = bert_pre_tokenizer(split_clusters=split_clusters)
            self.backend.decoder = decoders.WordPiece(prefix="##")
        self.backend.add_special_tokens(list(SPECIAL_TOKENS))
        self.backend.post_processor = processors.TemplateProcessing(
            single="[CLS]:0 $A:0 [SEP]:0",
            pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
            special_tokens=[("[CLS]", self.cls_id), ("[SEP]", self.sep_id)],
        )
        self.backend.encode_special_tokens = True

    @staticmethod
    def of_words(tokens: Sequence[str]) -> "Tokenizer":
        """Return a tokenizer of whole words, which does not normalize text."""
        return Tokenizer(tokens, lowercase=False, strip_accents=False, handle_chinese_chars=False, whole_words=True)

    @staticmethod
    def load(folder: Path, flag: str = "--vocab", *, lowercase: bool | None = None) -> "Tokenizer":
        """Load a tokenizer folder.

        `flag` is the option that named the folder, for messages. `lowercase` is the casing if the files do not set it.
        """
        content = read_tokenizer_folder(folder, flag)
        if content.lowercase is None and lowercase is None:
            what = "the files do not say whether this vocabulary is lowercase"
            remedy = 'write {"do_lower_case": true} or {"do_lower_case": false} there, or pass --lowercase or '
            remedy += "--no-lowercase to vocab --extend or make-data"
            raise DataError(what, where=str(folder / CONFIG), remedy=remedy)
        if content.lowercase is None:
            content = content._replace(lowercase=lowercase)
        elif lowercase not in (None, content.lowercase):
            what = f"do_lower_case of {folder} is {str(content.lowercase).lower()}"
            where, remedy = "--lowercase" if lowercase else "--no-lowercase", f"leave the flag out, or correct {CONFIG}"
            raise DataError(what, where=where, remedy=remedy)
        try:
            return Tokenizer(**content._asdict(), folder=folder)
        except ValueError as error:
            name = VOCABULARY if (folder / VOCABULARY).is_file() else TOKENIZER
            remedy = f"the file needs each of {', '.join(SPECIAL_TOKENS)} once; rename tokens such as <pad> or <s>"
            raise DataError(str(error), where=str(folder / name), remedy=remedy) from error

    def with_tokens(self, tokens: Sequence[str]) -> "Tokenizer":
        """Return a tokenizer with another vocabulary and the same text processing."""
        processing: dict[str, Any] = {key: self.settings[name] for name, key in NORMALIZER_NAMES.items()}
        return Tokenizer(tokens, **processing, whole_words=self.whole_words, split_clusters=self.split_clusters)

    @property
    def files(self) -> tuple[str, ...]:
        """The files that `save` writes. They include `vocab.txt` only if text is split as in Google's BERT."""
        return (TOKENIZER, CONFIG) if self.whole_words or self.split_clusters else FILES

    @property
    def strips_accents(self) -> bool:
        lowercase, strip_accents, _ = self.settings.values()
        return not self.whole_words and bool(lowercase if strip_accents is None else strip_accents)

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    @cached_property
    def hash(self) -> str:
        """The SHA-256 of the vocabulary and the settings that affect the ids of a text."""
        content = [self.tokens, "whole words" if self.whole_words else self.settings]
        content += ["clusters"] if self.split_clusters else []
        text = json.dumps(content, ensure_ascii=False, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        assert self.folder is not None  # only the path is pickled, and each worker loads the folder once
        return _load_once, (self.folder.absolute(), bool(self.settings["do_lower_case"]), self.hash)

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

    @cached_property
    def _reserved_ids(self) -> frozenset[int]:
        return frozenset(np.flatnonzero(self.is_reserved_id).tolist())

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
        return [[self.unk_id if index in self._reserved_ids else index for index in ids] for ids in encoded]

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
        names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
        config |= {"model_max_length": model_max_length, **dict(zip(names, SPECIAL_TOKENS, strict=True))}
        texts = {
            VOCABULARY: "\n".join(self.tokens) + "\n",
            TOKENIZER: self.backend.to_str(pretty=True) + "\n",
            CONFIG: json_text(config),
        }
        return {name: text for name, text in texts.items() if name in self.files}


@lru_cache(maxsize=1)
def _load_once(folder: Path, lowercase: bool, hash_: str) -> Tokenizer:
    tokenizer = Tokenizer.load(folder, lowercase=lowercase)
    if tokenizer.hash != hash_:
        raise DataError("the tokenizer changed during the run", where=str(folder), remedy="run the command again")
    return tokenizer


def bert_pre_tokenizer(*, split_clusters: bool) -> pre_tokenizers.PreTokenizer:
    """Return BERT's pre-tokenizer; `split_clusters` also splits scripts without blanks into clusters."""
    bert = pre_tokenizers.BertPreTokenizer()
    if not split_clusters:
        return bert
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(CLUSTER), "isolated"), bert])


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
    changed = [index for index, (before, after) in enumerate(zip(old, new, strict=False)) if before != after]
    if len(new) < len(old) or not all(is_unused(old[index]) for index in changed):
        return None
    ids = {token: index for index, token in enumerate(old)}
    added = [*changed, *range(len(old), len(new))]
    return Extension(len(old), len(new), {index: old_pieces(new[index], ids) for index in added})


def old_pieces(token: str, ids: Mapping[str, int]) -> list[int]:
    """Return the ids of the WordPiece pieces of a token in a vocabulary, or the id of [UNK] if it cannot be split."""
    prefix = "##" if token.startswith("##") and len(token) > 2 else ""
    rest = token.removeprefix(prefix)
    pieces = []
    while rest and len(rest) <= MAX_WORD_CHARACTERS:
        length = next((size for size in range(len(rest), 0, -1) if prefix + rest[:size] in ids), 0)
        if not length:
            return [ids[UNKNOWN]]
        pieces.append(ids[prefix + rest[:length]])
        prefix, rest = "##", rest[length:]
    return pieces or [ids[UNKNOWN]]
