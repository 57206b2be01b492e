"""A vocabulary of whole words, for text that is tokenized already: its most frequent words."""

from collections.abc import Mapping

from bert_pretrain.config import VocabConfig
from bert_pretrain.text.tokenizer_folder import is_reserved, is_storable
from bert_pretrain.vocab.wordpiece import special_tokens


def choose_words(words: Mapping[str, int], config: VocabConfig) -> list[str]:
    """Return the vocabulary in the order of its ids: special tokens, then words, the most frequent first.

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
