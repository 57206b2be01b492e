"""Reads CoNLL's format: one word and its tag per line, with blank lines between sentences.

`columns_of` decides once per file which fields of a line are the word and its tag: a number may precede the word, other
columns may follow it, and a file may have several columns of tags.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mode

from bert_pretrain.errors import InputError
from bert_pretrain.finetune.rows import INPUT, Example, LabelledInput, UnusableRow, read_text
from bert_pretrain.finetune.settings import Settings

OUTSIDE = "O"
ENTITY_TAG = re.compile(r"O|([BIMESLUW])-(\S.*)")  # of BIO, IOBES, BMES and BILOU
FORMAT = 'lists of equal length: "tokens": ["Anna", "sings"], "tags": ["B-PER", "O"]'
_RANGE = re.compile(r"\d+[-.]\d+")  # in CoNLL-U: a word that is divided into the next ones, or an empty node
_CONLL_U_COLUMNS, _UPOS = 10, 3  # the number of columns, and the index of the tag
MAX_ONE_WORD = 10  # a file with more sentences, all of one word, gets a warning


@dataclass(frozen=True)
class Columns:
    """The fields of a line, by index."""

    width: int = 0
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
        if self.is_counted or not fields[0].startswith("#"):
            return fields[0].isdecimal() or not self.is_counted
        return len(fields) == self.width and (not self.is_bio or is_entity_tag(self.tag_of(fields)))


def is_entity_tag(tag: str | None) -> bool:
    """Return whether a tag is a BIO tag, or one of a similar scheme."""
    return tag is not None and ENTITY_TAG.fullmatch(tag) is not None


def sentences_of(lines: Sequence[str], settings: Settings) -> tuple[Columns, list[list[tuple[int, list[str]]]]]:
    """Return the columns, and the numbers (from 1) and the fields of the words of each sentence.

    Fields are separated by tabs, or in a line without tabs by blanks. A word such as 10 000 may have a no-break space.
    """
    sentences: list[list[tuple[int, list[str]]]] = [[]]
    for number, line in enumerate(lines, start=1):
        text = line.strip(" \t\r")
        if not line.strip() or line.startswith("-DOCSTART-"):
            sentences.append([])
        else:
            fields = [field for field in text.split("\t" if "\t" in text else " ") if field]
            sentences[-1].append((number, fields))
    words = ([fields for _, fields in each if not fields[0].startswith("#")] for each in sentences)
    columns = columns_of([each for each in words if each], settings)
    words_only = ([line for line in each if columns.is_word(line[1])] for each in sentences)
    return columns, [each for each in words_only if each]


def columns_of(sentences: Sequence[list[list[str]]], settings: Settings) -> Columns:
    """Decide the columns of a file from the fields of its words, by sentence.

    A first column that counts the words of every sentence, from 0 or 1, is no word. If the next column has BIO tags and
    the last one has not, the tag precedes the word. Of several layers of entities, the first is used. The settings
    `tokens_field` and `tags_field` may be numbers of columns, from 1.
    """
    if not sentences:
        return Columns()
    rows = [fields for sentence in sentences for fields in sentence]
    width = mode(map(len, rows))
    table = [[fields[index] for fields in rows if len(fields) == width] for index in range(width)]
    is_bio = [all(map(is_entity_tag, column)) for column in table]
    kinds = [{tag[2:] for tag in column if tag != OUTSIDE} for column in table]
    may_count = width == _CONLL_U_COLUMNS or (width > 1 and len(rows) > len(sentences))
    is_counted = may_count and all(map(_counts, sentences))
    word = int(is_counted)
    tag = _UPOS if is_counted and width == _CONLL_U_COLUMNS else width - 1
    if is_bio[word] and kinds[word] and not is_bio[tag]:
        word, tag = word + 1, word
    while tag - 1 > word and is_bio[tag - 1] and is_bio[tag] and kinds[tag] <= kinds[tag - 1]:
        if 2 * table[tag - 1].count(OUTSIDE) < len(rows):  # phrases, as in CoNLL-2003
            break
        tag -= 1
    chosen = ((settings.tokens_field, word), (settings.tags_field, tag))
    word, tag = (int(name) - 1 if name.isdecimal() else index for name, index in chosen)
    return Columns(width, word, -1 if tag == width - 1 else tag, is_counted, tag < width and is_bio[tag])


def _counts(sentence: list[list[str]]) -> bool:
    """Return whether the first fields of a sentence are the numbers of its words, from 0 or 1."""
    numbers = [fields[0] for fields in sentence if not _RANGE.fullmatch(fields[0])]
    first = int(numbers[:1] != ["0"])
    return numbers == [str(number) for number in range(first, first + len(numbers))]


def read_conll(source: LabelledInput, settings: Settings) -> list[Example]:
    """Read the sentences of a file.

    If a word of a sentence has no tag, the sentence is skipped in `--train` and `--validation`. In `--test` and in the
    input of `predict`, it is kept without tags. Raises InputError if a line seems to be a whole sentence.
    """
    if source.columns:
        what, remedy = "--columns is not for files with one word and its tag per line", "remove it"
        raise InputError(what, where="--columns", remedy=remedy)
    columns, sentences = sentences_of(read_text(source).split("\n"), settings)
    if (columns.word, columns.tag) != (0, -1):
        place = f"words in column {columns.word + 1}, tags in column {columns.tag % columns.width + 1}"
        flags = "finetune --tokens-field N --tags-field N"
        print(f"{source.flag} {source.location}: {place} of {columns.width} ({flags} chooses)")
    elif source.flag != INPUT and sentences:
        number, fields = sentences[0][0]
        if len(fields) > 4 and (not is_entity_tag(fields[-1]) or all(map(is_entity_tag, fields))):
            what = "the line is a whole sentence; two parallel files of words and tags (MSRA) are not supported"
            where, remedy = f"{source.location}: line {number}", f"convert the files to JSONL with {FORMAT}"
            raise InputError(what, where=where, remedy=remedy)
    if len(sentences) > MAX_ONE_WORD and all(len(sentence) == 1 for sentence in sentences):
        hint = "remove the blank lines between the words of a sentence"
        print(f"warning: every sentence of {source.location} has one word\n  hint: {hint}", file=sys.stderr)
    rows: list[Example] = []
    for row_number, sentence in enumerate(sentences):
        tags = [columns.tag_of(fields) for _, fields in sentence]
        words = [fields[min(columns.word, len(fields) - 1)] for _, fields in sentence]
        values: dict[str, object] = {settings.tokens_field: words}
        if None not in tags:
            values[settings.tags_field] = tags
        elif source.flag not in (INPUT, "--test"):
            where = f"{source.location}: line {sentence[tags.index(None)][0]}"
            remedy = f"write the word, a tab and its tag; or convert the file to JSONL with {FORMAT}"
            source.skip_row(UnusableRow("a word has no tag", where=where, remedy=remedy))
            continue
        rows.append(Example(row_number, f"{source.location}: line {sentence[0][0]}", values))
    return rows
