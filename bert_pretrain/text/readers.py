"""Readers of records from every format, local or remote, compressed or not.

`read_records` yields the records of JSON, CSV, TSV, Parquet and `datasets`. `read_texts` yields the text of each
record, or the lines of `.txt`. Memory is bounded by the size of a block and the size limit of a record.
"""

import csv
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bert_pretrain.config import MAX_RECORD_BYTES, DataConfig, names_of
from bert_pretrain.errors import InputError
from bert_pretrain.io import files
from bert_pretrain.text import parquet, text_files
from bert_pretrain.text.hub_datasets import cached_dataset, rows_of
from bert_pretrain.text.reasons import FIRST, count_reason
from bert_pretrain.text.sources import Source
from bert_pretrain.text.text_files import ByteRange, Position

Record = tuple[dict[str, Any], Position]
SURPLUS: Any = None  # the key of a row's fields beyond the header, as in `csv.DictReader`
MAX_WITHOUT_FIELD = 1000  # if the first 1000 records have no text field, its name is probably wrong
NON_STRING = "records_whose_text_is_not_a_string"
MAX_NON_STRING = 0.01  # maximum share of the records whose text is a number, list or object
MAX_INVALID_CHARACTERS = 0.01  # per word or token
_ROW_LIKE = "CSV fields with lines that look like rows"
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_records(
    part: ByteRange,
    counts: Counter[str],
    *,
    columns: Sequence[str] = (),
    strict: bool = True,
    max_bytes: int = MAX_RECORD_BYTES,
    header: Sequence[str] = (),
    any_width: bool = False,
) -> Iterator[Record]:
    """Yield each record of a source in any format but `.txt`, with its position.

    At least one of `columns` must exist in a table. Parquet and `datasets` read only these columns, or all by default.
    Invalid UTF-8 is repaired, and a JSON value that is not an object becomes an empty record, unless `strict`. `header`
    names the columns of CSV or TSV without a header row, and
    `any_width` allows rows longer than the header. Records above `max_bytes` raise an InputError, except in `datasets`.
    """
    format_ = part.source.format
    if format_ in ("jsonl", "json"):
        return _read_json(part, counts, strict, max_bytes)
    if format_ in ("csv", "tsv"):
        return _read_csv(
            part,
            counts,
            columns,
            strict,
            max_bytes,
            header,
            any_width,
        )
    if format_ == "parquet":
        return parquet.read_rows(part, columns, max_bytes)
    return dataset_records(part, cached_dataset(part.source.location, part.source.version), columns)


def read_texts(part: ByteRange, config: DataConfig, counts: Counter[str]) -> Iterator[str | None]:
    """Yield each line of `.txt`, or the text of each record: "" for null, None if no text field has a string or null.

    The texts of several fields are joined by blank lines. Values that are not strings are counted and left out. Raises
    InputError if none of the first `MAX_WITHOUT_FIELD` records has a text or, with `config.strict`, at the first record
    without a text.
    """
    limit = config.max_record_bytes
    if part.source.format == "txt":
        for line, _ in text_files.read_lines(part, counts, strict=config.strict, max_line_bytes=limit):
            yield line.removesuffix("\r")
        return
    fields = names_of(config.text_field)
    records = read_records(
        part,
        counts,
        columns=fields,
        strict=config.strict,
        max_bytes=limit,
    )
    for record, position in records if part.start else _with_field(records, fields):
        values = [record[field] for field in fields if field in record]
        texts = [value or "" for value in values if isinstance(value, str | None)]
        others = [type(value).__name__ for value in values if not isinstance(value, str | None)]
        if config.strict and (others or all(value is None for value in values)):
            what = f"the text is {others[0]}, not a string" if others else "the record has no text"
            remedy = "fix or remove it, or choose another data.text_field; without --strict it is skipped and counted"
            raise InputError(what, where=str(position), remedy=remedy)
        if others or not record:
            count_reason(counts, NON_STRING, position.in_range)
        elif not texts:
            counts["records_without_text_field"] += 1
        yield "\n\n".join(filter(None, texts)) if texts else None


def _with_field(records: Iterator[Record], fields: Sequence[str]) -> Iterator[Record]:
    """Yield records. Raise InputError if none of the first records has a string or null in one of the fields."""
    first: list[Record] = []
    for record, position in records:
        first.append((record, position))
        if any(field in record and isinstance(record[field], str | None) for field in fields):
            yield from first
            yield from records
            return
        if len(first) == MAX_WITHOUT_FIELD:
            break
    if first:
        record, position = first[0]
        found = [f"{name} ({type(value).__name__})" for name, value in record.items()]
        names = " or ".join(f"'{field}'" for field in fields)
        what = f"none of the first {len(first):,} records has a string in a field {names}"
        raise text_files.no_field(what, found or [""], str(position))


def check_decoded(counts: Mapping[str, int], words: int, inputs: Sequence[str]) -> None:
    """Raise an InputError if more than `MAX_INVALID_CHARACTERS` characters per word or token could not be decoded."""
    invalid = sum(number for reason, number in counts.items() if reason.startswith("invalid_"))
    if invalid > MAX_INVALID_CHARACTERS * words:
        raise InputError(
            f"{invalid:,} characters could not be decoded; a part of the text is in another encoding",
            where=inputs[0] if len(inputs) == 1 else f"{len(inputs):,} inputs",
            remedy="find it with --strict, and convert it to UTF-8 (iconv) or leave it out",
        )


def check_texts(counts: Mapping[str, int], documents: int) -> None:
    """Raise an InputError if the text of more than `MAX_NON_STRING` of the records is not a string.

    Warn of CSV fields with lines that look like rows, because a quote that is not closed joins rows.
    """
    for reason, number in counts.items():
        if reason.startswith(_ROW_LIKE):
            print(f"warning: {number:,} {reason}\n  hint: close each quote, and double the quotes inside quoted fields")
        if reason.startswith(NON_STRING) and number > MAX_NON_STRING * (documents + number):
            what = f"the text of {number:,} of {documents + number:,} records is not a string"
            remedy = f"fix or remove them (up to {MAX_NON_STRING:.0%} are skipped), or choose another data.text_field"
            raise InputError(what, where=reason.partition(FIRST)[2].removesuffix(")"), remedy=remedy)


def repair_surrogates(value: Any) -> Any:
    """Return a JSON value with question marks for lone surrogates, which JSON allows and UTF-8 does not.

    Without lone surrogates, return `value` itself.
    """
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
        return value
    except UnicodeEncodeError:
        return json.loads(text.encode("utf-8", "replace"))


def _read_json(
    part: ByteRange,
    counts: Counter[str],
    strict: bool,
    max_bytes: int,
) -> Iterator[Record]:
    if part.source.format == "json":
        texts = json_values(text_files.text_blocks(part, counts, strict=strict), part, max_bytes)
    else:
        texts = text_files.read_lines(part, counts, strict=strict, max_line_bytes=max_bytes)
    for text, position in texts:
        if not text or text.isspace():
            counts["blank_lines"] += 1
            continue
        value = parse_json(text, position)
        if _ESCAPED_SURROGATE.search(text):
            repaired = repair_surrogates(value)
            counts["documents_with_lone_surrogates"] += repaired is not value
            value = repaired
        del text  # frees memory: a record can have hundreds of megabytes
        if strict and not isinstance(value, dict):
            raise InputError(
                f"the record is not an object but {type(value).__name__}",
                where=str(position),
                remedy='write an object with a field for the text: {"text": …}',
            )
        yield value if isinstance(value, dict) else {}, position


_BLANKS = re.compile(r"[ \t\r\n]*")
# For each mark in a JSON array: the marks that may follow it, and whether an element may follow it.
_AFTER_MARK = {"[": ("]", True), ",": ("", True), "]": ("", False)}


def json_values(blocks: Iterable[str], part: ByteRange, max_bytes: int) -> Iterator[tuple[str, Position]]:
    """Yield each element of a JSON array, or each of several objects, with its position.

    `blocks` are consecutive pieces of text.
    """
    find_end = json.JSONDecoder(parse_int=float).raw_decode
    rest, marks, is_element, position = "", "[", True, Position(part, "record", 1)
    after_element = ("", True)
    for block in itertools.chain(blocks, [""]):
        text, begin = rest + block, 0
        while (begin := _BLANKS.match(text, begin).end()) < len(text):  # type: ignore[union-attr]
            if (mark := text[begin]) in marks:
                begin, (marks, is_element) = begin + 1, _AFTER_MARK[mark]
                position = position._replace(in_part=position.in_part + (mark == ","))
                after_element = (",]", False)  # an array, rather than objects only
                continue
            if not is_element:
                raise _not_json(f"unexpected {text[begin : begin + 20]!r} in an array", position)
            try:
                end = find_end(text, begin)[1]
            except (ValueError, RecursionError) as error:
                if block:  # the next block may complete the element
                    break
                raise _not_json(getattr(error, "msg", "it is nested too deeply"), position) from error
            if block and end == len(text):  # the next block may continue a number
                break
            yield text[begin:end], position
            begin, (marks, is_element) = end, after_element
            position = position._replace(in_part=position.in_part + is_element)
        rest = text[begin:]
        if len(rest.encode()) > max_bytes:
            raise text_files.record_too_large(max_bytes, position)
    if after_element[0] and (marks or is_element):
        raise _not_json("the array has no end", position)


def parse_json(text: str, where: object) -> Any:
    try:
        return files.parse_json(text)
    except ValueError as error:
        raise _not_json(str(error), where) from error


def _not_json(what: str, where: object) -> InputError:
    return InputError(
        f"it is not JSON: {what}",
        where=str(where),
        remedy="write one object per line, or an array of objects; if the file is cut off, fetch it again",
    )


def _read_csv(
    part: ByteRange,
    counts: Counter[str],
    columns: Sequence[str],
    strict: bool,
    max_bytes: int,
    header: Sequence[str],
    any_width: bool,
) -> Iterator[Record]:
    """Yield the rows of CSV or TSV. The missing fields of a short row are None."""
    lines = text_files.read_lines(part, counts, strict=strict, max_line_bytes=max_bytes)
    if part.source.format == "tsv":  # as registered at IANA and used by GLUE: a quote is an ordinary character
        texts = (line.rstrip("\r").replace("\r", " ") for line, _ in lines)
        reader = csv.reader(texts, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        texts = (text for line, _ in lines for text in io.StringIO(f"{line}\n", newline=""))  # also ends lines at \r
        # Unless the dialect is strict, an unclosed quote joins all following lines.
        reader = csv.reader(texts, delimiter=part.source.delimiter, strict=True)
    csv.field_size_limit(max_bytes)
    position = Position(part, "line", 1)
    try:
        names = list(header) or next(filter(None, reader), [])
        text_files.present_columns(part, columns, names)
        for name in filter(None, columns or names):
            if names.count(name) > 1:
                raise InputError(
                    f"there are two columns '{name}'",
                    where=str(position),
                    remedy="rename one of them",
                )
        position = Position(part, "line", reader.line_num + 1)
        for row in reader:
            surplus = row[len(names) :]
            if surplus and not any_width:  # probably a text with an unquoted delimiter
                raise csv.Error(f"the row has {len(row)} fields, the header {len(names)}")
            if row:
                if _may_join_rows(row, reader.dialect.delimiter, len(names)):
                    count_reason(counts, _ROW_LIKE, str(position))
                record: dict[Any, Any] = dict(itertools.zip_longest(names, row[: len(names)]))
                if surplus:
                    record[SURPLUS] = surplus
                yield record, position
            else:
                counts["blank_lines"] += 1
            position = Position(part, "line", reader.line_num + 1)
    except csv.Error as error:
        if "field larger" in str(error):
            raise text_files.record_too_large(max_bytes, position) from error
        what = f"the record is not {part.source.format.upper()}: {error}"
        remedy = 'fix it; in CSV, put text with commas, quotes or line ends in "quotes", and double the quotes inside'
        raise InputError(what, where=str(position), remedy=remedy) from error


def _may_join_rows(row: Sequence[str], delimiter: str, num_columns: int) -> bool:
    """Return whether the lines inside the longest field look like rows, which a quote that is not closed joins."""
    inner = max(row, key=len).split("\n")[1:-1]
    return len(inner) > 3 and all(line.count(delimiter) == num_columns - 1 > 0 for line in inner)


def num_rows(source: Source) -> int:
    """Return the number of records of a Parquet file or dataset."""
    if source.format == "parquet":
        return parquet.num_rows(source)
    return len(cached_dataset(source.location, source.version))


def dataset_records(part: ByteRange, rows: Any, columns: Sequence[str] = ()) -> Iterator[Record]:
    """Yield the rows of a split of a dataset. Replace the numbers of each `ClassLabel` by class names."""
    if present := text_files.present_columns(part, columns, rows.column_names):
        rows = rows.select_columns(list(present))
    if part.stop is not None:
        rows = rows.select(range(part.start, part.stop))
    numbered = enumerate(rows_of(rows, part.source.location), start=part.start + 1)
    return named_records(((record, Position(part, "row", n)) for n, record in numbered), rows.features)


def named_records(records: Iterable[Record], features: Any) -> Iterator[Record]:
    """Replace the numbers of each `ClassLabel` of `features`, or of each list of them, by class names."""
    labels = {}
    for name, feature in (features or {}).items():
        label = getattr(feature, "feature", feature)
        if hasattr(label, "int2str"):
            labels[name] = label
    for record, position in records:
        for name, label in labels.items():
            record[name] = _class_names(record[name], label)
        yield record, position


class ClassName(str):
    """The name of a class, with its number in a `ClassLabel`."""

    number: int


def _class_names(value: Any, label: Any) -> Any:
    """Return the class name of a number, or a list of them. Negative numbers mean no label and become None."""
    if isinstance(value, list):
        return [_class_names(each, label) for each in value]
    if value is None or value < 0:
        return None
    name = ClassName(label.int2str(value))
    name.number = value
    return name
