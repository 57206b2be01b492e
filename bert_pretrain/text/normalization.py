"""Measures of the effect of BERT's normalization: words that change, or that become equal to other words.

BERT strips accents from lowercased text, which rarely matters in English. In most other languages, marks distinguish
words or are part of the script, such as vowel signs in Hindi, tones in Vietnamese or Hangul syllables.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from tokenizers import normalizers

from bert_pretrain.text.tokenizer_folder import UNSPACED

_IN_UNSPACED = re.compile(f"[{UNSPACED}]")
_WITHOUT_BLANKS = re.compile(rf"[{UNSPACED}\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff]")

UNCASED_LANGUAGES = ("en", "zh")  # languages of BERT's own uncased and Chinese models, which also strip accents
# Accents are kept if stripping them changes more than MAX_CHANGED_WORDS of the running words (in UNCASED_LANGUAGES,
# MAX_CHANGED_AS_BERT), or in other languages, if it makes more than MAX_MERGED_WORDS of the distinct words equal.
MAX_CHANGED_WORDS = 0.01
MAX_CHANGED_AS_BERT = 0.05
MAX_MERGED_WORDS = 0.001
# Text is split into clusters if more than MIN_UNSPACED_SHARE of its characters are in words of scripts without blanks,
# and more than MIN_LONG_SHARE of these are in words longer than LONG_WORD (in unsegmented text, 0.58 to 0.94 are).
MIN_UNSPACED_SHARE = 0.3
MIN_LONG_SHARE = 1 / 3
LONG_WORD = 12


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
    strip = normalizers.BertNormalizer(
        clean_text=False,
        handle_chinese_chars=False,
        strip_accents=True,
        lowercase=lowercase,
    )
    counted = [word for word in words if (word.isalpha() if word.isascii() else any(map(str.isalpha, word)))]
    changed = {}
    for word in counted:
        after = word if word.isascii() else strip.normalize_str(word)
        if after != word:
            changed[word] = after
    forms = Counter(changed.values())
    merged = sum(forms[after] > 1 or after in words for after in changed.values())
    merged += sum(after in words for after in forms)
    frequent = sorted(changed, key=lambda word: (-words[word], word))[:3]
    num_changed = sum(words[word] for word in changed)
    num_words = sum(words[word] for word in counted)
    return AccentLoss(
        changed=num_changed / max(1, num_words),
        merged=merged / max(1, len(counted)),
        examples=[(word, changed[word]) for word in frequent],
    )


def removed_characters(chunks: Mapping[str, int]) -> Counter[str]:
    """Count the words from which BERT's clean-up removes a character, by character, such as U+200D in Malayalam."""
    clean = normalizers.BertNormalizer(handle_chinese_chars=False, strip_accents=False, lowercase=False)
    removed: Counter[str] = Counter()
    for chunk, count in chunks.items():
        after = clean.normalize_str(chunk)
        for character in sorted(set(chunk).difference(after)):
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
        if not word.isascii() and _IN_UNSPACED.search(word):
            unspaced += characters
            long += characters if len(word) > LONG_WORD else 0
    return unspaced > MIN_UNSPACED_SHARE * letters and long > MIN_LONG_SHARE * unspaced


def mostly_without_blanks(text: str) -> bool:
    """Return whether most letters of a text are Chinese, Japanese or of another script without blanks."""
    letters = "".join(filter(str.isalpha, text))
    return 2 * len(_WITHOUT_BLANKS.findall(letters)) > len(letters)


def words_pattern() -> str:
    """Return a regular expression for a punctuation mark or a word. Words include marks, which `\\w` does not match."""
    marks = "".join(chr(point) for point in range(0x20000) if unicodedata.category(chr(point)) in ("Mn", "Mc"))
    return rf"(?:\w[{marks}]*)+|[^\w\s]"
