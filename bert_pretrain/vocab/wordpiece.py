"""Words and their counts to a vocabulary, of pieces or of whole words, the same in every run and on every machine.

A character that the alphabet leaves out makes every word with it [UNK]. The merges are those of `tokenizers`; what it
leaves to chance, the order of the alphabet, is fixed by registering the alphabet first. It has no training from counts,
so words are replayed as often as they occur, scaled down where there are very many (which also keeps its 32-bit pair
counts from overflowing).
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
    """Return BERT's special tokens in the order of their ids: [PAD], the unused slots, [UNK], [CLS], [SEP], [MASK]."""
    pad, *others = SPECIAL_TOKENS
    return [pad, *(f"[unused{number}]" for number in range(unused_tokens)), *others]


def choose_words(words: Mapping[str, int], config: VocabConfig) -> list[str]:
    """Return a vocabulary of whole words in the order of its ids: special tokens, then words, the most frequent first.

    Left out are words that occur less than `config.min_frequency` times, are spelled like a special token, contain
    control characters or are too long to be a token.
    """
    special = special_tokens(config.unused_tokens)
    kept = [
        word
        for word, count in words.items()
        if count >= config.min_frequency and is_storable(word) and not is_reserved(word)
    ]
    kept.sort(key=lambda word: (-words[word], word))
    return [*special, *kept[: config.size - len(special)]]


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
        """Tokens that the vocabulary needs for the alphabet, in a fixed order."""
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
        raise ConfigError(
            f"an alphabet of {len(kept):,} characters covers only {coverage:.2%} of the text; every word with another "
            f"one would be [UNK] (the text has {len(ranked):,} different characters)",
            where="vocab.size" if by_size else "vocab.limit_alphabet",
            remedy="raise it; Chinese takes about 21,128 tokens",
        )
    members = set(kept)
    left_out = [character for character in ranked if character not in members]
    return Alphabet(sorted(kept), sorted(inside & members), coverage, left_out)


def train_wordpiece(words: Mapping[str, int], alphabet: Alphabet, config: VocabConfig) -> tuple[list[str], float]:
    """Return the vocabulary in the order of its ids: special tokens, alphabet, then merges, most frequent first.

    Fewer than `config.size` tokens come out where the words hold no more pairs of `config.min_frequency`. Also returns
    the divisor of the counts: words that occur no more than half of it are not learned from.
    """
    kept, divisor = trainable(words, alphabet)
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    registered = [*special_tokens(config.unused_tokens), *alphabet.tokens]
    trainer = trainers.WordPieceTrainer(
        vocab_size=config.size,
        min_frequency=math.ceil(config.min_frequency / divisor),
        special_tokens=registered,
        limit_alphabet=len(alphabet.tokens) + 1,
        continuing_subword_prefix="##",
        show_progress=False,
    )
    backend.train_from_iterator(_replay(kept), trainer)
    ids = backend.get_vocab()
    return sorted(ids, key=ids.__getitem__), divisor


def trainable(words: Mapping[str, int], alphabet: Alphabet) -> tuple[dict[str, int], float]:
    """Return the words that can be learned from, and by what their counts are divided: `MAX_REPLAYED_WORDS` in all.

    A word with a character outside the alphabet will be [UNK] whole, and so teaches nothing.
    """
    members = set(alphabet.characters)
    kept = {
        word: count for word, count in words.items() if len(word) <= MAX_WORD_CHARACTERS and members.issuperset(word)
    }
    total = sum(kept.values())
    if total <= MAX_REPLAYED_WORDS:
        return kept, 1.0
    scaled = {word: round(count * MAX_REPLAYED_WORDS / total) for word, count in kept.items()}
    return {word: count for word, count in scaled.items() if count}, total / MAX_REPLAYED_WORDS


def _replay(words: Mapping[str, int]) -> Iterator[str]:
    for word in sorted(words):
        full, rest = divmod(words[word], _WORDS_PER_LINE)
        line = f"{word} "
        for _ in range(full):
            yield line * _WORDS_PER_LINE
        yield line * rest
