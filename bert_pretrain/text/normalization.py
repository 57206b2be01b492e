"""What BERT's normalization does to the words of a text: which words lose marks, and which become equal to another.

BERT strips accents from lowercased text. English loses next to nothing. In most other languages marks tell words apart
or are part of the writing: vowel signs in Hindi, tones in Vietnamese, Hangul syllables.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tokenizers import normalizers, pre_tokenizers

from bert_pretrain.text.tokenizer_folder import UNSPACED_BLOCKS

MAX_CHANGED_WORDS = 0.01
"""Share of running words that stripping may change before accents are kept."""
MAX_CHANGED_AS_BERT = 0.05
"""The same for the languages of `STRIPPED_BY_BERT`. Their text has some tenths of a per cent of such words."""
MAX_MERGED_WORDS = 0.001
"""Share of distinct words that stripping may make equal to another one, in languages for which BERT does not strip."""
STRIPPED_BY_BERT = ("en", "zh")
"""Languages of Google's own uncased and Chinese models, which strip accents."""

MIN_UNSPACED_SHARE = 0.3
"""Share of letters in scripts that are written without blanks, from which text is cut into clusters."""
MIN_LONG_SHARE = 1 / 3
"""Share of these letters in words of more than `LONG_WORD` characters. Unsegmented text has 0.58 to 0.94."""
LONG_WORD = 12


_IDEOGRAPHS_AND_KANA = re.compile(r"[\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff]")


class AccentLoss(NamedTuple):
    """Changes that stripping accents makes in counted words, beyond their case."""

    changed: float
    """Share of running words."""
    merged: float
    """Share of distinct words that become equal to another distinct word."""
    examples: list[tuple[str, str]]
    """The most frequent changed words, each with what is left of it."""

    def describe(self) -> str:
        """Return the loss in words, as part of a sentence."""
        examples = ", ".join(f"{before} → {after}" for before, after in self.examples)
        shares = f"{self.changed:.1%} of the words and makes {self.merged:.1%} of the distinct words equal to another"
        return f"{shares} ({examples})" if examples else shares


def accent_loss(words: Mapping[str, int], *, lowercase: bool) -> AccentLoss:
    """Count what stripping accents changes in words that are normalized but for their accents."""
    strip = normalizers.BertNormalizer(
        clean_text=False, handle_chinese_chars=False, strip_accents=True, lowercase=lowercase
    ).normalize_str
    changed = {word: strip(word) for word in words if not word.isascii() and any(map(str.isalpha, word))}
    changed = {word: after for word, after in changed.items() if after != word}
    forms = Counter(changed.values())
    merged = sum(1 for after in changed.values() if forms[after] > 1 or after in words)
    merged += sum(1 for after in forms if after in words)
    total = distinct = 0
    for word, count in words.items():
        if word.isalpha() if word.isascii() else any(map(str.isalpha, word)):
            total += count
            distinct += 1
    frequent = sorted(changed, key=lambda word: (-words[word], word))
    return AccentLoss(
        sum(words[word] for word in changed) / max(1, total),
        merged / max(1, distinct),
        [(word, changed[word]) for word in frequent[:3]],
    )


def count_words(text: str, *, lowercase: bool) -> Counter[str]:
    """Count the words of a text, normalized but for their accents."""
    normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=False)
    return Counter(
        word for word, _ in pre_tokenizers.BertPreTokenizer().pre_tokenize_str(normalizer.normalize_str(text))
    )


def removed_characters(chunks: Mapping[str, int]) -> Counter[str]:
    """Count the words in which BERT's clean-up removes a character, by character, such as U+200D in Malayalam."""
    clean = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=False, strip_accents=False, lowercase=False
    ).normalize_str
    removed: Counter[str] = Counter()
    for chunk, count in chunks.items():
        if len(after := clean(chunk)) < len(chunk):
            for character in set(chunk) - set(after):
                removed[character] += count
    return removed


def keeps_accents(loss: AccentLoss, language: str) -> bool:
    """Whether `vocab.strip_accents: null` keeps accents, by the language and by what stripping them would change."""
    if language in STRIPPED_BY_BERT:
        return loss.changed > MAX_CHANGED_AS_BERT
    return loss.changed > MAX_CHANGED_WORDS or loss.merged > MAX_MERGED_WORDS


def is_unspaced(words: Mapping[str, int]) -> bool:
    """Whether counted words are phrases of a script that is written without blanks, such as Thai or Khmer.

    Text of these scripts that has been segmented into words, with blanks between them, is not.
    """
    letters = unspaced = long = 0
    for word, count in words.items():
        characters = len(word) * count
        letters += characters
        if not word.isascii() and _has_unspaced(word):
            unspaced += characters
            long += characters if len(word) > LONG_WORD else 0
    return unspaced > MIN_UNSPACED_SHARE * letters and long > MIN_LONG_SHARE * unspaced


def _has_unspaced(word: Iterable[str]) -> bool:
    return any(first <= ord(character) <= last for character in word for first, last in UNSPACED_BLOCKS)


def mostly_without_blanks(text: str) -> bool:
    """Whether most letters of a text are Chinese characters, kana or of other scripts written without blanks."""
    letters = [character for character in text if character.isalpha()]
    without = sum(bool(_IDEOGRAPHS_AND_KANA.match(letter)) or _has_unspaced(letter) for letter in letters)
    return 2 * without > len(letters)


def words_pattern() -> str:
    """Return a regular expression of a word with its marks, which `\\w` leaves out, or of a sign."""
    marks = "".join(chr(point) for point in range(0x20000) if unicodedata.category(chr(point)) in ("Mn", "Mc"))
    return rf"(?:\w[{marks}]*)+|[^\w\s]"
