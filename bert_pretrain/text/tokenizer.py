"""A tokenizer folder: a WordPiece vocabulary with BERT's text processing, or one of whole words, written and read.

It opens in `transformers`, and `vocab.txt` in readers of Google's. One text is encoded by `tokenizers`; whole
corpora by `text/fast_tokenizer.py`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
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
    REMEDY,
    SPECIAL_TOKENS,
    TOKENIZER,
    UNKNOWN,
    VOCABULARY,
    is_reserved,
    is_unused,
    read_tokenizer_folder,
)

_PREFIX = "##"
TEXTS_AT_ONCE = 1 << 16

MAX_UNK_SHARE = 0.05
"""Share of tokens above which the vocabulary is probably for another language or casing than the text."""


class Tokenizer:
    """A WordPiece vocabulary with BERT's text processing; text such as `[MASK]` is never a special token.

    With `whole_words` text is split at white space only, and each word is one token or [UNK].
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
        """Build from the tokens in the order of their ids; with `whole_words` the other settings are without effect.

        With `split_clusters` scripts that are written without blanks are cut into clusters, as BERT cuts Chinese.

        A ValueError says that a special token is missing or a token occurs twice.
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
        """Return a tokenizer of whole words, which leaves text as it is."""
        return Tokenizer(tokens, lowercase=False, strip_accents=False, handle_chinese_chars=False, whole_words=True)

    @staticmethod
    def load(folder: Path, flag: str = "--vocab", *, lowercase: bool | None = None) -> "Tokenizer":
        """Open a tokenizer folder, named by `flag`; `lowercase` is its casing where the folder does not state it."""
        found = read_tokenizer_folder(folder, flag)
        stated = found.lowercase
        if stated is None and lowercase is None:
            raise DataError(
                "the casing of this vocabulary is not stated",
                where=str(folder / CONFIG),
                remedy='write {"do_lower_case": true} or {"do_lower_case": false} there, or add --lowercase or '
                "--no-lowercase to vocab --extend or make-data",
            )
        if None not in (stated, lowercase) and stated != lowercase:
            raise DataError(
                f"{folder} states do_lower_case {str(stated).lower()}",
                where="--lowercase" if lowercase else "--no-lowercase",
                remedy=f"leave the flag out, or correct the folder's {CONFIG}",
            )
        found = found._replace(lowercase=lowercase if stated is None else stated)
        try:
            return Tokenizer(**found._asdict(), folder=folder)
        except ValueError as error:
            name = VOCABULARY if (folder / VOCABULARY).is_file() else TOKENIZER
            raise DataError(f"{name} is broken: {error}", where=str(folder / name), remedy=REMEDY) from error

    def with_tokens(self, tokens: Sequence[str]) -> "Tokenizer":
        """Return a tokenizer with another vocabulary that treats text as this one does."""
        processing: dict[str, Any] = {key: self.settings[name] for name, key in NORMALIZER_NAMES.items()}
        return Tokenizer(tokens, **processing, whole_words=self.whole_words, split_clusters=self.split_clusters)

    @property
    def files(self) -> tuple[str, ...]:
        """The files that `save` writes: no `vocab.txt` where text is not cut as its readers expect."""
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
        """A SHA-256 of all that decides the ids of a text."""
        decisive = [self.tokens, "whole words" if self.whole_words else self.settings]
        decisive += ["clusters"] if self.split_clusters else []
        content = json.dumps(decisive, ensure_ascii=False, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker opens the folder that this tokenizer came from, once for all its tasks.
        assert self.folder is not None
        return _load_once, (self.folder.absolute(), bool(self.settings["do_lower_case"]), self.hash)

    @property
    def id_dtype(self) -> Any:
        """The smallest type that holds every id: uint16, or uint32 above 65,536 tokens."""
        return np.uint16 if self.vocab_size <= 65536 else np.uint32

    @cached_property
    def is_subword(self) -> np.ndarray:
        """Whether each token continues a word (`##…`), (vocab_size,) bool."""
        return np.array([token.startswith("##") and not self.whole_words for token in self.tokens])

    @cached_property
    def word_piece_ids(self) -> np.ndarray:
        """The ids of real tokens: neither special nor unused, ascending."""
        return np.flatnonzero([not is_reserved(token) for token in self.tokens])

    @cached_property
    def _reserved_ids(self) -> frozenset[int]:
        return frozenset(range(self.vocab_size)) - frozenset(self.word_piece_ids.tolist())

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of one text, without [CLS] and [SEP]; for many texts use `Encoder`."""
        return self.encode_texts([text])[0]

    def encode_texts(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of some texts, without [CLS] and [SEP]."""
        encoded: list[list[int]] = []
        for first in range(0, len(texts), TEXTS_AT_ONCE):  # the library's results take 800 bytes a word
            some = texts[first : first + TEXTS_AT_ONCE]
            encoded += [each.ids for each in self.backend.encode_batch_fast(some, add_special_tokens=False)]
        if not self.whole_words:
            return encoded
        # A word of the text may be spelled like a special token, which the library would find in the vocabulary.
        return [[self.unk_id if index in self._reserved_ids else index for index in ids] for ids in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens among them, as far as the vocabulary has kept it."""
        return str(self.backend.decode(list(ids), skip_special_tokens=False))

    def save(self, folder: Path, model_max_length: int = 512) -> None:
        """Write `files`, all made from the vocabulary, also where it came from elsewhere, so that they agree."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.contents(model_max_length).items():
            write_text(folder / name, text)

    def contents(self, model_max_length: int = 512) -> dict[str, str]:
        """Return the texts of `files`."""
        names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
        # Other classes than BertTokenizer open in transformers too, but drop the token_type_ids silently unless told.
        # BertTokenizer would replace the pre-tokenizer of tokenizer.json by BERT's.
        kind = {"tokenizer_class": "BertTokenizer"} if VOCABULARY in self.files else _AS_WRITTEN_CONFIG
        kind = kind if self.whole_words else {**kind, **self.settings}
        config = {**kind, "model_max_length": model_max_length, **dict(zip(names, SPECIAL_TOKENS, strict=True))}
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
        what = "the tokenizer changed while it was used"
        raise DataError(what, where=str(folder), remedy="run the command again")
    return tokenizer


bert_normalizer = normalizers.BertNormalizer  # BERT's text clean-up


def bert_pre_tokenizer(*, split_clusters: bool) -> pre_tokenizers.PreTokenizer:
    """Return BERT's pre-tokenizer; with `split_clusters`, after one that cuts scripts without blanks into clusters."""
    bert = pre_tokenizers.BertPreTokenizer()
    if not split_clusters:
        return bert
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(CLUSTER), "isolated"), bert])


_AS_WRITTEN_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    "clean_up_tokenization_spaces": False,
}


@dataclass(frozen=True)
class Extension:
    """How the rows of a vocabulary become those of a longer one; with no new tokens, all rows stay."""

    num_old_tokens: int
    num_tokens: int
    pieces: dict[int, list[int]]
    """The id of each new token -> the ids of its old pieces, in order."""

    @property
    def num_in_slots(self) -> int:
        """How many new tokens took unused slots."""
        return sum(index < self.num_old_tokens for index in self.pieces)


def find_extension(old: Sequence[str], new: Sequence[str]) -> Extension | None:
    """Return how `new` extends `old`, as `vocab --extend` does, or None where it is another vocabulary.

    Every old token keeps its id; new ones are in unused slots or after the end.
    """
    changed = [index for index, (before, after) in enumerate(zip(old, new, strict=False)) if before != after]
    if len(new) < len(old) or not all(is_unused(old[index]) for index in changed):
        return None
    ids = {token: index for index, token in enumerate(old)}
    added = [*changed, *range(len(old), len(new))]
    return Extension(len(old), len(new), {index: old_pieces(new[index], ids) for index in added})


def old_pieces(token: str, ids: Mapping[str, int]) -> list[int]:
    """Return the ids of the pieces into which a vocabulary cuts a token it lacks, longest match first.

    A token it cannot cut is one [UNK], as WordPiece has it.
    """
    is_inside = token.startswith(_PREFIX) and len(token) > len(_PREFIX)
    rest = token.removeprefix(_PREFIX) if is_inside else token
    pieces = []
    while rest and len(rest) <= MAX_WORD_CHARACTERS:
        prefix = _PREFIX if is_inside else ""
        length = next((size for size in range(len(rest), 0, -1) if prefix + rest[:size] in ids), 0)
        if not length:
            return [ids[UNKNOWN]]
        pieces.append(ids[prefix + rest[:length]])
        rest, is_inside = rest[length:], True
    return pieces or [ids[UNKNOWN]]
