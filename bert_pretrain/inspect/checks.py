"""Check a data folder: each shard against the manifest, each example against the configuration.

Checks are array operations. Rows with impossible lengths, positions or ids skip the checks of their text.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from bert_pretrain import ragged
from bert_pretrain.config import DataConfig
from bert_pretrain.errors import DataError
from bert_pretrain.examples.examples import Examples
from bert_pretrain.examples.masking import num_to_mask
from bert_pretrain.examples.shards import ShardRecord, read_shard
from bert_pretrain.make_data import summary
from bert_pretrain.text.tokenizer import Tokenizer

CHECKS = {
    "shards": "SHA-256, rows and tokens match the manifest, columns match the configuration",
    "lengths": "at most max_seq_length tokens, and at least one token of text per segment",
    "segments": "segment_b_start leaves text in A and B; without pairs, it equals the length",
    "labels": "0 or 1, and half of each in every shard, to within one example",
    "token ids": "all in the vocabulary; every masked_lm_id is a WordPiece token or [UNK]",
    "masked positions": "ascending, inside the example, never on [CLS] or [SEP]",
    "special tokens": "[CLS] first, [SEP] after each segment, [MASK] only where predicted; no other special token "
    "except [UNK], and no unused slot",
    "predictions": "masked_lm_prob of the text, at least 1, at most max_predictions_per_seq; fewer for whole words",
}


class ShardReport(NamedTuple):
    """Results of the checks of a shard."""

    failures: dict[str, str]  # check -> message; empty if it passed; checks that do not apply are missing
    statistics: dict[str, int] | None = None  # of the readable rows; None if the shard cannot be used
    longest: int = 0  # tokens


def check_shard(
    folder: Path,
    split: str,
    tokenizer: Tokenizer,
    config: DataConfig,
    shard: tuple[ShardRecord, int],
) -> ShardReport:
    """Read, check and count a shard, given as its record and the row number of its first example in the split."""
    record, first_row = shard
    try:
        examples = read_shard(folder, record)
    except DataError as error:
        return ShardReport({"shards": f"{error.what} ({error.remedy})"})
    if not _has_columns(examples, tokenizer, split, config):
        return ShardReport({"shards": f"{record.path} has a missing or an extra column"})
    bad_rows = _check_layout(examples, tokenizer, config)
    is_readable = ~np.logical_or.reduce(list(bad_rows.values()))
    readable = examples.take(np.flatnonzero(is_readable))
    for name, is_bad in _check_text(readable, tokenizer, config).items():
        bad_rows[name] = np.zeros(len(examples), dtype=bool)
        bad_rows[name][is_readable] = is_bad
    failures = {"shards": ""}
    for name, is_bad in bad_rows.items():
        failures[name] = ""
        if is_bad.any():
            first = f"first {split} row {first_row + is_bad.argmax()}"
            failures[name] = f"{record.path}: {is_bad.sum():,} of the examples, {first}"
    labels = examples.next_sentence_label
    if labels is not None and not failures["labels"]:
        zeros = int((labels == 0).sum())
        if abs(2 * zeros - len(labels)) > 1:
            failures["labels"] = f"{record.path}: {zeros:,} of {len(labels):,} examples have label 0"
    return ShardReport(failures, summary.measure(readable, tokenizer), int(examples.lengths.max(initial=0)))


def _has_columns(
    examples: Examples,
    tokenizer: Tokenizer,
    split: str,
    config: DataConfig,
) -> bool:
    """Return whether a shard has the columns of its configuration, and no others."""
    has_masks = config.masking == "static" or split == "validation"
    has_words = tokenizer.stores_words(config) and not has_masks
    return (
        (examples.next_sentence_label is not None) == (config.next_sentence != "none")
        and (examples.masks is not None) == has_masks
        and (examples.starts_word is not None) == has_words
    )


def _check_layout(examples: Examples, tokenizer: Tokenizer, config: DataConfig) -> dict[str, np.ndarray]:
    """Return for each check which rows have impossible lengths, positions, ids or labels, (rows,) bool."""
    lengths = examples.lengths
    b_start = examples.segment_b_start.astype(np.int64)
    shortest = 5
    is_divided = (b_start >= 3) & (b_start <= lengths - 2)
    if config.next_sentence == "none":
        shortest = 3
        is_divided = b_start == lengths
    bad_rows = {
        "lengths": (lengths < shortest) | (lengths > config.max_seq_length),
        "segments": ~is_divided,
        "token ids": _rows_with(examples.input_ids >= tokenizer.vocab_size, examples.offsets),
    }
    if examples.next_sentence_label is not None:
        bad_rows["labels"] = examples.next_sentence_label > 1
    masks = examples.masks
    if masks is not None:
        row = ragged.lists_of(masks.offsets)  # of each predicted token
        positions = masks.positions.astype(np.int64)
        is_special = (positions == 0) | (positions == b_start[row] - 1) | (positions >= lengths[row] - 1)
        is_special[1:] |= (np.diff(positions) <= 0) & (np.diff(row) == 0)  # not ascending
        bad_rows["masked positions"] = _rows_with(is_special, masks.offsets)
        may_be_text = np.append(~tokenizer.is_reserved_id, False)  # the last entry is for ids beyond the vocabulary
        may_be_text[tokenizer.unk_id] = True
        is_text = may_be_text[np.minimum(masks.original_ids, tokenizer.vocab_size)]
        bad_rows["token ids"] |= _rows_with(~is_text, masks.offsets)
    return bad_rows


def _check_text(examples: Examples, tokenizer: Tokenizer, config: DataConfig) -> dict[str, np.ndarray]:
    """Return which rows fail the checks of special tokens and of predictions, (rows,) bool."""
    ids = examples.input_ids
    originals = examples.original_ids
    first = examples.offsets[:-1]
    if config.next_sentence == "none":  # a [SEP] may be anywhere, as it ends a document
        is_text = originals != tokenizer.sep_id
    else:
        is_text = np.ones(len(ids), dtype=bool)
        is_text[first + examples.segment_b_start - 1] = False
    is_text[first] = False
    is_text[examples.offsets[1:] - 1] = False
    is_wrong = ~is_text & (ids != tokenizer.sep_id)
    is_wrong[1:] |= ~is_text[1:] & ~is_text[:-1]  # a segment without text
    is_wrong[first] = ids[first] != tokenizer.cls_id
    # [UNK] may be in the text but is never a replacement. [MASK] may only be at predicted tokens.
    may_be_shown = (ids == tokenizer.unk_id) & (originals == tokenizer.unk_id)
    predicted = examples.masked_indices
    may_be_shown[predicted] |= ids[predicted] == tokenizer.mask_id
    is_wrong |= is_text & tokenizer.is_reserved_id[ids] & ~may_be_shown
    bad_rows = {"special tokens": _rows_with(is_wrong, examples.offsets)}
    if examples.masks is not None:
        counts = np.diff(examples.masks.offsets)
        expected = num_to_mask(_num_in_rows(is_text, examples.offsets), config)
        shortest = 1 if config.whole_word_mask else expected
        bad_rows["predictions"] = (counts < shortest) | (counts > expected)
    return bad_rows


def _num_in_rows(is_counted: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the number of counted tokens of each row."""
    return np.bincount(ragged.lists_of(offsets)[is_counted], minlength=len(offsets) - 1)


def _rows_with(is_bad: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return which rows have a bad token."""
    return _num_in_rows(is_bad, offsets) > 0
