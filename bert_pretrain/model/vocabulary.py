"""Check that a tokenizer has the same tokens and ids as a model folder, or extends them."""

from pathlib import Path

from bert_pretrain.errors import DataError
from bert_pretrain.text.tokenizer import Extension, Tokenizer, find_extension
from bert_pretrain.text.tokenizer_folder import has_vocabulary, read_tokenizer_folder


def match_vocabulary(folder: Path, tokenizer: Tokenizer, flag: str) -> Extension | None:
    """Return how a tokenizer extends the vocabulary of a model folder, or None if the folder has no vocabulary.

    If both vocabularies are equal, the extension has no pieces.

    Raise `DataError` if the tokenizer does not extend the vocabulary, or if the two tokenizers treat text differently.
    """
    if not has_vocabulary(folder):
        return None
    old = read_tokenizer_folder(folder, flag)
    extension = find_extension(old.tokens, tokenizer.tokens)
    if extension is None:
        what = f"the vocabulary of {folder} differs from the vocabulary of the data"
        remedy = "make the data with --vocab and this model's folder, or a folder that 'vocab --extend' made from it; "
        remedy += "or use a model trained on such data"
        raise DataError(what, where=flag, remedy=remedy)
    theirs = (old.whole_words, old.split_clusters, old.lowercase, old.strip_accents, old.handle_chinese_chars)
    ours = (tokenizer.whole_words, tokenizer.split_clusters, *tokenizer.settings.values())
    names = ("whole words", "clusters", *tokenizer.settings)
    num_compared = 2 if old.lowercase is None else len(names)  # None if the folder does not state these settings
    if _effective_settings(theirs)[:num_compared] != _effective_settings(ours)[:num_compared]:
        pairs = zip(names, theirs, ours, strict=True)
        differences = ", ".join(f"{name} {a} and {b}" for name, a, b in pairs if a != b)
        what = f"the tokenizers of {folder} and of the data treat text differently: {differences}"
        raise DataError(what, where=flag, remedy="make the data with --vocab and this model's folder")
    return extension


def _effective_settings(settings: tuple[bool | None, ...]) -> tuple[bool | None, ...]:
    """Replace a `strip_accents` of None by the value of `lowercase`, as BERT's tokenizer does."""
    *others, lowercase, strip_accents, handle_chinese_chars = settings
    return *others, lowercase, lowercase if strip_accents is None else strip_accents, handle_chinese_chars


def check_rows(folder: Path, num_rows: int, tokenizer: Tokenizer, flag: str) -> None:
    """Raise `DataError` if a word embedding has fewer rows than a vocabulary has tokens.

    More rows are an error only if the model folder has no vocabulary. Otherwise they pad the embedding to a round
    number, and stay in the softmax, as in `transformers`.
    """
    if num_rows < tokenizer.vocab_size or (num_rows > tokenizer.vocab_size and not has_vocabulary(folder)):
        what = f"the model has {num_rows} tokens, the vocabulary {tokenizer.vocab_size}"
        remedy = "put the model's vocab.txt there, or use data made with the model's tokenizer folder"
        raise DataError(what, where=f"{flag} {folder}", remedy=remedy)


def check_same_vocabulary(folder: Path, tokenizer: Tokenizer, flag: str) -> None:
    """Raise `DataError` if a model folder has a vocabulary other than the tokenizer's."""
    extension = match_vocabulary(folder, tokenizer, flag)
    if extension is not None and extension.pieces:
        what = f"the vocabulary of the data extends the vocabulary of {folder} by {len(extension.pieces)} tokens"
        remedy = "make data with --vocab and this model's folder, or use a model trained on such data"
        raise DataError(what, where=flag, remedy=remedy)
