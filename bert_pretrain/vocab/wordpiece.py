"""Training of a vocabulary of pieces or whole words from counted words, with the same result on every machine.

`tokenizers` chooses the merges. It orders the alphabet at random, so the alphabet is registered as special tokens. It
does not accept counts, so each word is repeated by its count. Large counts are scaled down, which also prevents an
overflow of its 32-bit pair counts.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from bert_pretrain.config import VocabConfig
from bert_pretrain.errors import ConfigError
from bert_pretrain.text.tokenizer_folder import MAX_WORD_CHARACTERS, SPECIAL_TOKENS, is_reserved, is_storable

COVERAGE = 0.9999
MIN_COVERAGE = 0.99
MAX_REPLAYED_WORDS = 5_000_000
_WORDS_PER_LINE = 1000


def special_tokens(unused_tokens: int) -> list[str]:
    """Return BERT's special tokens in the order of their ids: [PAD], unused slots, [UNK], [CLS], [SEP], [MASK]."""
    pad, *others = SPECIAL_TOKENS
    return [pad, *(f"[unused{number}]" for number in range(unused_tokens)), *others]


def choose_words(words: Mapping[str, int], config: VocabConfig) -> list[str]:
    """Return a vocabulary of whole words: special tokens, then words, most frequent first.

    Exclude words that occur fewer than `config.min_frequency` times, are equal to a special token or unused slot,
    contain control characters, or are too long for a token.
    """
    special = special_tokens(config.unused_tokens)
    frequent = [word for word, count in words.items() if count >= config.min_frequency]
    kept = [word for word in frequent if is_storable(word) and not is_reserved(word)]
    kept.sort(key=lambda word: (-words[word], word))
    return [*special, *kept[: config.size - len(special)]]


@dataclass(frozen=True)
class Alphabet:
    """The characters of a vocabulary. A word with any other character is [UNK]."""

    characters: list[str]  # sorted
    inside: list[str]  # characters that occur inside words and need a `##` form, sorted
    coverage: float  # share of the text's characters
    left_out: list[str]  # all other characters of the corpus, most frequent first

    @property
    def tokens(self) -> list[str]:
        """The tokens for the alphabet in a fixed order."""
        return [*self.characters, *(f"##{character}" for character in self.inside)]


def choose_alphabet(words: Mapping[str, int], limit: int | None, room: int) -> Alphabet:
    """Choose the `limit` most frequent characters; by default, enough to cover 99.99 % of the text, and all ASCII.

    `words` are normalized. `room` is the maximum number of tokens of the alphabet, including `##` forms.
    """
    counts: Counter[str] = Counter()
    inside: set[str] = set()
    for word, count in words.items():
        for character in word:
            counts[character] += count
        inside.update(word[1:])
    total = counts.total()
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    kept: list[str] = []
    covered = cost = 0
    for character in ranked:
        if limit is not None and len(kept) >= limit:
            break
        # Keep all ASCII: characters such as "@" are rare in novels, but not in other text.
        if limit is None and covered >= COVERAGE * total and not character.isascii():
            continue
        cost += 2 if character in inside else 1
        if cost > room:
            break
        kept.append(character)
        covered += counts[character]
    coverage = covered / total if total else 0.0
    if coverage < MIN_COVERAGE:
        where = "vocab.size" if limit is None or len(kept) < limit else "vocab.limit_alphabet"
        what = f"an alphabet of {len(kept):,} characters covers only {coverage:.2%} of the text, which has "
        what += f"{len(ranked):,} different ones; every word with another character would be [UNK]"
        raise ConfigError(what, where=where, remedy="raise it; Chinese needs about 21,128 tokens")
    members = set(kept)
    left_out = [character for character in ranked if character not in members]
    return Alphabet(sorted(kept), sorted(inside & members), coverage, left_out)


def train_wordpiece(words: Mapping[str, int], alphabet: Alphabet, config: VocabConfig) -> tuple[list[str], float]:
    """Return the vocabulary (special tokens, alphabet, merges by falling frequency) and the divisor of the counts.

    The vocabulary is smaller than `config.size` if too few pairs reach `config.min_frequency`. Words with counts of at
    most half of the divisor are ignored.
    """
    kept, divisor = trainable(words, alphabet)
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordPieceTrainer(
        vocab_size=config.size,
        min_frequency=math.ceil(config.min_frequency / divisor),
        special_tokens=[*special_tokens(config.unused_tokens), *alphabet.tokens],
        limit_alphabet=len(alphabet.tokens) + 1,
        continuing_subword_prefix="##",
        show_progress=False,
    )
    backend.train_from_iterator(_replay(kept), trainer)
    ids = backend.get_vocab()
    return sorted(ids, key=ids.__getitem__), divisor


def trainable(words: Mapping[str, int], alphabet: Alphabet) -> tuple[dict[str, int], float]:
    """Return the words of the alphabet, with counts scaled to about `MAX_REPLAYED_WORDS` in all, and the divisor."""
    known = set(alphabet.characters)
    kept = {word: count for word, count in words.items() if len(word) <= MAX_WORD_CHARACTERS and known.issuperset(word)}
    total = sum(kept.values())
    if total <= MAX_REPLAYED_WORDS:
        return kept, 1.0
    scaled = {word: round(count * MAX_REPLAYED_WORDS / total) for word, count in kept.items()}
    return {word: count for word, count in scaled.items() if count}, total / MAX_REPLAYED_WORDS


def _replay(words: Mapping[str, int]) -> Iterator[str]:
    """Yield each word as often as it is counted, in lines of bounded length."""
    for word in sorted(words):
        for first in range(0, words[word], _WORDS_PER_LINE):
            yield f"{word} " * min(_WORDS_PER_LINE, words[word] - first)
