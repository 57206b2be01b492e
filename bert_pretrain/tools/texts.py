"""Texts for a model, from the same inputs as the stages: each line of `.txt`, or each record of any other format.

Inputs are read twice. The first pass counts and checks the texts, so that a progress bar has a total and errors appear
immediately. The second yields them tokenized in groups of bounded size.
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
from bert_pretrain.io.manifest import check_writable
from bert_pretrain.io.pool import progress_bar
from bert_pretrain.ragged import offsets_of
from bert_pretrain.text.fast_tokenizer import Encoder
from bert_pretrain.text.readers import read_texts
from bert_pretrain.text.sources import resolve
from bert_pretrain.text.text_files import ByteRange, describe_reasons, join_reasons
from bert_pretrain.text.tokenizer import MAX_UNK_SHARE, Tokenizer

# A group of texts ends at one of these limits, with the text that reaches it. Callers sort its texts by length.
GROUP_TEXTS = 8192
GROUP_CHARACTERS = 1 << 21
MAX_WORDS_SHOWN = 3  # unknown words in a warning


@dataclass(frozen=True)
class Text:
    """A text and its position."""

    text: str
    location: str
    row: int  # number in its source, from 1
    unit: str  # "line" or "record"

    @property
    def where(self) -> str:
        return f"{self.location}: {self.unit} {self.row}"


def is_empty(text: str, *, strips_accents: bool) -> bool:
    """Return whether a text has only blanks and characters that BERT's tokenizer removes."""
    # Not "Cn": characters that are unknown to this Python, such as new emoji.
    removed = ("Cc", "Cf", "Co", "Cs", "Mn") if strips_accents else ("Cc", "Cf", "Co", "Cs")
    return all(
        character.isspace() or character == "\ufffd" or unicodedata.category(character).startswith(removed)
        for character in text
    )


class Texts:
    """The non-empty texts of inputs, which are counted and checked on construction."""

    def __init__(
        self, inputs: Sequence[str], text_field: TextField, *, strips_accents: bool, encoding: str = "utf-8",
        skip_empty: bool = False,
    ) -> None:  # fmt: skip
        self._strips_accents = strips_accents
        self._config = DataConfig(
            text_field=text_field, encoding=encoding, sentence_splitter="lines", document_boundary="blank_line"
        )
        self.sources = resolve(inputs, self._config, every_split=True)
        self.num_texts = 0
        if any(source.format == "txt" for source in self.sources):
            print("texts      each line of .txt is one text")
        counts: Counter[str] = Counter()
        for text in progress_bar(self._read(counts), unit=" texts", desc="reading", leave=False):
            if (skipped := is_empty(text.text, strips_accents=strips_accents)) and not skip_empty:
                raise _empty_error(text)
            counts["empty_texts_skipped"] += skipped
            self.num_texts += not skipped
        if notes := describe_reasons(join_reasons(counts)):  # such as skipped texts and repaired characters
            print(f"found      {', '.join(notes)}")
        if not self.num_texts:
            raise InputError("the inputs have no text", where=", ".join(inputs), remedy="name inputs with text in them")

    def _read(self, counts: Counter[str]) -> Iterator[Text]:
        for source in self.sources:
            unit = "line" if source.format == "txt" else "record"
            for row, text in enumerate(read_texts(ByteRange(source), self._config, counts), start=1):
                yield Text(text or "", source.location, row, unit)

    def __iter__(self) -> Iterator[Text]:
        return (text for text in self._read(Counter()) if not is_empty(text.text, strips_accents=self._strips_accents))


_STREAMS = ("/dev/stdout", "/dev/stderr")  # a link would be replaced by a file


def check_output_file(output: Path | None, locations: Iterable[str], flag: str = "--output") -> None:
    """Raise `OutputError` if the output is a folder or cannot be written, or if an input would be overwritten."""
    if output is None:
        return
    check_writable(output.parent, flag)
    if output.is_dir():
        raise OutputError(f"{output} is a folder", where=flag, remedy="give the name of a file")
    if (output.exists() and not output.is_file()) or str(output) in _STREAMS:
        raise OutputError(f"{output} is not a regular file", where=flag, remedy="give the name of a file")
    if output.resolve() in {Path(location).resolve() for location in set(locations)}:
        raise OutputError(f"{output} is an input", where=flag, remedy="name another file")


def encoded_groups(
    texts: Iterable[Text], tokenizer: Tokenizer, *, warns: bool = True
) -> Iterator[tuple[list[Text], list[np.ndarray]]]:
    """Yield groups of texts in order, with their ids without [CLS] and [SEP].

    Warn at the end if too many tokens are [UNK]. Set `warns` to False if the same texts are encoded again.
    """
    encoder, unknown_words = Encoder(tokenizer), UnknownWords(tokenizer)
    for group in _grouped(texts):
        encoded = [text.text.encode() for text in group]
        starts = offsets_of(np.array([len(text_bytes) for text_bytes in encoded]))[:-1]
        joined = encoder.encode(np.frombuffer(b"".join(encoded), dtype=np.uint8), starts)
        ids = [joined.ids[begin:end] for begin, end in itertools.pairwise(joined.offsets)]
        for text, text_ids in zip(group, ids, strict=True):
            if not len(text_ids):
                raise _empty_error(text)
            unknown_words.add(text.text, text_ids)
        yield group, ids
    if warns:
        unknown_words.warn()


def _grouped(texts: Iterable[Text]) -> Iterator[list[Text]]:
    group: list[Text] = []
    num_characters = 0
    for text in texts:
        group.append(text)
        num_characters += len(text.text)
        if len(group) == GROUP_TEXTS or num_characters >= GROUP_CHARACTERS:
            yield group
            group, num_characters = [], 0
    if group:
        yield group


def _empty_error(text: Text) -> InputError:
    remedy = "put text there, delete the empty text, or skip all empty texts with --skip-empty"
    if text.unit == "line":
        remedy += " (also the lines between documents); for one text per document, use records (.jsonl)"
    return InputError(f"the text is empty: {text.text[:60]!r}", where=text.where, remedy=remedy)


class UnknownWords:
    """Counts [UNK] tokens, and warns with examples of the words."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words: list[str] = []
        self._num_tokens = self._num_unknown = 0

    def add(self, text: str, ids: Sequence[int] | np.ndarray) -> None:
        """Count the tokens of a text."""
        num_unknown = int(np.count_nonzero(np.asarray(ids) == self._tokenizer.unk_id))
        self._num_tokens += len(ids)
        self._num_unknown += num_unknown
        if num_unknown and len(self._words) < MAX_WORDS_SHOWN:
            encoding = self._tokenizer.backend.encode(text, add_special_tokens=False)
            pairs = zip(encoding.ids, encoding.offsets, strict=True)
            self._words += [text[slice(*span)] for token, span in pairs if token == self._tokenizer.unk_id]

    def warn(self, max_share: float = MAX_UNK_SHARE) -> None:
        """Print a warning if more than `max_share` of the tokens are [UNK]."""
        if self._num_unknown > max_share * self._num_tokens:
            words = ", ".join(repr(word[:24]) for word in self._words[:MAX_WORDS_SHOWN])
            what = f"{self._num_unknown:,} of {self._num_tokens:,} tokens are [UNK]: {words}"
            long_word_hint = self._tokenizer.long_word_hint(self._words)
            hint = long_word_hint or "use the language, script, case and word spacing of the model's vocabulary"
            print(f"warning: {what}\n  hint: {hint}", file=sys.stderr)
