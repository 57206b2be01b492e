"""Measures of the effect of BERT's normalization: words that change, or that become equal to other words.

BERT strips accents from lowercased text, which rarely matters in English. In most other languages, marks distinguish
words or are part of the script, such as vowel signs in Hindi, tones in Vietnamese or Hangul syllables.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from bert_pretrain.text.tokenizer_folder import UNSPACED

UNCASED_LANGUAGES = ("en", "zh")  # languages of BERT's own uncased and Chinese models, which also strip accents
# Accents are kept if stripping them changes more than MAX_CHANGED_WORDS of the running words (in UNCASED_LANGUAGES,
# MAX_CHANGED_AS_BERT), or in other languages, if it makes more than MAX_MERGED_WORDS of the distinct words equal.
MAX_CHANGED_WORDS, MAX_CHANGED_AS_BERT, MAX_MERGED_WORDS = 0.01, 0.05, 0.001
# Text is split into clusters if more than MIN_UNSPACED_SHARE of its characters are in words of scripts without blanks,
# and more than MIN_LONG_SHARE of these are in words longer than LONG_WORD (in unsegmented text, 0.58 to 0.94 are).
MIN_UNSPACED_SHARE, MIN_LONG_SHARE, LONG_WORD = 0.3, 1 / 3, 12
_IDEOGRAPHS_AND_KANA = re.compile(r"[\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff]")


class AccentLoss(NamedTuple):
    """The effect of stripping accents on counted words."""

    changed: float  # share of running words
    merged: float  # share of distinct words that become equal to another distinct word
    examples: list[tuple[str, str]]  # the most frequent changed words, before and after

    def describe(self) -> str:
        """Format the loss as part of a sentence."""
        examples = ", ".join(f"{before} → {after}" for before, after in self.examples)
        shares = f"{self.changed:.1%} of the words and makes {self.merged:.1%} of the distinct words equal to another"
        return f"{shares} ({examples})" if examples else shares


def accent_loss(words: Mapping[str, int], *, lowercase: bool) -> AccentLoss:
    """Measure the effect of stripping accents on counted words, which are normalized except for their accents."""
    strip = BertNormalizer(clean_text=False, handle_chinese_chars=False, strip_accents=True, lowercase=lowercase)
    counted = [word for word in words if (word.isalpha() if word.isascii() else any(map(str.isalpha, word)))]
    stripped = {word: strip.normalize_str(word) for word in counted if not word.isascii()}
    changed = {word: after for word, after in stripped.items() if after != word}
    forms = Counter(changed.values())
    merged = sum(1 for after in changed.values() if forms[after] > 1 or after in words)
    merged += sum(1 for after in forms if after in words)
    frequent = sorted(changed, key=lambda word: (-words[word], word))[:3]
    share = sum(words[word] for word in changed) / max(1, sum(words[word] for word in counted))
    return AccentLoss(share, merged / max(1, len(counted)), [(word, changed[word]) for word in frequent])


def count_words(text: str, *, lowercase: bool) -> Counter[str]:
    """Count the words of a text, normalized except for their accents."""
    normalized = BertNormalizer(lowercase=lowercase, strip_accents=False).normalize_str(text)
    return Counter(word for word, _ in BertPreTokenizer().pre_tokenize_str(normalized))


def removed_characters(chunks: Mapping[str, int]) -> Counter[str]:
    """Count the words from which BERT's clean-up removes a character, by character, such as U+200D in Malayalam."""
    clean = BertNormalizer(clean_text=True, handle_chinese_chars=False, strip_accents=False, lowercase=False)
    removed: Counter[str] = Counter()
    for chunk, count in chunks.items():
        if len(after := clean.normalize_str(chunk)) < len(chunk):
            for character in sorted(set(chunk) - set(after)):
                if not clean.normalize_str(character):  # otherwise it becomes a blank
                    removed[character] += count
    return removed


def keeps_accents(loss: AccentLoss, language: str) -> bool:
    """Return whether `vocab.strip_accents: null` keeps accents in text with this language and loss."""
    if language in UNCASED_LANGUAGES:
        return loss.changed > MAX_CHANGED_AS_BERT
    return loss.changed > MAX_CHANGED_WORDS or loss.merged > MAX_MERGED_WORDS


def is_unspaced(words: Mapping[str, int]) -> bool:
    """Return whether text is in a script without blanks, such as Thai, and has no blanks between words."""
    letters = unspaced = long = 0
    for word, count in words.items():
        characters = len(word) * count
        letters += characters
        if not word.isascii() and UNSPACED.search(word):
            unspaced += characters
            long += characters if len(word) > LONG_WORD else 0
    return unspaced > MIN_UNSPACED_SHARE * letters and long > MIN_LONG_SHARE * unspaced


def mostly_without_blanks(text: str) -> bool:
    """Return whether most letters of a text are Chinese, Japanese or of another script without blanks."""
    letters = "".join(filter(str.isalpha, text))
    num_without_blanks = len(_IDEOGRAPHS_AND_KANA.findall(letters)) + len(UNSPACED.findall(letters))
    return 2 * num_without_blanks > len(letters)


def words_pattern() -> str:
    """Return a regular expression for a punctuation mark or a word. Words include marks, which `\\w` does not match."""
    marks = "".join(chr(point) for point in range(0x20000) if unicodedata.category(chr(point)) in ("Mn", "Mc"))
    return rf"(?:\w[{marks}]*)+|[^\w\s]"
