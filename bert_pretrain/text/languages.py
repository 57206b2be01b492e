"""Offline detection of the language of a text, with `py3langid`.

The language selects the sentence rules, decides whether accents are kept, and is written to the model card. It is an
ISO 639 code of two letters, or of three letters if there is no shorter code.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

from bert_pretrain.errors import ConfigError

MIN_CHINESE_SHARE = 0.3  # minimum share of Chinese characters among the letters of Chinese text
_SAMPLE_CHARACTERS = 1 << 15
_PIECE_CHARACTERS = 2000  # each piece of a sample is classified separately, to detect mixed languages
_ENGLISH = frozenset(
    {"the", "of", "and", "to", "in", "a", "is", "that", "was", "for", "it", "he", "his", "with", "as", "had", "but"}
    | {"not", "be", "at", "by", "which", "from", "they", "have", "you", "are", "this", "or"}
)
_MIN_LETTERS = 100
_MIN_SHARE = 0.45  # minimum share of the main language


class Recognized(NamedTuple):
    """A language that was detected in a text."""

    code: str
    share: float  # of the text
    confidence: float  # mean probability from `py3langid`

    def __str__(self) -> str:
        return f"{name_of(self.code)} {self.share:.0%}"


def name_of(code: str) -> str:
    """Return the English name of a language, or a deprecated code as it is. Raise ConfigError for an unknown code."""
    language = _language_of(code)
    return code if language is None else str(language.name)


def short_code(code: str) -> str:
    """Return the two-letter code, or the three-letter code if there is none: `de` for `deu`, `de` and `de-AT`."""
    language = _language_of(code)
    return code if language is None else str(language.pt1 or language.pt3)


def _language_of(code: str) -> Any:
    """Return the `iso639.Lang` of a code, or None for a deprecated code. Raise ConfigError for an unknown code."""
    from iso639 import Lang
    from iso639.exceptions import DeprecatedLanguageValue, InvalidLanguageValue

    try:
        return Lang(code.partition("-")[0].lower())
    except DeprecatedLanguageValue:
        return None
    except InvalidLanguageValue:
        raise ConfigError(
            f"no language has the code '{code}'",
            where="data.language",
            remedy="use a code of ISO 639, such as de or hin, or mul for several languages",
        ) from None


@cache
def identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def recognize(samples: Iterable[str]) -> list[Recognized]:
    """Return the languages of samples, most frequent first, or an empty list for fewer than 100 letters."""
    characters: Counter[str] = Counter()
    confidence: Counter[str] = Counter()
    num_letters = 0
    for sample in samples:
        for begin in range(0, min(len(sample), _SAMPLE_CHARACTERS), _PIECE_CHARACTERS):
            piece = sample[begin : begin + _PIECE_CHARACTERS]
            num_letters += sum(map(str.isalpha, piece))
            code, probability = identifier().classify(piece)
            characters[code] += len(piece)
            confidence[code] += probability * len(piece)
    if num_letters < _MIN_LETTERS:
        return []
    total = characters.total()
    characters.pop("zxx", None)  # the code of text without a language
    ranked = sorted(characters, key=lambda code: (-characters[code], code))
    return [Recognized(code, characters[code] / total, confidence[code] / characters[code]) for code in ranked]


def _is_plain_english(samples: Iterable[str]) -> bool:
    """Return whether a text is English, by its letters and function words, without loading `py3langid`'s model."""
    text = " ".join(sample[:_SAMPLE_CHARACTERS] for sample in samples)
    words = Counter(re.findall(r"[^\W\d_]+", text.lower()))
    letters = [character for character in text if character.isalpha()]
    share = sum(words[word] for word in _ENGLISH) / max(1, words.total())
    is_ascii = sum(map(str.isascii, letters)) > 0.99 * len(letters)
    return len(letters) >= _MIN_LETTERS and is_ascii and share > 0.28  # 0.27 in Scots, 0.29 to 0.39 in English


def _count_letters(text: str) -> tuple[int, int]:
    """Return (number of Chinese characters, number of all letters). In Japanese text, the first is 0."""
    num_ideographs = len(re.findall(r"[\u3400-\u4dbf\u4e00-\u9fff]", text))
    num_kana = len(re.findall(r"[\u3041-\u30ff]", text))
    is_japanese = num_kana > 0.1 * (num_ideographs + num_kana)
    return 0 if is_japanese else num_ideographs, sum(map(str.isalpha, text))


def chinese_share(samples: Sequence[str]) -> float:
    """Return the share of Chinese characters among the letters of samples."""
    counts = [_count_letters(sample) for sample in samples]
    return sum(chinese for chinese, _ in counts) / max(1, sum(letters for _, letters in counts))


def detect(samples: Sequence[str]) -> str:
    """Return and print the main language of samples. Raise ConfigError if no language has `_MIN_SHARE` of the text.

    The language may be uncertain, as in source code or lists of names. It is then English if the text is ASCII or has
    fewer than `_MIN_LETTERS` letters, else the most frequent one.
    """
    if (share := chinese_share(samples)) > MIN_CHINESE_SHARE:
        print(f"{share:.0%} of the letters are Chinese characters: data.language is zh")
        return "zh"
    if _is_plain_english(samples):
        print("language: English: data.language is en")
        return "en"
    languages = recognize(samples)
    shown = ", ".join(map(str, languages[:3]))
    if sum(one.share for one in languages if one.confidence >= 0.5) >= _MIN_SHARE:
        if languages[0].share < _MIN_SHARE:
            raise ConfigError(
                f"the text has no main language ({shown})",
                where="data.language",
                remedy="pass --set data.language=CODE (ISO 639, such as de or hi; mul for several languages)",
            )
        print(f"language: {shown}: data.language is {languages[0].code}")
        return languages[0].code
    code = "en" if not languages or all(map(str.isascii, samples)) else languages[0].code
    print(f"the language of the text is uncertain: data.language is {code}")
    print("  hint: --set data.language=CODE sets another (ISO 639, such as de or hi)")
    return code
