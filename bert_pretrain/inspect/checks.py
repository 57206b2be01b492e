"""Check a data folder: each shard against the manifest, each example against the configuration.

Checks are array operations. Rows with impossible lengths, positions or ids skip the checks of their text.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

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
    folder: Path, split: str, tokenizer: Tokenizer, config: DataConfig, shard: tuple[ShardRecord, int]
) -> ShardReport:
    """Read, check and count a shard, given as its record and the row number of its first example in the split."""
    record, first_row = shard
    try:
        examples = read_shard(folder, record)
    except DataError as error:
        return ShardReport({"shards": f"{error.what} ({error.remedy})"})
    stores_masks = config.masking == "static" or split == "validation"
    expected = (config.next_sentence != "none", stores_masks, config.segments_words and not stores_masks)
    columns = (examples.next_sentence_label, examples.masks, examples.starts_word)
    if expected != tuple(column is not None for column in columns):
        return ShardReport({"shards": f"{record.path} has a missing or an extra column"})
    bad_rows = _check_layout(examples, tokenizer, config)
    rows = np.setdiff1d(np.arange(len(examples)), np.concatenate([*bad_rows.values()]))
    readable = examples if len(rows) == len(examples) else examples.take(rows)
    if len(rows):
        bad_rows |= {name: rows[bad] for name, bad in _check_text(readable, tokenizer, config).items()}
    failures = dict.fromkeys(("shards", *bad_rows), "")
    for name, bad in bad_rows.items():
        if len(bad):
            count = "1 example" if len(bad) == 1 else f"{len(bad):,} examples, the first"
            failures[name] = f"{record.path}: {count} in row {bad[0]} ({split} row {first_row + bad[0]})"
    if examples.next_sentence_label is not None and not failures["labels"]:
        zeros = int((examples.next_sentence_label == 0).sum())
        if abs(2 * zeros - len(examples)) > 1:
            failures["labels"] = f"{record.path}: {zeros:,} of {len(examples):,} examples have label 0"
    return ShardReport(failures, summary.measure(readable, tokenizer), int(examples.lengths.max(initial=0)))


def _check_layout(examples: Examples, tokenizer: Tokenizer, config: DataConfig) -> dict[str, np.ndarray]:
    """Return, for each check, the rows with impossible lengths, positions, ids or labels, in ascending order."""
    lengths, b_start = examples.lengths, examples.segment_b_start.astype(np.int64)
    has_pairs, masks, labels = config.next_sentence != "none", examples.masks, examples.next_sentence_label
    is_divided = (b_start >= 3) & (b_start <= lengths - 2) if has_pairs else b_start == lengths
    row_of_token = np.repeat(np.arange(len(examples)), lengths)
    bad_rows = {
        "lengths": np.flatnonzero((lengths > config.max_seq_length) | (lengths < (5 if has_pairs else 3))),
        "segments": np.flatnonzero(~is_divided),
        "token ids": np.unique(row_of_token[examples.input_ids >= tokenizer.vocab_size]),
    }
    if labels is not None:
        bad_rows["labels"] = np.flatnonzero(labels > 1)
    if masks is not None:
        row_of_mask = np.repeat(np.arange(len(examples)), np.diff(masks.offsets))
        positions = masks.positions.astype(np.int64)
        outside = (positions < 1) | (positions >= lengths[row_of_mask] - 1) | (positions == b_start[row_of_mask] - 1)
        outside[1:] |= (np.diff(positions) <= 0) & (np.diff(row_of_mask) == 0)
        bad_rows["masked positions"] = np.unique(row_of_mask[outside])
        may_be_text = np.append(~tokenizer.is_reserved_id, False)  # the last entry is for ids beyond the vocabulary
        may_be_text[tokenizer.unk_id] = True
        is_wrong = ~may_be_text[np.minimum(masks.original_ids, tokenizer.vocab_size)]
        bad_rows["token ids"] = np.union1d(bad_rows["token ids"], row_of_mask[is_wrong])
    return bad_rows


def _check_text(examples: Examples, tokenizer: Tokenizer, config: DataConfig) -> dict[str, np.ndarray]:
    """Return the rows that fail the checks of special tokens and of predictions. `examples` must not be empty."""
    ids, originals, first = examples.input_ids, examples.original_ids, examples.offsets[:-1]
    has_pairs = config.next_sentence != "none"
    # Without pairs, a [SEP] may be anywhere, as it ends a document.
    is_text = np.ones(len(ids), dtype=bool) if has_pairs else originals != tokenizer.sep_id
    is_text[first] = is_text[examples.offsets[1:] - 1] = False
    if has_pairs:
        is_text[first + examples.segment_b_start - 1] = False
    is_wrong = ~is_text & (ids != tokenizer.sep_id)
    is_wrong[1:] |= ~is_text[1:] & ~is_text[:-1]  # a segment without text
    is_wrong[first] = ids[first] != tokenizer.cls_id
    # [UNK] may be in the text but is never a replacement. [MASK] may only be at predicted tokens.
    may_be_shown = (ids == tokenizer.unk_id) & (originals == tokenizer.unk_id)
    may_be_shown[examples.masked_indices] |= ids[examples.masked_indices] == tokenizer.mask_id
    is_wrong |= is_text & tokenizer.is_reserved_id[ids] & ~may_be_shown
    bad_rows = {"special tokens": np.unique(np.repeat(np.arange(len(examples)), examples.lengths)[is_wrong])}
    if examples.masks is not None:
        counts = np.diff(examples.masks.offsets)
        expected = num_to_mask(np.add.reduceat(is_text, first, dtype=np.int64), config)
        is_miscounted = (counts < 1) | (counts > expected) if config.whole_word_mask else counts != expected
        bad_rows["predictions"] = np.flatnonzero(is_miscounted)
    return bad_rows
