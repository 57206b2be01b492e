"""Single texts for a model, from the same inputs as the stages: a line of `.txt`, a record of any other format.

Inputs are read twice. The first pass counts the texts and checks them, so that a progress bar has a total and an error
is reported at once; the second yields them tokenized in groups, so that memory is bounded.
"""

import itertools
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bert_pretrain.config import DataConfig, TextField
from bert_pretrain.errors import InputError, OutputError
from bert_pretrain.io.pool import progress_bar
from bert_pretrain.text.fast_tokenizer import Encoder
from bert_pretrain.text.ragged import offsets_of
from bert_pretrain.text.readers import read_texts
from bert_pretrain.text.sources import resolve
from bert_pretrain.text.text_files import ByteRange, describe_reasons, join_reasons
from bert_pretrain.text.tokenizer import MAX_UNK_SHARE, Tokenizer

GROUP_TEXTS = 8192
GROUP_CHARACTERS = 1 << 21
"""Read, tokenized and sorted by length at once; a single text may be longer."""
NUM_WORDS_SHOWN = 3
"""Unknown words in a warning."""


@dataclass(frozen=True)
class Text:
    """A text and its position."""

    text: str
    location: str
    row: int
    """Number in its source, from 1."""
    unit: str
    """Name of a row in messages: a line or a record."""

    @property
    def where(self) -> str:
        return f"{self.location}: {self.unit} {self.row}"

    @property
    def is_empty(self) -> bool:
        """Whether it has no token: it holds nothing but blanks and what BERT's clean-up removes."""
        return all(
            character.isspace() or character == "\ufffd" or unicodedata.category(character).startswith("C")
            for character in self.text
        )


class Texts:
    """The texts of inputs, checked and counted."""

    def __init__(
        self,
        inputs: Sequence[str],
        text_field: TextField = "text",
        *,
        encoding: str = "utf-8",
        skip_empty: bool = False,
    ) -> None:
        """Resolve inputs and read through them once."""
        self._config = DataConfig(
            text_field=text_field, encoding=encoding, sentence_splitter="lines", document_boundary="blank_line"
        )
        self.sources = resolve(inputs, self._config, every_split=True)
        self.number = 0
        if any(source.format == "txt" for source in self.sources):
            print("texts      each line of .txt is one")
        counts: Counter[str] = Counter()
        for text in progress_bar(self._read(counts), unit=" texts", desc="reading", leave=False):
            if text.is_empty and not skip_empty:
                raise _empty(text)
            counts["empty_texts_skipped"] += text.is_empty
            self.number += not text.is_empty
        if found := describe_reasons(join_reasons(counts)):
            print(f"found      {', '.join(found)}")
        if not self.number:
            raise InputError("the inputs hold no text", where=", ".join(inputs), remedy="name inputs with text in them")

    def _read(self, counts: Counter[str]) -> Iterator[Text]:
        for source in self.sources:
            unit = "line" if source.format == "txt" else "record"
            for row, text in enumerate(read_texts(ByteRange(source), self._config, counts), start=1):
                yield Text(text or "", source.location, row, unit)

    def __iter__(self) -> Iterator[Text]:
        """Read the texts that are not empty, in the order of the inputs."""
        return (text for text in self._read(Counter()) if not text.is_empty)


def refuse_input_as_output(output: Path | None, locations: Iterable[str], flag: str = "--output") -> None:
    """Refuse to overwrite an input."""
    if output is not None and output.resolve() in {Path(location).resolve() for location in set(locations)}:
        raise OutputError(f"{output} is an input", where=flag, remedy="name another file")


def encoded_groups(
    texts: Iterable[Text], tokenizer: Tokenizer, *, warns: bool = True
) -> Iterator[tuple[list[Text], list[np.ndarray]]]:
    """Yield texts in groups with their ids, without [CLS] and [SEP], in order.

    Warns at the end if the model knows few of their words, unless this is one pass of several over the same texts.
    """
    encoder, unknown = Encoder(tokenizer), UnknownWords(tokenizer)
    for group in _grouped(texts):
        encoded = [text.text.encode() for text in group]
        starts = offsets_of(np.array([len(one) for one in encoded]))[:-1]
        joined, offsets = encoder.encode(np.frombuffer(b"".join(encoded), dtype=np.uint8), starts)
        ids = [joined[begin:end] for begin, end in itertools.pairwise(offsets)]
        for text, own in zip(group, ids, strict=True):
            if not len(own):
                raise _empty(text)
            unknown.add(text.text, own)
        yield group, ids
    if warns:
        unknown.warn(MAX_UNK_SHARE)


def _grouped(texts: Iterable[Text]) -> Iterator[list[Text]]:
    group: list[Text] = []
    characters = 0
    for text in texts:
        group.append(text)
        characters += len(text.text)
        if len(group) == GROUP_TEXTS or characters >= GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _empty(text: Text) -> InputError:
    remedy = "fill it or remove it; for one text per row, --skip-empty skips all empty ones"
    if text.unit == "line":
        remedy += ", such as blank lines between documents; for one per document, give records (.jsonl)"
    return InputError(f"the text is empty: {text.text[:60]!r}", where=text.where, remedy=remedy)


class UnknownWords:
    """Counts the tokens of texts that are [UNK], and warns with some of their words."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words: list[str] = []
        self._num_tokens = self._num_unknown = 0

    def add(self, text: str, ids: Sequence[int] | np.ndarray) -> None:
        """Count a text, given its ids."""
        unknown = int(np.count_nonzero(np.asarray(ids) == self._tokenizer.unk_id))
        self._num_tokens += len(ids)
        self._num_unknown += unknown
        if unknown and len(self._words) < NUM_WORDS_SHOWN:
            encoding = self._tokenizer.backend.encode(text, add_special_tokens=False)
            pairs = zip(encoding.ids, encoding.offsets, strict=True)
            self._words += [text[slice(*span)][:24] for token, span in pairs if token == self._tokenizer.unk_id]

    def warn(self, tolerated_share: float) -> None:
        """Warn if a larger share is unknown."""
        if self._num_unknown > tolerated_share * self._num_tokens:
            shown = ", ".join(map(repr, self._words[:NUM_WORDS_SHOWN]))
            what = f"{self._num_unknown:,} of {self._num_tokens:,} tokens are [UNK] to the model: {shown}"
            hint = "write the text in the language, script and case of the model's vocabulary, with its spaces"
            print(f"warning: {what}\n  hint: {hint}", file=sys.stderr)
