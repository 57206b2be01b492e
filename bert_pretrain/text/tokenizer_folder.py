"""What the tokenizer folder of any BERT says: its tokens in the order of their ids, and how text is treated.

Read are `vocab.txt`, `tokenizer.json` (either will do) and `tokenizer_config.json`. Casing that no file states is never
guessed. What is neither BERT's WordPiece with BERT's text processing nor a vocabulary of whole words (WordLevel, split
at white space) is refused rather than read as if it were.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bert_pretrain.errors import DataError
from bert_pretrain.io.files import read_json
from bert_pretrain.io.manifest import MANIFEST, PARTIAL

PAD, UNKNOWN, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_WORD_CHARACTERS = 100  # longer words are [UNK] to WordPiece with any vocabulary
MAX_TOKEN_CHARACTERS = 1000
MAX_VOCABULARY_BYTES = 64 << 20
_CONTROL = re.compile("[\0-\x1f\x7f\ud800-\udfff]")
VOCABULARY, TOKENIZER, CONFIG = FILES = ("vocab.txt", "tokenizer.json", "tokenizer_config.json")
REMEDY = "name a folder that 'bert-pretrain vocab' has written, or one of a BERT with vocab.txt or tokenizer.json"
# Others with a vocab.txt cut text by rules of their own, such as BertJapaneseTokenizer.
_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "PreTrainedTokenizer", "TokenizersBackend")
# What a tokenizer.json must say; old files leave out what _OPTIONAL names.
_WORD_PIECE: dict[str, dict[str, object]] = {
    "model": {
        "type": "WordPiece",
        "continuing_subword_prefix": "##",
        "unk_token": "[UNK]",
        "max_input_chars_per_word": MAX_WORD_CHARACTERS,
    },
    "normalizer": {"type": "BertNormalizer", "clean_text": True},
    "pre_tokenizer": {"type": "BertPreTokenizer"},
}
_WHOLE_WORDS: dict[str, dict[str, object]] = {
    "model": {"unk_token": "[UNK]"},
    "normalizer": {"type": None},
    "pre_tokenizer": {"type": "WhitespaceSplit"},
}
_OPTIONAL = (("model", "type"), ("model", "max_input_chars_per_word"), ("normalizer", "clean_text"))
# Scripts without blanks are cut into orthographic clusters before BERT's own pre-tokenizer: a leading vowel of Thai or
# Lao, a letter, its marks, letters stacked below it, and vowels that follow it.
UNSPACED_BLOCKS = (
    *((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF)),  # Thai and Lao, Myanmar, Khmer
    *((0x1950, 0x19DF), (0x1A20, 0x1AAF), (0xA9E0, 0xA9FF), (0xAA60, 0xAADF)),  # scripts of Tai languages, and Shan
    *((0x1B00, 0x1B7F), (0xA980, 0xA9DF), (0xA000, 0xA48F)),  # Balinese, Javanese, Yi
)
_UNSPACED = "".join(f"\\u{first:04X}-\\u{last:04X}" for first, last in UNSPACED_BLOCKS)
CLUSTER = (
    rf"[\u0E40-\u0E44\u0EC0-\u0EC4]?[{_UNSPACED}]"
    r"(?:\p{M}|[\u0E30\u0E32\u0E33\u0E45\u0EB0\u0EB2\u0EB3]|(?<=[\u1039\u17D2\u1A60\u1B44\uA9C0])\p{L})*"
)
_CLUSTERS = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": CLUSTER}, "behavior": "Isolated", "invert": False},
        {"type": "BertPreTokenizer"},
    ],
}
# tokenizer_config.json's name of a setting -> that of the normalizer in tokenizer.json.
NORMALIZER_NAMES = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}


class TokenizerFolder(NamedTuple):
    """The content of a tokenizer folder."""

    tokens: list[str]
    lowercase: bool | None
    """None where no file states it."""
    strip_accents: bool | None
    """None follows `lowercase`, as BERT does."""
    handle_chinese_chars: bool
    whole_words: bool
    split_clusters: bool
    """Whether scripts without blanks are cut into clusters."""


def is_reserved(token: str) -> bool:
    """Whether a token is special or an unused slot, so never a piece of text."""
    return token in SPECIAL_TOKENS or is_unused(token)


def is_storable(token: str) -> bool:
    """Whether a vocabulary may hold a token, which is a line of `vocab.txt`."""
    return 0 < len(token) <= MAX_TOKEN_CHARACTERS and not _CONTROL.search(token)


def is_unused(token: str) -> bool:
    """Whether a token is an unused slot of the vocabulary, such as `[unused7]`."""
    return token.startswith("[unused") and token.endswith("]")


def has_vocabulary(folder: Path) -> bool:
    return (folder / VOCABULARY).exists() or (folder / TOKENIZER).is_file()


def read_tokenizer_folder(folder: Path, flag: str) -> TokenizerFolder:
    """Read a tokenizer folder, written here or by Hugging Face's tools; `flag` named it, for messages."""
    if not has_vocabulary(folder):
        what = f"{folder} has neither {VOCABULARY} nor {TOKENIZER}" if folder.is_dir() else f"no folder '{folder}'"
        raise DataError(what, where=flag, remedy=REMEDY)
    if (folder / PARTIAL).exists() and not (folder / MANIFEST).exists():
        raise DataError(f"{folder} is unfinished", where=flag, remedy="run the command that writes it again")
    try:
        backend, config, added = (_read_object(folder / name) for name in (TOKENIZER, CONFIG, "added_tokens.json"))
        whole_words = bool(backend) and backend["model"].get("type") == "WordLevel"
        split_clusters = backend.get("pre_tokenizer") == _CLUSTERS
        if split_clusters:
            backend["pre_tokenizer"] = {"type": "BertPreTokenizer"}
        stated = _stated_settings(backend, config, whole_words, folder)
        tokens = _read_tokens(folder, backend)
        entries = [*(backend.get("added_tokens") or []), *(config.get("added_tokens_decoder") or {}).values()]
        beyond = sorted({*(entry["content"] for entry in entries), *added} - set(tokens))
    except (AttributeError, KeyError, TypeError) as error:  # JSON of another form
        what = f"its files describe no tokenizer: {type(error).__name__}: {error}"
        raise DataError(what, where=f"{folder / TOKENIZER} or {CONFIG}", remedy=REMEDY) from error
    if beyond:  # `transformers` finds them in raw text, which WordPiece does not
        what = f"the tokenizer has {len(beyond)} added tokens outside its WordPiece vocabulary, such as {beyond[0]!r}"
        remedy = "give the folder from before they were added, or write them at the end of its vocab.txt and remove "
        remedy += "tokenizer.json, added_tokens.json and added_tokens_decoder"
        raise DataError(what, where=str(folder), remedy=remedy)
    if whole_words:
        return TokenizerFolder(tokens, False, False, False, whole_words, split_clusters=False)
    lowercase, strip_accents = stated.get("do_lower_case"), stated.get("strip_accents")
    chinese_chars = stated.get("tokenize_chinese_chars", True)
    return TokenizerFolder(tokens, lowercase, strip_accents, chinese_chars, whole_words, split_clusters)


def _read_object(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file, nothing where there is none."""
    found = read_json(path) if path.is_file() else {}
    if not isinstance(found, dict):
        raise TypeError(f"{path.name} holds no settings by name")
    return found


def _read_tokens(folder: Path, backend: Mapping[str, Any]) -> list[str]:
    """Return the tokens of `vocab.txt` or `tokenizer.json`, which must agree where both are there."""
    path, tokens = folder / VOCABULARY, None
    if path.exists():
        try:
            with path.open("rb") as file:  # a pipe or a device tells no size
                content = file.read(MAX_VOCABULARY_BYTES + 1)
            if len(content) > MAX_VOCABULARY_BYTES:
                raise ValueError(f"it is larger than {MAX_VOCABULARY_BYTES >> 20} MiB")
            # Only line ends end a token: Google's Chinese BERT has U+2028, a line separator.
            tokens = content.decode().replace("\r\n", "\n").removesuffix("\n").split("\n")
        except (OSError, ValueError) as error:
            raise DataError(f"{path.name} is broken: {error}", where=str(path), remedy=REMEDY) from error
    if backend:
        vocabulary = backend["model"]["vocab"]
        added = {entry["content"]: entry["id"] for entry in backend.get("added_tokens") or []}
        ids = {**vocabulary, **{token: index for token, index in added.items() if token in SPECIAL_TOKENS}}
        if sorted(ids.values()) != list(range(len(ids))):
            raise DataError("the ids of its tokens are not 0, 1, 2, …", where=str(folder / TOKENIZER), remedy=REMEDY)
        of_backend = sorted(ids, key=ids.__getitem__)
        if tokens is not None and tokens != of_backend:
            what = f"{VOCABULARY} and {TOKENIZER} hold different vocabularies"
            raise DataError(what, where=str(folder), remedy="remove the one that is not this model's")
        path, tokens = folder / TOKENIZER, of_backend
    assert tokens is not None
    for number, token in enumerate(tokens, start=1):
        if not is_storable(token):
            what = "is empty" if not token else f"has {len(token):,} characters, or control characters: {token[:20]!r}"
            raise DataError(f"a token {what}", where=f"{path}: line {number}", remedy="write one token per line")
    return tokens


def _stated_settings(
    backend: Mapping[str, Any], config: Mapping[str, Any], whole_words: bool, folder: Path
) -> dict[str, Any]:
    """Return how the files say that text is treated; refuse any but BERT's WordPiece and whole words.

    As in `transformers`, the `tokenizer_config.json` outweighs the `tokenizer.json`.
    """
    for part, wanted in (_WHOLE_WORDS if whole_words else _WORD_PIECE).items() if backend else ():
        stated = backend.get(part) or {}
        for key, value in wanted.items():
            found = stated.get(key, value if (part, key) in _OPTIONAL else None)
            if found != value:
                whose = "that of whole words" if whole_words else "BERT's"
                what = f"the {key} of its {part} is {repr(found)[:80]}, {whose} is {value!r}"
                raise DataError(what, where=str(folder / TOKENIZER), remedy=REMEDY)
    kind = str(config.get("tokenizer_class") or "BertTokenizer").removesuffix("Fast")
    if kind not in _CLASSES:
        what = f"the tokenizer is a {kind[:80]}, not BERT's WordPiece"
        raise DataError(what, where=str(folder / CONFIG), remedy=REMEDY)
    if config.get("do_basic_tokenize") is False:
        what = "do_basic_tokenize is false: the text must be split into words before, which is not supported"
        raise DataError(what, where=str(folder / CONFIG), remedy=REMEDY)
    normalizer = backend.get("normalizer") or {}
    settings = {name: normalizer[key] for name, key in NORMALIZER_NAMES.items() if key in normalizer}
    settings |= {name: config[name] for name in NORMALIZER_NAMES if name in config}
    for name, value in settings.items():
        if not isinstance(value, bool) and not (name == "strip_accents" and value is None):
            where = str(folder / (CONFIG if name in config else TOKENIZER))
            raise DataError(f"{name} is {repr(value)[:80]}", where=where, remedy="give true or false there")
    return settings
