"""Reads CoNLL's format: one word and its tag per line, with blank lines between sentences.

`columns_of` decides once per file which fields of a line are the word and its tag: a number may precede the word, other
columns may follow it, and a file may have several columns of tags.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mode

from bert_pretrain.finetune.rows import INPUT, Example, LabelledInput
from bert_pretrain.finetune.settings import Settings

OUTSIDE = "O"
ENTITY_TAG = re.compile(r"O|([BIMESLUW])-(\S.*)")  # of BIO, IOBES, BMES and BILOU
FORMAT = 'lists of equal length: "tokens": ["Anna", "sings"], "tags": ["B-PER", "O"]'
_RANGE = re.compile(r"\d+[-.]\d+")  # in CoNLL-U: a word that is divided into the next ones, or an empty node
_CONLL_U_COLUMNS, _UPOS = 10, 3  # the number of columns, and the index of the tag
MAX_ONE_WORD = 10  # a file with more sentences, all of one word, gets a warning

Line = tuple[int, list[str]]  # its number, from 1, and its fields


@dataclass(frozen=True)
class Columns:
    """The fields of a line, by index."""

    width: int = 1
    word: int = 0
    tag: int = -1  # the last one
    is_counted: bool = False  # the first field is the number of the word in its sentence
    is_bio: bool = False  # all tags are BIO tags

    def tag_of(self, fields: Sequence[str]) -> str | None:
        """Return the tag of a word, or None if the line has none."""
        index = self.tag if self.tag >= 0 else len(fields) - 1
        return fields[index] if self.word < len(fields) > index != self.word else None

    def is_word(self, fields: Sequence[str]) -> bool:
        """Return whether a line is a word, and not a comment or, in CoNLL-U, a range (1-2) or an empty node (1.1).

        A line that starts with `#` is a comment if it has another number of fields than most words, or no BIO tag.
        """
        if self.is_counted:
            return fields[0].isdecimal()
        if not fields[0].startswith("#"):
            return True
        return len(fields) == self.width and (not self.is_bio or is_entity_tag(self.tag_of(fields) or ""))


def is_entity_tag(tag: str) -> bool:
    """Return whether a tag is a BIO tag, or one of a similar scheme."""
    return ENTITY_TAG.fullmatch(tag) is not None


def sentences_of(text: str) -> list[list[Line]]:
    """Return the lines of each sentence, among them comments.

    Fields are separated by tabs, or in a line without tabs by blanks. A word such as 10 000 may have a no-break space.
    """
    sentences: list[list[Line]] = [[]]
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.strip(" \t\r")
        if not line.strip() or line.startswith("-DOCSTART-"):
            sentences.append([])
        else:
            fields = line.split("\t" if "\t" in line else " ")
            sentences[-1].append((number, list(filter(None, fields))))
    return list(filter(None, sentences))


def columns_of(sentences: Sequence[Sequence[Line]], settings: Settings) -> Columns:
    """Decide the columns of a file.

    A first column that counts the words of every sentence is not the word. The tag is the last column, or in CoNLL-U
    the universal part of speech. If the first column has entity tags and the last one has not, the tag precedes the
    word. Of several layers of entities, the first is used. The settings `tokens_field` and `tags_field` may be numbers
    of columns, from 1.
    """
    words = [[fields for _, fields in sentence if not fields[0].startswith("#")] for sentence in sentences]
    rows = [fields for sentence in words for fields in sentence]
    if not rows:
        return Columns()
    width = mode(map(len, rows))
    table = list(zip(*(fields for fields in rows if len(fields) == width), strict=True))
    is_bio = [all(map(is_entity_tag, column)) for column in table]
    kinds = [{tag[2:] for tag in column if tag != OUTSIDE} for column in table]
    may_count = width == _CONLL_U_COLUMNS or (width > 1 and len(rows) > len(words))
    is_counted = may_count and all(map(_counts, words))
    word = int(is_counted)
    tag = _UPOS if is_counted and width == _CONLL_U_COLUMNS else width - 1
    if is_bio[word] and kinds[word] and not is_bio[tag]:
        word, tag = word + 1, word
    while tag - 1 > word and is_bio[tag - 1] and is_bio[tag] and kinds[tag] <= kinds[tag - 1]:
        if 2 * table[tag - 1].count(OUTSIDE) < len(rows):  # phrases, as in CoNLL-2003
            break
        tag -= 1
    if settings.tokens_field.isdecimal():
        word = int(settings.tokens_field) - 1
    if settings.tags_field.isdecimal():
        tag = int(settings.tags_field) - 1
    return Columns(
        width,
        word,
        -1 if tag == width - 1 else tag,
        is_counted,
        tag < width and is_bio[tag],
    )


def _counts(sentence: Sequence[Sequence[str]]) -> bool:
    """Return whether the first fields of a sentence are the numbers of its words, from 0 or 1."""
    numbers = [fields[0] for fields in sentence if not _RANGE.fullmatch(fields[0])]
    first = int(numbers[:1] != ["0"])
    return numbers == [str(number) for number in range(first, first + len(numbers))]


def read_conll(source: LabelledInput, settings: Settings) -> list[Example]:
    """Read the sentences of a file.

    If a word of a sentence has no tag, the sentence is skipped in `--train` and `--validation`. In `--test` and in the
    input of `predict`, it is kept without tags.
    """
    lines = sentences_of(source.read_text())
    columns = columns_of(lines, settings)
    words_only = ([line for line in sentence if columns.is_word(line[1])] for sentence in lines)
    sentences = list(filter(None, words_only))
    if (columns.word, columns.tag) != (0, -1):
        place = f"words in column {columns.word + 1}, tags in column {columns.tag % columns.width + 1}"
        flags = "finetune --tokens-field N --tags-field N"
        print(f"{source.name}: {place} of {columns.width} ({flags} chooses)")
    if len(sentences) > MAX_ONE_WORD and all(len(sentence) == 1 for sentence in sentences):
        hint = "remove the blank lines between the words of a sentence"
        print(f"warning: every sentence of {source.location} has one word\n  hint: {hint}", file=sys.stderr)
    rows: list[Example] = []
    for row_number, sentence in enumerate(sentences):
        row = Example(row_number, f"{source.location}: line {sentence[0][0]}", {})
        row.values[settings.tokens_field] = [fields[min(columns.word, len(fields) - 1)] for _, fields in sentence]
        tags = [columns.tag_of(fields) for _, fields in sentence]
        if None not in tags:
            row.values[settings.tags_field] = tags
        elif source.flag not in (INPUT, "--test"):
            row.where = f"{source.location}: line {sentence[tags.index(None)][0]}"
            source.skip_row(row.unusable("a word has no tag", "write the word, a tab and its tag"))
            continue
        rows.append(row)
    return rows
