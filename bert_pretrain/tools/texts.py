"""Texts for a model, from the same inputs as the stages: each line of `.txt`, or each record of any other format.

Inputs are read twice. The first pass counts and checks the texts, so that a progress bar has a total and errors appear
immediately. In the second, texts are encoded in groups of bounded size.
"""

import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bert_pretrain.config import DataConfig
from bert_pretrain.errors import InputError, OutputError
from bert_pretrain.examples.examples import Examples
from bert_pretrain.io.manifest import check_writable
from bert_pretrain.io.pool import progress_bar
from bert_pretrain.ragged import offsets_of, spans
from bert_pretrain.text.fast_tokenizer import make_encoder
from bert_pretrain.text.readers import read_texts
from bert_pretrain.text.reasons import describe_reasons, join_reasons
from bert_pretrain.text.sources import resolve
from bert_pretrain.text.text_files import ByteRange
from bert_pretrain.text.tokenizer import MAX_UNK_SHARE, Tokenizer

if TYPE_CHECKING:
    from bert_pretrain.model.sequences import Bert  # imports PyTorch

# A group of texts ends at one of these limits, with the text that reaches it.
GROUP_TEXTS = 8192
GROUP_CHARACTERS = 1 << 21
MAX_WORDS_SHOWN = 3  # unknown words in a warning
_STREAMS = ("/dev/stdout", "/dev/stderr")  # a link would be replaced by a file


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


def is_empty(text: str, tokenizer: Tokenizer) -> bool:
    """Return whether a text has only blanks and characters that BERT's tokenizer removes."""
    # Not "Cn": characters that are unknown to this Python, such as new emoji.
    removed = ("Cc", "Cf", "Co", "Cs", "Mn") if tokenizer.strips_accents else ("Cc", "Cf", "Co", "Cs")
    return all(
        character.isspace() or character == "\ufffd" or unicodedata.category(character).startswith(removed)
        for character in text
    )


class Texts:
    """The non-empty texts of inputs, which are counted and checked on construction."""

    def __init__(
        self,
        inputs: Sequence[str],
        config: DataConfig,
        tokenizer: Tokenizer,
        *,
        skip_empty: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._config = config.model_copy(update={"sentence_splitter": "lines", "document_boundary": "blank_line"})
        self._sources = resolve(inputs, self._config, every_split=True)
        if any(source.format == "txt" for source in self._sources):
            print("texts      each line of .txt is one text")
        self.num_texts = 0
        counts: Counter[str] = Counter()
        for text in progress_bar(self._read(counts), unit=" texts", desc="reading", leave=False):
            if not is_empty(text.text, tokenizer):
                self.num_texts += 1
            elif skip_empty:
                counts["empty_texts_skipped"] += 1
            else:
                raise _empty_error(text)
        if notes := describe_reasons(join_reasons(counts)):  # such as skipped texts and repaired characters
            print(f"found      {', '.join(notes)}")
        if not self.num_texts:
            raise InputError("the inputs have no text", where=", ".join(inputs), remedy="name inputs with text in them")

    @property
    def locations(self) -> list[str]:
        return [source.location for source in self._sources]

    def _read(self, counts: Counter[str]) -> Iterator[Text]:
        for source in self._sources:
            unit = "line" if source.format == "txt" else "record"
            for row, text in enumerate(read_texts(ByteRange(source), self._config, counts), start=1):
                yield Text(text or "", source.location, row, unit)

    def __iter__(self) -> Iterator[Text]:
        """Read the texts again. Raise InputError if their number has changed."""
        number = 0
        for text in self._read(Counter()):
            if not is_empty(text.text, self._tokenizer):
                yield text
                number += 1
        if number != self.num_texts:
            raise InputError(
                f"the inputs had {self.num_texts:,} texts and now have {number:,}",
                where=", ".join(self.locations[:3]),
                remedy="run the command again when the inputs no longer change",
            )


def check_output_file(output: Path | None, locations: Iterable[str], flag: str = "--output") -> None:
    """Raise `OutputError` if the output is a folder or cannot be written, or if an input would be overwritten."""
    if output is None:
        return
    check_writable(output.parent, flag)
    what, remedy = "", "give the name of a file"
    if output.is_dir():
        what = "is a folder"
    elif (output.exists() and not output.is_file()) or str(output) in _STREAMS:
        what = "is not a regular file"
    elif output.resolve() in {Path(location).resolve() for location in set(locations)}:
        what, remedy = "is an input", "name another file"
    if what:
        raise OutputError(f"{output} {what}", where=flag, remedy=remedy)


class TextEncoder:
    """Encodes texts for a model as `[CLS] text [SEP]`, and counts [UNK] and the texts that are too long."""

    def __init__(self, bert: "Bert") -> None:
        self._bert = bert
        self._encoder = make_encoder(bert.tokenizer)
        self._unknown_words = UnknownWords(bert.tokenizer)
        self.num_tokens = 0
        self.num_truncated = 0

    def groups(self, texts: Iterable[Text], too_long: str = "") -> Iterator[tuple[list[Text], Examples]]:
        """Yield groups of texts in order, with their sequences, which are truncated to the model's maximum length.

        With `too_long`, a remedy, raise InputError at the first text that would be truncated.
        """
        for group in _grouped(texts):
            found = self._encoder.encode_texts([text.text for text in group])
            lengths = np.diff(found.offsets)
            for text, length, begin in zip(group, lengths.tolist(), found.offsets.tolist(), strict=False):
                if not length:
                    raise _empty_error(text)
                if too_long:
                    what = f"the text {text.text[:60]!r}"
                    self._bert.check_length(length + 2, what, where=text.where, remedy=too_long)
                self._unknown_words.add(text.text, found.ids[begin : begin + length])
            self.num_truncated += int(np.count_nonzero(lengths + 2 > self._bert.max_length))
            lengths = np.minimum(lengths, self._bert.max_length - 2)
            self.num_tokens += int((lengths + 2).sum())
            yield group, self._with_special_tokens(found.ids[spans(found.offsets[:-1], lengths)], lengths)

    def _with_special_tokens(self, ids: np.ndarray, lengths: np.ndarray) -> Examples:
        tokenizer = self._bert.tokenizer
        offsets = offsets_of(lengths + 2)
        input_ids = np.empty(offsets[-1], dtype=ids.dtype)
        input_ids[offsets[:-1]] = tokenizer.cls_id
        input_ids[spans(offsets[:-1] + 1, lengths)] = ids
        input_ids[offsets[1:] - 1] = tokenizer.sep_id
        return Examples(input_ids, offsets, segment_b_start=lengths + 2)

    def report(self) -> None:
        """Print how many texts were truncated, if any. Warn if too many tokens are [UNK]."""
        if self.num_truncated:
            limit = f"{self._bert.max_length} tokens (default: what the model is trained for; --max-length)"
            print(f"truncated  {self.num_truncated:,} texts longer than {limit}")
        self._unknown_words.warn()


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
        self._num_tokens = 0
        self._num_unknown = 0

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
