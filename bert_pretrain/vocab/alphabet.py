"""The alphabet of a vocabulary: which characters are tokens of their own, so that no word of them is ever [UNK].

A character that is left out makes every word with it [UNK], so the share of running characters covered is reported.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from bert_pretrain.errors import ConfigError

COVERAGE = 0.9999
MIN_COVERAGE = 0.99


@dataclass(frozen=True)
class Alphabet:
    """The characters kept, and those of them that occur inside words and need a `##` form; both sorted."""

    characters: list[str]
    inside: list[str]
    coverage: float
    """The share of running characters that are kept."""
    left_out: list[str]
    """Characters of the corpus that are not kept, most frequent first."""

    @property
    def tokens(self) -> list[str]:
        """What the vocabulary must hold for the alphabet, in a fixed order."""
        return [*self.characters, *(f"##{character}" for character in self.inside)]


def choose_alphabet(words: Mapping[str, int], limit: int | None, room: int) -> Alphabet:
    """Choose characters by frequency, up to a coverage of 99.99 % and all ASCII, or `limit` of them.

    Words are normalised; the alphabet may take `room` tokens, `##` forms included.
    """
    counts: Counter[str] = Counter()
    inside: set[str] = set()
    for word, count in words.items():
        for character in word:
            counts[character] += count
        inside.update(word[1:])
    total = sum(counts.values())
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    kept: list[str] = []
    covered = cost = 0
    for character in ranked:
        if limit is not None and len(kept) >= limit:
            break
        # ASCII is always kept: a corpus of novels hardly has "@", other text will.
        if limit is None and covered >= COVERAGE * total and not character.isascii():
            continue
        cost += 2 if character in inside else 1
        if cost > room:
            break
        kept.append(character)
        covered += counts[character]
    coverage = covered / total if total else 0.0
    if coverage < MIN_COVERAGE:
        by_size = limit is None or len(kept) < limit
        characters, tokens = _needed(counts, inside, ranked)
        more = tokens - room if by_size else characters - len(kept)
        raise ConfigError(
            f"an alphabet of {len(kept):,} characters covers only {coverage:.2%} of the text; every word with another "
            f"one would be [UNK] (the text has {len(ranked):,} different characters)",
            where="vocab.size" if by_size else "vocab.limit_alphabet",
            remedy=f"raise it by {more:,} at least; Chinese takes about 21,128 tokens",
        )
    members = set(kept)
    left_out = [character for character in ranked if character not in members]
    return Alphabet(sorted(kept), sorted(inside & members), coverage, left_out)


def _needed(counts: Counter[str], inside: set[str], ranked: list[str]) -> tuple[int, int]:
    """Return how many of the most frequent characters cover just enough of the text, and the tokens they take."""
    covered = characters = tokens = 0
    while covered < MIN_COVERAGE * counts.total():
        character = ranked[characters]
        covered += counts[character]
        characters += 1
        tokens += 2 if character in inside else 1
    return characters, tokens
