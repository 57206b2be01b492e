"""What the shards of a data folder hold, counted again: figures, histograms, and the rows that break a rule.

Input: a data folder. Output: a `Survey` of each split, the sum of those of its shards. One shard a process is in memory
at a time, and is worked on in whole arrays. A row whose layout is broken is counted as such; its tokens are not judged.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bert_pretrain.config import DataConfig
from bert_pretrain.errors import DataError
from bert_pretrain.examples import Examples, Masks
from bert_pretrain.executor import run_each
from bert_pretrain.make_data import summary
from bert_pretrain.masking import MaskingRule, masking_rule, num_to_mask
from bert_pretrain.places import Place
from bert_pretrain.shards import DataFolder, ShardRecord, read_shard
from bert_pretrain.tokenizer import Tokenizer, is_reserved

NUM_SLICES = 10  # of an example, to see whether masks are spread over it evenly


@dataclass(frozen=True)
class Promise:
    """What configuration and vocabulary say of every example."""

    config: DataConfig
    tokenizer: Tokenizer
    rule: MaskingRule
    is_reserved: np.ndarray
    """Whether an id is special or unused, (vocab_size,) bool."""

    @property
    def has_pairs(self) -> bool:
        """Whether an example is `[CLS] A [SEP] B [SEP]`, rather than text with a [SEP] after each document."""
        return self.config.next_sentence != "none"

    def is_masked(self, split: str) -> bool:
        """Whether the examples of a split hold their masks, rather than get them when a batch is made."""
        return self.config.masking == "static" or split == "validation"

    def shows_words(self, split: str) -> bool:
        """Whether they say where words begin: where masks are still to be drawn over the words of a segmenter."""
        return self.config.word_segmenter is not None and not self.is_masked(split)


@dataclass
class Fault:
    """How many examples break a rule, and the row of the first within its split."""

    examples: int = 0
    first_row: int | None = None


@dataclass
class Survey:
    """What was counted in some shards of a split."""

    shards: int = 0
    damaged: dict[str, str] = field(default_factory=dict)
    """What is wrong with each shard that cannot be used, by its path."""
    results: list[dict[str, Any]] = field(default_factory=list)
    """One a shard, as `summary.join_split` takes them."""
    faults: dict[str, Fault] = field(default_factory=dict)
    longest: int = 0
    label_imbalance: int = 0
    """The largest difference between the numbers of labels 0 and 1 in a shard."""
    promised_predictions: int = 0
    """What the numbers of masked tokens add up to if each is as many as the configuration allows."""
    made_predictions: int = 0
    """What they do add up to, in the same examples."""
    predictions: np.ndarray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    """How many examples have 0, 1, 2 … masked tokens."""
    slices: np.ndarray = field(default_factory=lambda: np.zeros(NUM_SLICES, dtype=np.int64))
    """Masked tokens in each tenth of their examples' text."""
    expected_slices: np.ndarray = field(default_factory=lambda: np.zeros(NUM_SLICES))
    """The same, were every token of an example as likely to be masked."""
    text_slices: np.ndarray = field(default_factory=lambda: np.zeros(NUM_SLICES, dtype=np.int64))
    """All tokens of text in each tenth."""

    def add(self, other: "Survey") -> None:
        """Take up what was counted in later shards of the same split."""
        self.shards += other.shards
        self.damaged |= other.damaged
        self.results += other.results
        for name, fault in other.faults.items():
            mine = self.faults.setdefault(name, Fault())
            mine.examples += fault.examples
            mine.first_row = fault.first_row if mine.first_row is None else mine.first_row
        self.longest = max(self.longest, other.longest)
        self.label_imbalance = max(self.label_imbalance, other.label_imbalance)
        self.promised_predictions += other.promised_predictions
        self.made_predictions += other.made_predictions
        longer, shorter = sorted((self.predictions, other.predictions), key=len, reverse=True)
        self.predictions = longer + np.pad(shorter, (0, len(longer) - len(shorter)))
        self.slices = self.slices + other.slices
        self.expected_slices = self.expected_slices + other.expected_slices
        self.text_slices = self.text_slices + other.text_slices

    @property
    def sums(self) -> Counter[str]:
        """The counts of `summary.measure`, over all shards."""
        sums: Counter[str] = Counter()
        for result in self.results:
            sums.update({name: value for name, value in result["statistics"].items() if isinstance(value, int)})
        return sums


@dataclass(frozen=True)
class _Task:
    folder: Place
    split: str
    record: ShardRecord
    first_row: int
    config: DataConfig


def survey_split(
    folder: DataFolder, split: str, config: DataConfig, *, shards: Sequence[int] | None = None, workers: int = 1
) -> Survey:
    """Read the shards of a split, or the chosen ones, check their SHA-256, and count what they hold."""
    records = folder.shards(split)
    first_rows = np.cumsum([0, *(record.rows for record in records)]).tolist()
    chosen = range(len(records)) if shards is None else shards
    tasks = [_Task(folder.path, split, records[number], first_rows[number], config) for number in chosen]
    total = Survey()
    if len(tasks) == 1:
        total.add(_survey_shard(tasks[0]))  # not worth a progress bar
        return total
    for survey in run_each(_survey_shard, tasks, workers=workers, description=f"read {split}", unit="shard"):
        total.add(survey)
    return total


def _survey_shard(task: _Task) -> Survey:
    survey = Survey(shards=1)
    try:
        examples = read_shard(task.folder, task.record)
    except DataError as error:
        survey.damaged[task.record.path] = f"{error.what} ({error.remedy})"
    except (KeyError, TypeError, pa.ArrowException) as error:
        survey.damaged[task.record.path] = f"the shard {task.record.path} does not hold examples: {error}"
    else:
        count(examples, _promise(task.folder, task.config), survey, task.first_row, task.split)
        survey.results[-1]["record"] = task.record.as_json()
    return survey


@lru_cache(maxsize=1)
def _promise(folder: Path, config: DataConfig) -> Promise:
    return promise(Tokenizer.load(folder / "tokenizer", "DATA_DIR"), config)


def promise(tokenizer: Tokenizer, config: DataConfig) -> Promise:
    """Return what examples made with this tokenizer and configuration keep to."""
    reserved = np.array([is_reserved(token) for token in tokenizer.tokens])
    return Promise(config, tokenizer, masking_rule(tokenizer, config), reserved)


def count(examples: Examples, promise: Promise, survey: Survey, first_row: int, split: str) -> None:
    """Count what a shard holds into `survey`; `first_row` is the row within the split at which it begins."""
    survey.longest = int(examples.lengths.max(initial=0))
    faults = layout_faults(examples, promise, split)
    broken = np.unique(np.concatenate([*faults.values()]))
    rows = np.setdiff1d(np.arange(len(examples)), broken)
    sound = examples.take(rows) if len(broken) else examples
    # Figures can be taken of all rows but those whose masks lie outside.
    outside = faults.get("masked positions", np.zeros(0, dtype=np.int64))
    counted = examples.take(np.setdiff1d(np.arange(len(examples)), outside)) if len(outside) else examples
    statistics = summary.measure(counted, promise.tokenizer, promise.config.max_seq_length)
    survey.results.append({"statistics": statistics, "drops": {}})
    if "label_0" in statistics:
        survey.label_imbalance = abs(2 * statistics["label_0"] - len(counted))
    content = count_content(sound, promise, survey) if len(sound) else {}
    for name, found in (faults | {name: rows[found] for name, found in content.items()}).items():
        survey.faults[name] = Fault(len(found), first_row + int(found[0]) if len(found) else None)


def count_content(sound: Examples, promise: Promise, survey: Survey) -> dict[str, np.ndarray]:
    """Count the tokens and masks of examples whose layout is sound; returns the rows at fault, ascending, by rule."""
    originals = original_ids(sound)
    is_text = places_of_text(sound, originals, promise)
    masks = sound.masks
    faults = token_faults(sound, originals, promise, is_text)
    if sound.starts_word is not None:
        faults["word starts"] = word_start_faults(sound, sound.starts_word, promise, is_text)
    if masks is None:
        return faults
    maskable = np.add.reduceat(is_text, sound.offsets[:-1], dtype=np.int64)
    promised = num_to_mask(maskable, promise.rule)
    faults |= mask_faults(sound, masks, promise, promised)
    if promise.rule.whole_word:
        faults |= word_faults(sound, masks, originals, promise, is_text, promised)
    survey.promised_predictions, survey.made_predictions = int(promised.sum()), len(masks.positions)
    survey.predictions = np.bincount(np.diff(masks.offsets), minlength=1)
    survey.slices, survey.expected_slices, survey.text_slices = slices_of_masks(masks, is_text, sound.offsets, maskable)
    return faults


def layout_faults(examples: Examples, promise: Promise, split: str) -> dict[str, np.ndarray]:
    """Return the rows whose columns, lengths, positions, ids or labels are not what they can be, ascending, by rule."""
    lengths, b_start = examples.lengths, examples.segment_b_start.astype(np.int64)
    rows, none = np.arange(len(examples)), np.zeros(0, dtype=np.int64)
    masks, labels, vocab_size = examples.masks, examples.next_sentence_label, promise.tokenizer.vocab_size
    present = (labels is not None, masks is not None, examples.starts_word is not None)
    expected = (promise.has_pairs, promise.is_masked(split), promise.shows_words(split))
    faults = {"columns": none if present == expected else rows}
    unknown = [_rows_of(np.flatnonzero(examples.input_ids >= vocab_size), examples.offsets)]
    if masks is not None:
        row_of_mask = np.repeat(rows, np.diff(masks.offsets))
        positions = masks.positions.astype(np.int64)
        outside = (positions < 1) | (positions >= lengths[row_of_mask] - 1) | (positions == b_start[row_of_mask] - 1)
        outside[1:] |= (np.diff(positions) <= 0) & (np.diff(row_of_mask) == 0)
        faults["masked positions"] = np.unique(row_of_mask[outside])
        unknown.append(row_of_mask[masks.original_ids >= vocab_size])
    if labels is not None:
        faults["label"] = np.flatnonzero(labels > 1)
    shortest = 5 if promise.has_pairs else 3
    is_divided = (b_start >= 3) & (b_start <= lengths - 2) if promise.has_pairs else b_start == lengths
    return {
        **faults,
        "length": np.flatnonzero((lengths > promise.config.max_seq_length) | (lengths < shortest)),
        "segments": np.flatnonzero(~is_divided),
        "token ids": np.unique(np.concatenate(unknown)),
    }


def original_ids(examples: Examples) -> np.ndarray:
    """Return the ids before masking, (tokens,)."""
    if examples.masks is None:
        return examples.input_ids
    ids = examples.input_ids.copy()
    ids[flat_places(examples, examples.masks)] = examples.masks.original_ids
    return ids


def places_of_text(examples: Examples, originals: np.ndarray, promise: Promise) -> np.ndarray:
    """Return which tokens stand where text does, rather than the [CLS] and [SEP] of the layout, (tokens,) bool.

    Without pairs, a [SEP] may stand anywhere: a document ends there.
    """
    is_text = np.ones(len(originals), dtype=bool) if promise.has_pairs else originals != promise.tokenizer.sep_id
    is_text[examples.offsets[:-1]] = is_text[examples.offsets[1:] - 1] = False
    if promise.has_pairs:
        is_text[examples.offsets[:-1] + examples.segment_b_start - 1] = False
    return is_text


def token_faults(
    examples: Examples, originals: np.ndarray, promise: Promise, is_text: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the rows in which a special or unused token stands among text, or [CLS] or [SEP] is missing."""
    ids, first = examples.input_ids, examples.offsets[:-1]
    expected = np.where(is_text, ids, promise.tokenizer.sep_id)
    expected[first] = promise.tokenizer.cls_id
    is_wrong = ids != expected
    is_wrong[1:] |= ~is_text[1:] & ~is_text[:-1]  # a segment without text
    is_wrong[first] = ids[first] != promise.tokenizer.cls_id
    is_predicted = np.zeros(len(ids), dtype=bool)
    if examples.masks is not None:
        is_predicted[flat_places(examples, examples.masks)] = True
    is_wrong |= is_text & ~is_predicted & ~may_be_text(promise)[originals]
    return {"special tokens": np.unique(_rows_of(np.flatnonzero(is_wrong), examples.offsets))}


def word_start_faults(examples: Examples, starts_word: np.ndarray, promise: Promise, is_text: np.ndarray) -> np.ndarray:
    """Return the rows in which a segment's first token begins no word, or something that can begin none does."""
    begins_segment = is_text & np.append(True, ~is_text[:-1])
    is_wrong = begins_segment & ~starts_word
    is_wrong |= starts_word & (~is_text | (promise.rule.is_subword[examples.input_ids] & ~begins_segment))
    return np.unique(_rows_of(np.flatnonzero(is_wrong), examples.offsets))


def mask_faults(examples: Examples, masks: Masks, promise: Promise, promised: np.ndarray) -> dict[str, np.ndarray]:
    """Return the rows in which another number of tokens, or another kind, is predicted or put in than promised."""
    counts = np.diff(masks.offsets)
    is_miscounted = (counts < 1) | (counts > promised) if promise.rule.whole_word else counts != promised
    row_of_mask = np.repeat(np.arange(len(examples)), counts)
    shown = examples.input_ids[flat_places(examples, masks)]
    is_random = (shown != promise.tokenizer.mask_id) & (shown != masks.original_ids)
    return {
        "predictions": np.flatnonzero(is_miscounted),
        "masked tokens": np.unique(row_of_mask[~may_be_text(promise)[masks.original_ids]]),
        "random replacements": np.unique(row_of_mask[is_random & promise.is_reserved[shown]]),
    }


def word_faults(
    examples: Examples,
    masks: Masks,
    originals: np.ndarray,
    promise: Promise,
    is_text: np.ndarray,
    promised: np.ndarray,
) -> dict[str, np.ndarray]:
    """Return the rows in which a word is predicted in part, or was left out although it fitted.

    Where not even the shortest word fits into the number of tokens to predict, one token of a word is. The words of a
    segmenter, which finished examples do not show, are made of the words seen here: these are not predicted in part
    either, but may be left out.
    """
    begins = ~promise.rule.is_subword[originals] | ~is_text
    begins[1:] |= ~is_text[:-1]  # a segment may begin inside a word
    starts = np.flatnonzero(begins)
    rows = _rows_of(starts, examples.offsets)
    # [CLS] and [SEP] count as words too long for any room.
    sizes = np.where(is_text[starts], np.diff(np.append(starts, len(originals))), len(originals))
    is_predicted = np.zeros(len(originals), dtype=bool)
    is_predicted[flat_places(examples, masks)] = True
    predicted = np.add.reduceat(is_predicted, starts, dtype=np.int64)
    counts = np.diff(masks.offsets)
    is_segmented = promise.config.word_segmenter is not None
    shortest = np.minimum.reduceat(sizes, np.searchsorted(starts, examples.offsets[:-1]))
    is_exception = (is_segmented | (shortest > promised)) & (counts == 1)
    in_part = (predicted > 0) & (predicted < sizes) & ~is_exception[rows]
    left_out = (predicted == 0) & (sizes <= (promised - counts)[rows])
    faults = {"whole words": np.unique(rows[in_part])}
    return faults if is_segmented else {**faults, "words that fit": np.unique(rows[left_out])}


def may_be_text(promise: Promise) -> np.ndarray:
    """Return which ids stand for text, (vocab_size,) bool: [UNK] does, too, though it is no word piece."""
    allowed = ~promise.is_reserved
    allowed[promise.tokenizer.unk_id] = True
    return allowed


def slices_of_masks(
    masks: Masks, is_text: np.ndarray, offsets: np.ndarray, maskable: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the masked tokens in each tenth of their examples' text, how many evenly spread ones would be, and all."""
    counts = np.diff(masks.offsets)
    row_of_mask = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(is_text) - is_text  # tokens of text before each token
    ranks = before[masks.positions + offsets[:-1][row_of_mask]] - before[offsets[:-1]][row_of_mask]
    maskable = np.maximum(maskable, 1)
    slices = np.bincount(np.minimum(ranks * NUM_SLICES // maskable[row_of_mask], NUM_SLICES - 1), minlength=NUM_SLICES)
    bounds = -(-np.arange(NUM_SLICES + 1) * maskable[:, None] // NUM_SLICES)  # (rows, slices + 1)
    text = np.diff(bounds, axis=1)
    return slices, (text * (counts / maskable)[:, None]).sum(axis=0), text.sum(axis=0)


def flat_places(examples: Examples, masks: Masks) -> np.ndarray:
    """Return the place of each predicted token among all tokens, (masked,)."""
    return masks.positions + np.repeat(examples.offsets[:-1], np.diff(masks.offsets))


def _rows_of(places: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the row in which each flat place lies."""
    return np.searchsorted(offsets, places, side="right") - 1
