"""Normalization of counted chunks to counted words, by rules that depend on the language.

`vocab.lowercase: null` is resolved from the language, and `vocab.strip_accents: null` from the language and the counts.
The effects of the normalization on words are reported.
"""

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any
from unicodedata import name

from bert_pretrain.config import VocabConfig
from bert_pretrain.text import normalization
from bert_pretrain.text.normalization import MAX_CHANGED_WORDS, AccentLoss
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.text.tokenizer_folder import WHOLE_WORDS, TextRules
from bert_pretrain.vocab.counting import Counts, count_words

_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


@dataclass(frozen=True)
class NormalizedWords:
    """Counted words, and the rules of their normalization."""

    training: Counter[str]
    held_out: Counter[str]
    rules: TextRules
    metrics: dict[str, Any]  # of the normalization, for the manifest


def normalize(
    counts: Counts,
    config: VocabConfig,
    language: str,
    old: Tokenizer | None,
) -> NormalizedWords:
    """Normalize counted chunks to counted words. For an extension, `old` is the old tokenizer and sets the rules."""
    if config.tokens == "words":
        training = count_words(counts.training, WHOLE_WORDS)
        held_out = count_words(counts.held_out, WHOLE_WORDS)
        return NormalizedWords(training, held_out, WHOLE_WORDS, {})
    language_decides = config.lowercase is None
    lowercase = language in normalization.UNCASED_LANGUAGES if config.lowercase is None else config.lowercase
    rules = TextRules(lowercase, config.strip_accents, config.handle_chinese_chars)
    ascii_chunks = {chunk: count for chunk, count in counts.training.items() if chunk.isascii()}
    others = {chunk: count for chunk, count in counts.training.items() if not chunk.isascii()}
    ascii_words = count_words(ascii_chunks, rules)  # independent of accents and clusters
    with_accents = ascii_words + count_words(others, replace(rules, strip_accents=False))
    if language_decides and not lowercase and any(word != word.lower() for word in with_accents):
        print("case is kept, as in all languages but English and Chinese; --lowercase lowercases the text")
    loss = normalization.accent_loss(with_accents, lowercase=lowercase)
    if old is not None:
        rules = old.rules
    else:
        rules = replace(rules, split_clusters=normalization.is_unspaced(with_accents))
        # Cased text always keeps its accents. If the language chose the case, `strip_accents` is set to False as well.
        keeps = normalization.keeps_accents(loss, language) if lowercase else language_decides
        if config.strip_accents is None and keeps:
            rules = replace(rules, strip_accents=False)
    training = with_accents
    if rules.strips_accents or rules.split_clusters:
        training = ascii_words + count_words(others, rules)
    controls = {chunk: count for chunk, count in ascii_chunks.items() if _CONTROL.search(chunk)}
    removed = normalization.removed_characters({chunk.decode(): count for chunk, count in (others | controls).items()})
    metrics = {
        "language": language,
        "lowercase": lowercase,
        "strip_accents": rules.strips_accents,
        "split_clusters": rules.split_clusters,
        "words_that_stripping_changes": loss.changed,
        "distinct_words_that_stripping_merges": loss.merged,
        "examples": [list(example) for example in loss.examples],
        "words_with_removed_characters": {f"U+{ord(key):04X}": count for key, count in removed.most_common(5)},
    }
    _report(loss, rules, removed, with_accents.total())
    return NormalizedWords(training, count_words(counts.held_out, rules), rules, metrics)


def _report(
    loss: AccentLoss,
    rules: TextRules,
    removed: Counter[str],
    num_words: int,
) -> None:
    if loss.examples and not rules.strips_accents:
        print(f"accents are kept: stripping them changes {loss.describe()}")
    elif loss.examples and rules.strip_accents and loss.changed > MAX_CHANGED_WORDS:
        print(
            f"warning: accents are stripped, which changes {loss.describe()}\n"
            "  hint: --set vocab.strip_accents=no keeps them"
        )
    elif loss.examples:
        print(f"accents are stripped, which changes {loss.describe()}")
    if rules.split_clusters:
        print(
            "the text has no blanks between words, so it is split into clusters of a letter and its marks\n"
            "  hint: for whole words as tokens, put blanks between words with icu4py (docs/languages.md)"
        )
    for character, count in removed.most_common(3):
        if count > MAX_CHANGED_WORDS * num_words:
            code = f"U+{ord(character):04X} ({name(character, 'no name')})"
            print(f"BERT's clean-up removes {code} from {count / max(count, num_words):.1%} of the words")
