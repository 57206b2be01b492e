"""Reader of the tokenizer folder of any BERT: its tokens in the order of their ids, and its rules for text.

It reads `tokenizer_config.json` and `vocab.txt` or `tokenizer.json`. A WordPiece must have BERT's text processing, a
vocabulary of whole words (WordLevel) must split at white space. Of other models, such as byte-level BPE, the file
`tokenizer.json` has the rules itself.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from bert_pretrain.errors import DataError
from bert_pretrain.io.files import json_digest, read_json
from bert_pretrain.io.manifest import MANIFEST, PARTIAL

PAD, UNKNOWN, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_WORD_CHARACTERS = 100  # WordPiece encodes longer words as [UNK]
MAX_TOKEN_CHARACTERS = 1000
MAX_VOCABULARY_BYTES = 64 << 20
_CONTROL = re.compile("[\0-\x1f\x7f\ud800-\udfff]")
VOCABULARY, TOKENIZER, CONFIG = FILES = ("vocab.txt", "tokenizer.json", "tokenizer_config.json")
REMEDY = (
    "name a folder of 'bert-pretrain vocab', or of a BERT model with vocab.txt or tokenizer.json; or a model on the "
    "Hub with its owner, such as google-bert/bert-base-uncased"
)
_ROLES = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")  # of `SPECIAL_TOKENS`
_FAST_MODELS = ("WordPiece", "WordLevel")  # these `text/fast_tokenizer.py` encodes
# Other classes with a vocab.txt, such as BertJapaneseTokenizer, split text by other rules.
_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "PreTrainedTokenizer", "TokenizersBackend")
# The required values in tokenizer.json. Old files omit the keys in _OPTIONAL.
_WORD_PIECE: dict[str, dict[str, object]] = {
    "model": {
        "type": "WordPiece",
        "continuing_subword_prefix": "##",
        "unk_token": UNKNOWN,
        "max_input_chars_per_word": MAX_WORD_CHARACTERS,
    },
    "normalizer": {"type": "BertNormalizer", "clean_text": True},
    "pre_tokenizer": {"type": "BertPreTokenizer"},
}
_WHOLE_WORDS: dict[str, dict[str, object]] = {
    "model": {"unk_token": UNKNOWN},
    "normalizer": {"type": None},
    "pre_tokenizer": {"type": "WhitespaceSplit"},
}
_OPTIONAL = ("type of its model", "max_input_chars_per_word of its model", "clean_text of its normalizer")
UNSPACED = (  # scripts without blanks between words
    r"\u0E00-\u0EFF\u1000-\u109F\u1780-\u17FF"  # Thai and Lao, Myanmar, Khmer
    r"\u1950-\u19DF\u1A20-\u1AAF\uA9E0-\uA9FF\uAA60-\uAADF"  # scripts of Tai languages, and Shan
    r"\u1B00-\u1B7F\uA980-\uA9DF\uA000-\uA48F"  # Balinese, Javanese, Yi
)
# An orthographic cluster of these scripts: a leading vowel of Thai or Lao, a letter, its marks, letters stacked below
# it, and vowels that follow it.
CLUSTER = (
    rf"[\u0E40-\u0E44\u0EC0-\u0EC4]?[{UNSPACED}]"
    r"(?:\p{M}|[\u0E30\u0E32\u0E33\u0E45\u0EB0\u0EB2\u0EB3]|(?<=[\u1039\u17D2\u1A60\u1B44\uA9C0])\p{L})*"
)
_CLUSTERS = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": CLUSTER}, "behavior": "Isolated", "invert": False},
        {"type": "BertPreTokenizer"},
    ],
}
# The names of settings in tokenizer_config.json -> their names in `TextRules` and in the normalizer of tokenizer.json.
NORMALIZER_NAMES = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}


@dataclass(frozen=True)
class TextRules:
    """How text is normalized and split into words: as in BERT, or at white space."""

    lowercase: bool | None  # None if no file of a tokenizer folder sets it
    strip_accents: bool | None = None  # None means the same as `lowercase`
    handle_chinese_chars: bool = True  # split at every CJK character
    whole_words: bool = False  # split at white space only; the other settings have no effect
    split_clusters: bool = False  # split scripts without blanks into clusters of characters, as BERT splits Chinese

    @property
    def strips_accents(self) -> bool:
        strips = self.lowercase if self.strip_accents is None else self.strip_accents
        return not self.whole_words and bool(strips)

    @cached_property
    def normalizer(self) -> normalizers.Normalizer:
        if self.whole_words:
            return normalizers.Sequence([])
        return normalizers.BertNormalizer(
            lowercase=bool(self.lowercase),
            strip_accents=self.strip_accents,
            handle_chinese_chars=self.handle_chinese_chars,
        )

    @cached_property
    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        if self.whole_words:
            return pre_tokenizers.WhitespaceSplit()
        bert = pre_tokenizers.BertPreTokenizer()
        if not self.split_clusters:
            return bert
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(CLUSTER), "isolated"), bert])

    def words(self, text: bytes) -> list[str]:
        """Return the normalized words of a text in UTF-8."""
        if text.isalnum():  # ASCII letters and digits: one word that needs no clean-up
            lowers = self.lowercase and not self.whole_words
            return [(text.lower() if lowers else text).decode()]
        normalized = self.normalizer.normalize_str(text.decode())
        return [word for word, _ in self.pre_tokenizer.pre_tokenize_str(normalized)]


WHOLE_WORDS = TextRules(lowercase=False, strip_accents=False, handle_chinese_chars=False, whole_words=True)


class Definition(NamedTuple):
    """A tokenizer that is neither WordPiece nor a vocabulary of whole words."""

    content: dict[str, Any]  # of tokenizer.json, without truncation and padding
    config: dict[str, Any]  # of tokenizer_config.json, with the special tokens
    special_tokens: list[str]  # in the order of `SPECIAL_TOKENS`

    def hash(self, content: Mapping[str, Any] | None = None) -> str:
        """Return the SHA-256 of all parts of the file, or of another content, that affect the ids of a text."""
        content = content or self.content
        parts = [content.get(part) for part in ("model", "normalizer", "pre_tokenizer", "added_tokens")]
        return json_digest(json.dumps([parts, self.special_tokens], sort_keys=True))

    @property
    def effect(self) -> str:
        """The hash of the file as this version of `tokenizers` writes it: equal for copies by other versions."""
        return self.hash(json.loads(Tokenizer.from_str(json.dumps(self.content)).to_str()))


class TokenizerFolder(NamedTuple):
    """The content of a tokenizer folder."""

    tokens: list[str]
    rules: TextRules  # `lowercase` is None if no file sets it
    definition: Definition | None = None


def is_reserved(token: str) -> bool:
    """Return whether a token is a special token or an unused slot."""
    return token in SPECIAL_TOKENS or is_unused(token)


def is_storable(token: str) -> bool:
    """Return whether a token can be written as a line of `vocab.txt`."""
    return 0 < len(token) <= MAX_TOKEN_CHARACTERS and not _CONTROL.search(token)


def is_unused(token: str) -> bool:
    """Return whether a token is an unused slot, such as `[unused7]`."""
    return token.startswith("[unused") and token.endswith("]")


def has_vocabulary(folder: Path) -> bool:
    return (folder / VOCABULARY).exists() or (folder / TOKENIZER).is_file()


def read_tokenizer_folder(folder: Path, flag: str) -> TokenizerFolder:
    """Read a tokenizer folder of this package or of Hugging Face. `flag` is the option that named it, for messages."""
    if not has_vocabulary(folder):
        raise DataError(
            f"{folder} has neither {VOCABULARY} nor {TOKENIZER}" if folder.is_dir() else f"no folder '{folder}'",
            where=flag,
            remedy=REMEDY,
        )
    if (folder / PARTIAL).exists() and not (folder / MANIFEST).exists():
        raise DataError(f"{folder} is unfinished", where=flag, remedy="repeat the command that writes it")
    try:
        backend = _read_object(folder / TOKENIZER)
        config = _read_object(folder / CONFIG)
        if backend and backend["model"].get("type", "WordPiece") not in _FAST_MODELS:
            return _read_definition(folder, backend, config)
        rules = _read_rules(folder, backend, config)
        tokens = _read_tokens(folder, backend)
        added = {*_read_object(folder / "added_tokens.json")}
        added.update(entry["content"] for entry in backend.get("added_tokens") or [])
        added.update(entry["content"] for entry in (config.get("added_tokens_decoder") or {}).values())
    except (AttributeError, KeyError, TypeError) as error:  # valid JSON with another structure
        raise DataError(
            f"the files do not describe a tokenizer: {type(error).__name__}: {error}",
            where=f"{folder / TOKENIZER} or {CONFIG}",
            remedy=REMEDY,
        ) from error
    if beyond := sorted(added.difference(tokens)):  # `transformers` matches these in raw text, WordPiece does not
        what = f"the tokenizer has {len(beyond)} added tokens outside its WordPiece vocabulary, such as {beyond[0]!r}"
        remedy = "use the tokenizer without them, or append them to its vocab.txt and remove "
        remedy += "tokenizer.json, added_tokens.json and added_tokens_decoder"
        raise DataError(what, where=str(folder), remedy=remedy)
    return TokenizerFolder(tokens, rules)


def _read_definition(folder: Path, backend: dict[str, Any], config: dict[str, Any]) -> TokenizerFolder:
    config = {**_read_object(folder / "special_tokens_map.json"), **config}
    special_tokens = []
    for role, default in zip(_ROLES, SPECIAL_TOKENS, strict=True):
        name = config.get(role) or default
        special_tokens.append(name["content"] if isinstance(name, dict) else name)
    content = {**backend, "truncation": None, "padding": None}
    try:
        ids = Tokenizer.from_str(json.dumps(content)).get_vocab()
    except Exception as error:  # `tokenizers` raises this class
        raise DataError(
            f"tokenizers cannot read {TOKENIZER}: {error}",
            where=str(folder / TOKENIZER),
            remedy=REMEDY,
        ) from error
    tokens = _in_order(ids, folder)
    return TokenizerFolder(tokens, TextRules(lowercase=False), Definition(content, config, special_tokens))


def _in_order(ids: Mapping[str, int], folder: Path) -> list[str]:
    if sorted(ids.values()) != list(range(len(ids))):
        raise DataError("the ids of its tokens are not 0, 1, 2, …", where=str(folder / TOKENIZER), remedy=REMEDY)
    return sorted(ids, key=ids.__getitem__)


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Return an empty object if the file is missing."""
    content = read_json(path) if path.is_file() else {}
    if not isinstance(content, dict):
        raise TypeError(f"{path.name} is not a JSON object")
    return content


def _read_tokens(folder: Path, backend: Mapping[str, Any]) -> list[str]:
    """Return the tokens of `vocab.txt` or `tokenizer.json`. If both exist, they must have the same tokens."""
    if not backend:
        return _checked(_read_lines(folder / VOCABULARY), f"{folder / VOCABULARY}: line")
    ids = dict(backend["model"]["vocab"])
    for entry in backend.get("added_tokens") or []:
        if entry["content"] in SPECIAL_TOKENS:
            ids[entry["content"]] = entry["id"]
    tokens = _in_order(ids, folder)
    if (folder / VOCABULARY).exists() and tokens != _read_lines(folder / VOCABULARY):
        raise DataError(
            f"{VOCABULARY} and {TOKENIZER} have different vocabularies",
            where=str(folder),
            remedy="remove the file that does not belong to this model",
        )
    return _checked(tokens, f"{folder / TOKENIZER}: token")


def _read_lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:  # the size of a pipe or device is unknown
            content = file.read(MAX_VOCABULARY_BYTES + 1)
        if len(content) > MAX_VOCABULARY_BYTES:
            raise ValueError(f"it is larger than {MAX_VOCABULARY_BYTES >> 20} MiB")
        # Not str.splitlines: Google's Chinese BERT has a token U+2028, a line separator.
        return content.decode().replace("\r\n", "\n").removesuffix("\n").split("\n")
    except (OSError, ValueError) as error:
        raise DataError(f"{path.name} is broken: {error}", where=str(path), remedy=REMEDY) from error


def _checked(tokens: list[str], where: str) -> list[str]:
    for number, token in enumerate(tokens, start=1):
        if not is_storable(token):
            raise DataError(
                f"a token is empty, has control characters or over {MAX_TOKEN_CHARACTERS} characters: {token[:20]!r}",
                where=f"{where} {number}",
                remedy="remove it, or restore the file",
            )
    return tokens


def _read_rules(folder: Path, backend: dict[str, Any], config: Mapping[str, Any]) -> TextRules:
    """Return the rules for text. Raise a DataError unless they are those of BERT's WordPiece or of whole words.

    As in `transformers`, `tokenizer_config.json` takes precedence over `tokenizer.json`.
    """
    whole_words = bool(backend) and backend["model"].get("type") == "WordLevel"
    split_clusters = backend.get("pre_tokenizer") == _CLUSTERS
    if backend:
        found = {**backend, "pre_tokenizer": {"type": "BertPreTokenizer"}} if split_clusters else backend
        _check_values(found, _WHOLE_WORDS if whole_words else _WORD_PIECE, folder)
    kind = str(config.get("tokenizer_class") or "BertTokenizer").removesuffix("Fast")
    if kind not in _CLASSES:
        raise DataError(
            f"the tokenizer is a {kind[:80]}, not BERT's WordPiece",
            where=str(folder / CONFIG),
            remedy=REMEDY,
        )
    if config.get("do_basic_tokenize") is False:
        raise DataError(
            "do_basic_tokenize is false: a tokenizer for text that is already split is not supported",
            where=str(folder / CONFIG),
            remedy=REMEDY,
        )
    if whole_words:
        return WHOLE_WORDS
    normalizer = backend.get("normalizer") or {}
    values: dict[str, Any] = {"lowercase": None}
    for name, key in NORMALIZER_NAMES.items():
        if name not in config and key not in normalizer:
            continue
        value = config[name] if name in config else normalizer[key]
        if not isinstance(value, bool) and not (name == "strip_accents" and value is None):
            raise DataError(
                f"{name} is {repr(value)[:80]}",
                where=str(folder / (CONFIG if name in config else TOKENIZER)),
                remedy="give true or false there",
            )
        values[key] = value
    return TextRules(**values, split_clusters=split_clusters)


def _check_values(backend: Mapping[str, Any], required: Mapping[str, Mapping[str, object]], folder: Path) -> None:
    """Raise a DataError if a part of `tokenizer.json` has other values than the required ones."""
    for part, expected in required.items():
        values = backend.get(part) or {}
        for key, value in expected.items():
            name = f"{key} of its {part}"
            actual = values.get(key, value if name in _OPTIONAL else None)
            if actual != value:
                kind = "a tokenizer of whole words" if required is _WHOLE_WORDS else "BERT"
                raise DataError(
                    f"{name} is {repr(actual)[:80]}, but {value!r} in {kind}",
                    where=str(folder / TOKENIZER),
                    remedy=REMEDY,
                )
