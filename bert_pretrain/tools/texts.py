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
from bert_pretrain.text.sources import Source, resolve
from bert_pretrain.text.text_files import ByteRange
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.tools.unknown_words import UnknownWords

GROUP_TEXTS = 8192
GROUP_CHARACTERS = 1 << 21
"""Read, tokenized and sorted by length at once; a single text may be longer."""


@dataclass(frozen=True)
class Text:
    """A text and its position."""

    text: str
    location: str
    row: int
    """In its source, from 1."""
    unit: str
    """What a row is: a line or a record."""
    prefix: str | None = None
    """Text before it that is not scored itself."""

    @property
    def where(self) -> str:
        return f"{self.location}: {self.unit} {self.row}"


@dataclass(frozen=True)
class Texts:
    """All texts of some inputs, checked and counted."""

    sources: list[Source]
    config: DataConfig
    prefix_field: str | None
    number: int
    num_skipped: int

    @staticmethod
    def open(
        inputs: Sequence[str],
        text_field: TextField,
        *,
        encoding: str = "utf-8",
        skip_empty: bool = False,
        prefix_field: str | None = None,
    ) -> "Texts":
        """Resolve inputs and read through them once."""
        config = DataConfig(
            text_field=text_field, encoding=encoding, sentence_splitter="lines", document_boundary="blank_line"
        )
        sources = resolve(inputs, config, every_split=True)
        if any(source.format == "txt" for source in sources):
            print("texts      each line of .txt is one")
        number = num_skipped = 0
        counts: Counter[str] = Counter()
        with progress_bar(unit=" texts", desc="reading", leave=False) as bar:
            for text in _all_texts(sources, config, counts, prefix_field):
                if not _is_empty(text):
                    number += 1
                elif skip_empty:
                    num_skipped += 1
                else:
                    raise _empty(text)
                bar.update()
        if counts:
            found = (f"{count:,} {name.replace('_', ' ')}" for name, count in sorted(counts.items()))
            print(f"found      {', '.join(found)}")
        if not number:
            raise InputError("the inputs hold no text", where=", ".join(inputs), remedy="name inputs with text in them")
        return Texts(sources, config, prefix_field, number, num_skipped)

    def __iter__(self) -> Iterator[Text]:
        """Read the texts that are not empty, in the order of the inputs."""
        texts = _all_texts(self.sources, self.config, Counter(), self.prefix_field)
        return (text for text in texts if not _is_empty(text))


def refuse_input_as_output(output: Path | None, locations: Iterable[str]) -> None:
    """Refuse to overwrite an input."""
    if output is not None and output.resolve() in {Path(location).resolve() for location in set(locations)}:
        raise OutputError(f"{output} is an input", where="--output", remedy="name another file")


@dataclass(frozen=True)
class Group:
    """Some consecutive texts with their ids, without [CLS] and [SEP]."""

    texts: list[Text]
    ids: list[np.ndarray]
    prefixes: list[np.ndarray]
    """The ids of their prefixes."""


def encoded_groups(texts: Iterable[Text], tokenizer: Tokenizer, *, warns: bool = True) -> Iterator[Group]:
    """Tokenize texts group by group, in order; warn at the end if the model knows few of their words.

    `warns` is for one pass of several over the same texts.
    """
    encoder, unknown = Encoder(tokenizer), UnknownWords(tokenizer)
    for group in _grouped(texts):
        ids = _encoded([text.text for text in group], encoder)
        empty = next((text for text, own in zip(group, ids, strict=True) if not len(own)), None)
        if empty is not None:
            raise _empty(empty)
        for text, own in zip(group, ids, strict=True):
            unknown.add(text.text, own)
        prefixes = [text.prefix or "" for text in group]
        yield Group(group, ids, _encoded(prefixes, encoder) if any(prefixes) else [_NO_IDS] * len(group))
    if warns and (warning := unknown.warning()):
        print(warning, file=sys.stderr)


_NO_IDS = np.empty(0, dtype=np.int64)


def _encoded(texts: Sequence[str], encoder: Encoder) -> list[np.ndarray]:
    encoded = [text.encode() for text in texts]
    starts = offsets_of(np.array([len(one) for one in encoded]))[:-1]
    ids, offsets = encoder.encode(np.frombuffer(b"".join(encoded), dtype=np.uint8), starts)
    return [ids[begin:end] for begin, end in itertools.pairwise(offsets)]


def _grouped(texts: Iterable[Text]) -> Iterator[list[Text]]:
    group: list[Text] = []
    characters = 0
    for text in texts:
        group.append(text)
        characters += len(text.text) + len(text.prefix or "")
        if len(group) == GROUP_TEXTS or characters >= GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _all_texts(
    sources: Sequence[Source], config: DataConfig, counts: Counter[str], prefix_field: str | None
) -> Iterator[Text]:
    for source in sources:
        unit = "line" if source.format == "txt" else "record"
        texts, prefixes = read_texts(ByteRange(source), config, counts), _prefixes(source, config, prefix_field)
        for row, (text, prefix) in enumerate(zip(texts, prefixes, strict=prefix_field is not None), start=1):
            yield Text(text or "", source.location, row, unit, prefix)


def _prefixes(source: Source, config: DataConfig, field: str | None) -> Iterator[str | None]:
    """Yield the prefixes of the texts of a source, None for each text if no field holds them."""
    if field is None:
        return itertools.repeat(None)
    if source.format == "txt":
        what, remedy = "lines of .txt have no fields", "give records, such as .jsonl, or leave out --prefix-field"
        raise InputError(what, where=source.location, remedy=remedy)
    return read_texts(ByteRange(source), config.model_copy(update={"text_field": field}), Counter())


def _is_empty(text: Text) -> bool:
    """Whether a text has no token: it holds nothing but blanks and what BERT's clean-up removes."""
    return all(
        character.isspace() or character == "\ufffd" or unicodedata.category(character).startswith("C")
        for character in text.text
    )


def _empty(text: Text) -> InputError:
    return InputError(
        f"the text is empty: {text.text[:60]!r}",
        where=text.where,
        remedy="fill it or remove it; for one text per row, --skip-empty skips all empty ones"
        + (
            ", such as blank lines between documents; for one per document, give records (.jsonl)"
            * (text.unit == "line")
        ),
    )
