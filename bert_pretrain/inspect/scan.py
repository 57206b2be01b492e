"""Scan the shards of a data folder: figures, histograms, and how many rows break a rule.

Input: a data folder. Output: a `Scan` of each split. Each process holds one shard at a time. A shard that cannot be
read is recorded as damaged, and the others are still counted.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from bert_pretrain.config import DataConfig
from bert_pretrain.errors import DataError
from bert_pretrain.examples.examples import Examples
from bert_pretrain.examples.shards import DataFolder, ShardRecord, read_shard
from bert_pretrain.inspect.rules import Content, Spec, check_content, check_layout, make_spec, read_content
from bert_pretrain.make_data import summary
from bert_pretrain.parallel.executor import run_each
from bert_pretrain.text.tokenizer import TokenizerReference, load_once

NUM_SLICES = 10  # of an example, to see whether its masks are spread evenly


class Violations(NamedTuple):
    """How many examples break a rule, and the row of the first within its split."""

    examples: int
    first_row: int | None


class MaskCounts(NamedTuple):
    """The masks of examples whose layout is sound; counts add up over shards."""

    expected: int
    """Masked tokens if every example had as many as the configuration allows."""
    made: int
    per_example: np.ndarray
    """How many examples have 0, 1, 2 … masked tokens, (max_seq_length + 1,)."""
    slices: np.ndarray
    """Masked tokens in each tenth of their examples' text, (NUM_SLICES,)."""
    expected_slices: np.ndarray
    """The same if every token of an example were equally likely to be masked."""
    text_slices: np.ndarray
    """All tokens of text in each tenth."""


@dataclass(frozen=True)
class Scan:
    """What was counted in one or several shards of a split."""

    shards: int = 1
    damaged: dict[str, str] = field(default_factory=dict)
    """What is wrong with each shard that cannot be used, by its path."""
    results: list[summary.ShardResult] = field(default_factory=list)
    """One of each shard, as `summary.join_split` takes them."""
    violations: dict[str, Violations] = field(default_factory=dict)
    """Of every rule that applies."""
    longest: int = 0
    label_imbalance: int = 0
    """The largest difference between the numbers of labels 0 and 1 in a shard."""
    masks: MaskCounts | None = None
    """None where no masks are stored."""
    entry: dict[str, Any] = field(default_factory=dict)
    """The split's entry in the manifest, counted again."""

    @property
    def sums(self) -> Counter[str]:
        """The counts of `summary.measure`, over all shards."""
        sums: Counter[str] = Counter()
        for result in self.results:
            sums.update({name: value for name, value in result["statistics"].items() if isinstance(value, int)})
        return sums


@dataclass(frozen=True)
class _Task:
    folder: Path
    split: str
    record: ShardRecord
    first_row: int
    tokenizer: TokenizerReference
    config: DataConfig


def scan_split(folder: DataFolder, split: str, spec: Spec, *, shards: Sequence[int], workers: int) -> Scan:
    """Read chosen shards of a split, check their SHA-256, and count what they hold."""
    records, config, tokenizer = folder.shards(split), spec.config, spec.tokenizer.reference
    first_rows = np.cumsum([0, *(record.rows for record in records)]).tolist()
    tasks = [_Task(folder.path, split, records[number], first_rows[number], tokenizer, config) for number in shards]
    if len(tasks) == 1:
        return _join([_scan_shard(tasks[0])], config)  # not worth a progress bar
    return _join(list(run_each(_scan_shard, tasks, workers=workers, description=f"read {split}", unit="shard")), config)


def _join(scans: Sequence[Scan], config: DataConfig) -> Scan:
    """Join the scans of shards, in order, to that of their split."""
    violations: dict[str, Violations] = {}
    for scan in scans:
        for name, found in scan.violations.items():
            so_far = violations.get(name, Violations(0, None))
            first_row = found.first_row if so_far.first_row is None else so_far.first_row
            violations[name] = Violations(so_far.examples + found.examples, first_row)
    masks = [scan.masks for scan in scans if scan.masks is not None]
    results = [result for scan in scans for result in scan.results]
    return Scan(
        shards=len(scans),
        damaged={path: what for scan in scans for path, what in scan.damaged.items()},
        results=results,
        violations=violations,
        longest=max((scan.longest for scan in scans), default=0),
        label_imbalance=max((scan.label_imbalance for scan in scans), default=0),
        masks=MaskCounts._make(map(sum, zip(*masks, strict=True))) if masks else None,
        entry=dict(summary.join_split(results, config)),
    )


def _scan_shard(task: _Task) -> Scan:
    path = task.record.path
    try:
        examples = read_shard(task.folder, task.record)
    except DataError as error:
        return Scan(damaged={path: f"{error.what} ({error.remedy})"})
    except (KeyError, TypeError, pa.ArrowException) as error:
        return Scan(damaged={path: f"the shard {path} does not hold examples: {error}"})
    scan = scan_examples(examples, make_spec(load_once(task.tokenizer), task.config), task.split, task.first_row)
    scan.results[0]["record"] = task.record.as_json()
    return scan


def scan_examples(examples: Examples, spec: Spec, split: str, first_row: int) -> Scan:
    """Count what a shard holds; `first_row` is the row within the split at which it begins."""
    broken = check_layout(examples, spec, split)
    rows = np.setdiff1d(np.arange(len(examples)), np.concatenate([*broken.values()]))
    # Figures include all rows but those whose masks are outside their example.
    outside = broken.get("masked positions", np.zeros(0, dtype=np.int64))
    counted = examples.take(np.setdiff1d(np.arange(len(examples)), outside)) if len(outside) else examples
    statistics = summary.measure(counted, spec.tokenizer, spec.config.max_seq_length)
    masks = None
    if len(rows):
        content = read_content(examples if len(rows) == len(examples) else examples.take(rows), spec)
        masks = _count_masks(content, spec)
        broken |= {name: rows[found] for name, found in check_content(content, spec).items()}
    return Scan(
        results=[{"record": {}, "statistics": statistics, "drops": {}}],
        violations={
            name: Violations(len(found), first_row + int(found[0]) if len(found) else None)
            for name, found in broken.items()
        },
        longest=int(examples.lengths.max(initial=0)),
        label_imbalance=abs(2 * statistics["label_0"] - len(counted)) if "label_0" in statistics else 0,
        masks=masks,
    )


def _count_masks(content: Content, spec: Spec) -> MaskCounts | None:
    """Count the masked tokens of each example, and those in each tenth of its text."""
    masks, offsets = content.examples.masks, content.examples.offsets
    if masks is None:
        return None
    counts, maskable = np.diff(masks.offsets), np.maximum(content.maskable, 1)
    row_of_mask = np.repeat(np.arange(len(counts)), counts)
    text_so_far = np.cumsum(content.is_text)  # including the token itself; [CLS] is no text
    before = text_so_far[content.places] - content.is_text[content.places]
    ranks = before - text_so_far[offsets[:-1]][row_of_mask]
    slices = np.minimum(ranks * NUM_SLICES // maskable[row_of_mask], NUM_SLICES - 1)
    bounds = -(-np.arange(NUM_SLICES + 1) * maskable[:, None] // NUM_SLICES)  # (rows, slices + 1)
    text = np.diff(bounds, axis=1)
    return MaskCounts(
        expected=int(content.num_expected.sum()),
        made=len(masks.positions),
        per_example=np.bincount(counts, minlength=spec.config.max_seq_length + 1),
        slices=np.bincount(slices, minlength=NUM_SLICES),
        expected_slices=(text * (counts / maskable)[:, None]).sum(axis=0),
        text_slices=text.sum(axis=0),
    )
