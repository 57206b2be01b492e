"""Whether a model folder and a tokenizer match: the same tokens with the same ids, or an extension of them."""

from pathlib import Path

from bert_pretrain.errors import DataError
from bert_pretrain.text.tokenizer import Extension, Tokenizer, find_extension
from bert_pretrain.text.tokenizer_folder import has_vocabulary, read_tokenizer_folder


def match_vocabulary(folder: Path, tokenizer: Tokenizer, flag: str) -> Extension | None:
    """Return how a tokenizer extends a model folder's own vocabulary; None if the folder has none.

    The tokens are compared, for with equal sizes alone ids could mean other tokens.
    """
    if not has_vocabulary(folder):
        return None
    found = read_tokenizer_folder(folder, flag)
    extension = find_extension(found.tokens, tokenizer.tokens)
    if extension is None:
        raise DataError(
            f"the vocabulary of {folder} is not that of the data",
            where=flag,
            remedy="make the data with this model's folder as --vocab, or with one that 'vocab --extend' made from it; "
            "or take a model trained on such data",
        )
    theirs = (found.whole_words, found.split_clusters, found.lowercase, found.strip_accents, found.handle_chinese_chars)
    ours = (tokenizer.whole_words, tokenizer.split_clusters, *tokenizer.settings.values())
    names = ("whole words", "clusters", *tokenizer.settings)
    compared = 2 if found.lowercase is None else len(names)
    if _in_effect(theirs)[:compared] != _in_effect(ours)[:compared]:
        pairs = zip(names, theirs, ours, strict=True)
        differences = ", ".join(f"{name} {old} and {new}" for name, old, new in pairs if old != new)
        raise DataError(
            f"the tokenizer of {folder} treats text differently from that of the data: {differences}",
            where=flag,
            remedy="make the data with this model's folder as --vocab",
        )
    return extension


def _in_effect(settings: tuple[bool | None, ...]) -> tuple[bool | None, ...]:
    *cut, lowercase, strip_accents, handle_chinese_chars = settings
    return *cut, lowercase, lowercase if strip_accents is None else strip_accents, handle_chinese_chars


def check_rows(folder: Path, num_rows: int, tokenizer: Tokenizer, flag: str) -> None:
    """Refuse a model whose word embedding does not match the size of a vocabulary.

    A model with its own vocabulary may have extra rows, which pad it to a round number. They stay in the softmax, so
    that results are those of `transformers`.
    """
    if num_rows < tokenizer.vocab_size or (num_rows > tokenizer.vocab_size and not has_vocabulary(folder)):
        raise DataError(
            f"the model has {num_rows} tokens, the vocabulary {tokenizer.vocab_size}",
            where=f"{flag} {folder}",
            remedy="put the model's own vocab.txt there, or take data made with the model's own tokenizer folder",
        )


def check_same_vocabulary(folder: Path, tokenizer: Tokenizer, flag: str) -> None:
    """Refuse a model folder whose own vocabulary, if it has one, is not that of the tokenizer."""
    extension = match_vocabulary(folder, tokenizer, flag)
    if extension is not None and extension.pieces:
        raise DataError(
            f"the vocabulary of {folder} is not that of the data, which extends it by {len(extension.pieces)} tokens",
            where=flag,
            remedy="make data with this model's folder as --vocab, or take a model trained on such data",
        )
