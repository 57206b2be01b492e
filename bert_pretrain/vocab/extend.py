"""Words of a domain into an existing vocabulary: into its unused slots first, then at its end.

Characters that the vocabulary lacks come first, as any word with one is [UNK] and lost; then the whole words that save
most pieces. Savings are counted once, with the old pieces: a chosen word may also change how longer words are cut.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from bert_pretrain.errors import ConfigError
from bert_pretrain.text.tokenizer import Tokenizer, old_pieces
from bert_pretrain.text.tokenizer_folder import MAX_WORD_CHARACTERS, is_unused
from bert_pretrain.vocab.wordpiece import COVERAGE


def extend_vocabulary(
    words: Mapping[str, int], old: Tokenizer, *, add_tokens: int | None, min_frequency: int
) -> tuple[Tokenizer, list[dict[str, Any]]]:
    """Return the extended vocabulary, and its new tokens: `token`, `id`, the old `pieces` it consists of, and `count`.

    The count of a word is how often it occurs, that of a character how often its absence makes a word [UNK]. At most
    `add_tokens` are added, or as many as there are unused slots; words are normalised as the old tokenizer does.
    """
    slots = [index for index, token in enumerate(old.tokens) if is_unused(token)]
    room = len(slots) if add_tokens is None else add_tokens
    if not room:
        raise ConfigError(
            f"the vocabulary of {old.folder} has no unused slots",
            where="vocab.add_tokens",
            remedy="say how many tokens to add at its end, for example --add-tokens 1000",
        )
    characters = lost_characters(words, old, min_frequency)[:room]
    chosen: dict[str, int] = dict(characters)
    for word, count in _words_in_pieces(words, old.with_tokens([*old.tokens, *chosen]), min_frequency):
        if len(chosen) >= room:
            break
        chosen[word] = count
    tokens, free = list(old.tokens), iter(slots)
    ids = {token: index for index, token in enumerate(old.tokens)}
    added = []
    for token, count in chosen.items():
        index = next(free, len(tokens))
        tokens[index : index + 1] = [token]
        pieces = [old.tokens[piece] for piece in old_pieces(token, ids)]
        added.append({"token": token, "id": index, "pieces": pieces, "count": count})
    return old.with_tokens(tokens), added


def lost_characters(words: Mapping[str, int], old: Tokenizer, min_frequency: int) -> list[tuple[str, int]]:
    """Return the characters, `c` or `##c` as the text has them, whose absence makes words [UNK], most frequent first.

    Only as many as a new vocabulary would keep: up to 99.99 % of the running characters.
    """
    known = set(old.tokens)
    inside = {token[2:] for token in known if len(token) == 3 and token.startswith("##")}
    # In all other words each character is a token.
    doubtful = [word for word in words if not (word[0] in known and inside.issuperset(word[1:]))]
    doubtful = [word for word in doubtful if len(word) <= MAX_WORD_CHARACTERS]
    lacking: Counter[str] = Counter()
    for word, ids in zip(doubtful, old.encode_texts(doubtful), strict=True):
        if ids == [old.unk_id]:
            forms = [word[0], *(f"##{character}" for character in word[1:])]
            for form in forms:
                if form not in known:
                    lacking[form] += words[word]
    total = sum(len(word) * count for word, count in words.items())
    missing = lacking.total()
    kept = []
    for form in sorted(lacking, key=lambda form: (-lacking[form], form)):
        if missing <= (1 - COVERAGE) * total or lacking[form] < min_frequency:
            break
        kept.append((form, lacking[form]))
        missing -= lacking[form]
    return kept


def _words_in_pieces(words: Mapping[str, int], tokenizer: Tokenizer, min_frequency: int) -> Iterator[tuple[str, int]]:
    """Yield the words that a vocabulary cuts, with their counts; those first that would save most pieces.

    A word that is [UNK] still, for a rare character in it, counts as if it were cut in two.
    """
    frequent = [word for word, count in words.items() if count >= min_frequency and len(word) <= MAX_WORD_CHARACTERS]
    saved = {
        word: words[word] * max(1, len(ids) - 1)
        for word, ids in zip(frequent, tokenizer.encode_texts(frequent), strict=True)
        if len(ids) > 1 or ids == [tokenizer.unk_id]
    }
    backend = tokenizer.backend
    for word in sorted(saved, key=lambda word: (-saved[word], word)):
        # A word that normalisation or pre-tokenisation changes would never be matched.
        normalised = backend.normalizer.normalize_str(word)
        if [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(normalised)] == [word]:
            yield word, words[word]
