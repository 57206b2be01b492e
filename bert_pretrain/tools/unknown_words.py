"""Words that a model sees only as [UNK]: which they are, and why."""

from collections.abc import Sequence

import numpy as np

from bert_pretrain.text.tokenizer import MAX_UNK_SHARE, Tokenizer
from bert_pretrain.text.tokenizer_folder import is_reserved

SHOWN = 3
MOST_EXAMPLES = 100
"""Unknown words of many texts after which no more are looked up."""


class UnknownWords:
    """Counts what is [UNK] in many texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words: list[str] = []
        self._texts = self._unreadable = self._tokens = self._unknown = 0

    def add(self, text: str, ids: np.ndarray) -> None:
        """Count a text, given its ids."""
        unknown = int(np.count_nonzero(ids == self._tokenizer.unk_id))
        self._texts += 1
        self._tokens += len(ids)
        self._unknown += unknown
        self._unreadable += unknown == len(ids)
        if unknown and len(self._words) < MOST_EXAMPLES:
            self._words += unknown_words(text, self._tokenizer)

    def warning(self) -> str | None:
        """Return a warning if more is unknown than in text of the model's language; None if not."""
        if self._unknown <= MAX_UNK_SHARE * self._tokens and self._unreadable <= MAX_UNK_SHARE * self._texts:
            return None
        what = f"{self._unknown / self._tokens:.0%} of the tokens of the texts are unknown"
        if self._unreadable:
            what += f", in {self._unreadable:,} of {self._texts:,} texts all of them"
        return f"warning: {what}, {describe_unknown(self._words, self._tokenizer)}"


def unknown_words(text: str, tokenizer: Tokenizer) -> list[str]:
    """Return the words of a text that are [UNK], in order."""
    encoded = tokenizer.backend.encode(text, add_special_tokens=False)
    (ids,) = tokenizer.encode_texts([text])
    return [
        text[begin:end] for token, (begin, end) in zip(ids, encoded.offsets, strict=True) if token == tokenizer.unk_id
    ]


def describe_unknown(words: Sequence[str], tokenizer: Tokenizer) -> str:
    """Return the end of a warning of some unknown words: the first of them, the likely cause, and a hint."""
    shown = ", ".join(repr(word if len(word) <= 24 else f"{word[:23]}…") for word in dict.fromkeys(words[:SHOWN]))
    cause, remedy = _cause_of_unknown(words, tokenizer)
    return f"[UNK] to the model: {shown}\n  likely cause: {cause}\n  hint: {remedy}"


def _cause_of_unknown(unknown: Sequence[str], tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the likely cause of unknown words, and its remedy."""
    known = set(tokenizer.tokens)
    for change, case in ((str.upper, "upper"), (str.lower, "lower"), (str.capitalize, "title")):
        if 2 * sum(change(word) in known for word in unknown) > len(unknown):
            return f"the vocabulary has these words in {case} case", "write the text in the case of the training text"
    if tokenizer.whole_words:
        longest = max(len(token) for token in tokenizer.tokens if not is_reserved(token))
        if max(map(len, unknown)) > longest:
            what = (
                f"the tokens are whole words of at most {longest} characters; the text may lack the spaces between them"
            )
            return what, "separate the words by spaces, as in the training text"
        return "the tokens are whole words, and these are none of them", "write words as in the training text"
    text = tokenizer.backend.normalizer.normalize_str("".join(unknown))
    missing = [letter for letter in dict.fromkeys(text) if not {letter, f"##{letter}"} & known]
    letters = ", ".join(map(repr, missing[:8]))
    what = f"characters that the vocabulary does not have, of another script or language: {letters}"
    return what if missing else "words too long to be split", "use text in the language of the model"
