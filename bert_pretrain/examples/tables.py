"""Examples as Arrow tables, with the columns that shards hold, and back, checked."""

from typing import Any

import numpy as np
import pyarrow as pa

from bert_pretrain.examples.examples import Examples, Masks
from bert_pretrain.text import ragged

_IDS = (pa.list_(pa.uint16()), pa.list_(pa.uint32()))
_TYPES: dict[str, tuple[pa.DataType, ...]] = {
    "input_ids": _IDS,
    "segment_b_start": (pa.uint16(),),
    "masked_lm_positions": (pa.list_(pa.uint16()),),
    "masked_lm_ids": _IDS,
    "next_sentence_label": (pa.uint8(),),
    "word_starts": (pa.list_(pa.uint16()),),
}
"""Of the columns in Parquet."""


def to_table(examples: Examples) -> pa.Table:
    """Return the columns as in Parquet; those that an objective does not need are absent."""
    columns = {
        "input_ids": _list_array(examples.input_ids, examples.offsets),
        "segment_b_start": _array(examples.segment_b_start.astype(np.uint16)),
    }
    if examples.masks is not None:
        columns["masked_lm_positions"] = _list_array(examples.masks.positions, examples.masks.offsets)
        columns["masked_lm_ids"] = _list_array(examples.masks.original_ids, examples.masks.offsets)
    if examples.next_sentence_label is not None:
        columns["next_sentence_label"] = _array(examples.next_sentence_label.astype(np.uint8))
    if examples.starts_word is not None:
        positions = ragged.positions_within(examples.offsets)[examples.starts_word]
        before = np.concatenate([[0], np.cumsum(examples.starts_word, dtype=np.int64)])  # words before each token
        columns["word_starts"] = _list_array(positions.astype(np.uint16), before[examples.offsets])
    return pa.Table.from_arrays(list(columns.values()), names=list(columns))


def from_table(table: pa.Table) -> Examples:
    """Return the examples of a table; ValueError where columns are missing, of other types, or disagree in lengths."""
    _check_schema(table)
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    input_ids, offsets = _flat(columns["input_ids"])
    masks = starts_word = None
    if "masked_lm_positions" in columns:
        positions, masked_offsets = _flat(columns["masked_lm_positions"])
        original_ids, original_offsets = _flat(columns["masked_lm_ids"])
        if not np.array_equal(masked_offsets, original_offsets):
            raise ValueError("masked_lm_positions and masked_lm_ids have different lengths")
        _check_within(positions, masked_offsets, offsets)
        masks = Masks(positions, original_ids, masked_offsets)
    if "word_starts" in columns:
        word_starts, word_offsets = _flat(columns["word_starts"])
        _check_within(word_starts, word_offsets, offsets)
        starts_word = np.zeros(len(input_ids), dtype=bool)
        starts_word[np.repeat(offsets[:-1], np.diff(word_offsets)) + word_starts] = True
    labels = columns.get("next_sentence_label")
    return Examples(
        input_ids=input_ids,
        offsets=offsets,
        segment_b_start=columns["segment_b_start"].to_numpy(),
        masks=masks,
        next_sentence_label=None if labels is None else labels.to_numpy(),
        starts_word=starts_word,
    )


def _check_schema(table: pa.Table) -> None:
    found = {field.name: field.type for field in table.schema}
    if missing := {"input_ids", "segment_b_start"} - set(found):
        raise ValueError(f"there is no column {min(missing)}")
    if ("masked_lm_positions" in found) != ("masked_lm_ids" in found):
        raise ValueError("masked_lm_positions and masked_lm_ids belong together")
    for name, types in _TYPES.items():
        if name in found and (found[name] not in types or table.column(name).null_count):
            raise ValueError(f"the column {name} is {found[name]}, or has nulls")
        if name in found and pa.types.is_list(found[name]) and table.column(name).combine_chunks().flatten().null_count:
            raise ValueError(f"the column {name} has nulls")


def _check_within(positions: np.ndarray, offsets: np.ndarray, of_examples: np.ndarray) -> None:
    if (positions >= np.repeat(np.diff(of_examples), np.diff(offsets))).any():
        raise ValueError("a position is beyond its example")


def _list_array(values: np.ndarray, offsets: np.ndarray) -> pa.Array:
    flat = _array(values)
    begins = pa.py_buffer(offsets.astype(np.int32))
    return pa.Array.from_buffers(pa.list_(flat.type), len(offsets) - 1, [None, begins], children=[flat])


def _array(values: np.ndarray) -> pa.Array:
    """Return an array as Arrow's; `pa.array` would import pandas, which takes longer than many a shard."""
    buffer = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, buffer])


def _flat(column: Any) -> tuple[np.ndarray, np.ndarray]:
    values = column.flatten().to_numpy()
    return values, ragged.offsets_of(np.diff(column.offsets.to_numpy()))
