"""Extension of an existing vocabulary by the words of a domain, in its unused slots and after its last token.

Missing characters are added first, because every word with a missing character is [UNK]. Then the words that save the
most pieces are added. Savings are computed only once, although an added word may change how longer words are split.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from bert_pretrain.errors import ConfigError
from bert_pretrain.text.tokenizer import Tokenizer, old_pieces, word_piece
from bert_pretrain.text.tokenizer_folder import MAX_WORD_CHARACTERS, is_unused
from bert_pretrain.vocab.wordpiece import COVERAGE


def extend_vocabulary(
    words: Mapping[str, int],
    old: Tokenizer,
    *,
    add_tokens: int | None,
    min_frequency: int,
) -> tuple[Tokenizer, list[dict[str, Any]]]:
    """Return the extended tokenizer and its new tokens, each with `token`, `id`, old `pieces` and `count`.

    `words` must be normalized by `old`. At most `add_tokens` tokens are added, by default one for each unused slot. The
    `count` of a new word is its count in `words`. The `count` of a new character is its count in words that are [UNK].
    """
    slots = [index for index, token in enumerate(old.tokens) if is_unused(token)]
    room = len(slots) if add_tokens is None else add_tokens
    if not room:
        raise ConfigError(
            f"the vocabulary of {old.folder} has no unused slots",
            where="vocab.add_tokens",
            remedy="set the number of tokens to add at its end, for example --add-tokens 1000",
        )
    chosen = dict(missing_characters(words, old, min_frequency)[:room])
    for word, count in _split_words(words, old.with_tokens([*old.tokens, *chosen]), min_frequency):
        if len(chosen) >= room:
            break
        chosen[word] = count
    tokens = list(old.tokens)
    free_slots = iter(slots)
    model = word_piece({token: index for index, token in enumerate(old.tokens)})
    added = []
    for token, count in chosen.items():
        index = next(free_slots, len(tokens))
        tokens[index : index + 1] = [token]
        pieces = [old.tokens[piece] for piece in old_pieces(token, model)]
        added.append({"token": token, "id": index, "pieces": pieces, "count": count})
    return old.with_tokens(tokens), added


def missing_characters(words: Mapping[str, int], old: Tokenizer, min_frequency: int) -> list[tuple[str, int]]:
    """Return the missing characters of words that are [UNK], as (token, count) in descending order of count.

    A token is `c` or `##c`. The list ends when 99.99 % of the characters of the text are covered, as in a new
    vocabulary, or before the first count below `min_frequency`.
    """
    known = set(old.tokens)
    missing: Counter[str] = Counter()
    num_characters = 0
    for word, count in words.items():
        num_characters += len(word) * count
        if len(word) > MAX_WORD_CHARACTERS or old.encode_word(word) != [old.unk_id]:
            continue
        for token in (word[0], *(f"##{character}" for character in word[1:])):
            if token not in known:
                missing[token] += count
    uncovered = missing.total()
    kept = []
    for token in sorted(missing, key=lambda token: (-missing[token], token)):
        if uncovered <= (1 - COVERAGE) * num_characters or missing[token] < min_frequency:
            break
        kept.append((token, missing[token]))
        uncovered -= missing[token]
    return kept


def _split_words(words: Mapping[str, int], tokenizer: Tokenizer, min_frequency: int) -> Iterator[tuple[str, int]]:
    """Yield the words that a vocabulary splits, and their counts, by falling number of saved pieces.

    A word that is [UNK] because of a rare character counts as two pieces.
    """
    saved = {}
    for word, count in words.items():
        if count < min_frequency or len(word) > MAX_WORD_CHARACTERS:
            continue
        ids = tokenizer.encode_word(word)
        if len(ids) > 1 or ids == [tokenizer.unk_id]:
            saved[word] = count * max(1, len(ids) - 1)
    for word in sorted(saved, key=lambda word: (-saved[word], word)):
        # A word that normalization or pre-tokenization changes can never be matched.
        if tokenizer.rules.words(word.encode()) == [word]:
            yield word, words[word]
