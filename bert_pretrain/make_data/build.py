"""Building a shard: its examples, from the documents that the plan deals to it.

A shard is a pure function of (store, configuration, seed, shard number), so it may be built anywhere, in any order and
again.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from bert_pretrain.errors import DataError, InputError
from bert_pretrain.files import read_json, remove_temporaries, write_json, write_text
from bert_pretrain.make_data import pairs, summary
from bert_pretrain.make_data.full_sentences import pack_sentences
from bert_pretrain.make_data.layout import Layout, assemble, layout_of_pairs
from bert_pretrain.make_data.plan import BuildPlan, Split, locate_spans, shard_spans
from bert_pretrain.make_data.token_store import Text, TokenStore
from bert_pretrain.make_data.windows import cut_whole_windows, cut_windows, spans_with_windows
from bert_pretrain.masking import mask_examples, masking_rule
from bert_pretrain.rng import stream
from bert_pretrain.shards import ShardRecord, damage_of, write_shard
from bert_pretrain.tokenizer import load_once

RECORDS = ".records"
"""The folder of notes about finished shards, in an output that is not complete."""
CLAIM = "claim"
SINGLE_SENTENCES_REMEDY = (
    "if blank lines stand between sentences rather than documents, set data.document_boundary=file; "
    "if a line is a document, join related lines, or set data.next_sentence=none"
)


@dataclass(frozen=True)
class ShardTask:
    """One shard to build."""

    plan: BuildPlan
    split: Split
    number: int

    @property
    def name(self) -> str:
        return f"{self.split.name}/{self.number:05d}.parquet"

    @property
    def coordinates(self) -> dict[str, int | str]:
        """What sets its random streams apart from those of other shards."""
        return {"split": self.split.name, "shard": self.number}


def open_records(plan: BuildPlan) -> None:
    """Prepare an output for its shards: folders, without what killed writers left, and the claim of this plan."""
    for folder in (*(plan.output / split.name for split in plan.splits), plan.output / RECORDS):
        folder.mkdir(parents=True, exist_ok=True)
        remove_temporaries(folder)
    write_text(plan.output / RECORDS / CLAIM, plan.claim)


def build_shard(task: ShardTask) -> dict[str, Any]:
    """Build and write one shard, unless it is there undamaged; returns its record, statistics and the damage found."""
    plan = task.plan
    note = plan.output / RECORDS / f"{task.split.name}-{task.number:05d}.json"
    damage = None
    if note.exists():
        found: dict[str, Any] = read_json(note)
        damage = damage_of(plan.output, ShardRecord(**found["record"]), whole=True)
        if damage is None:
            return {**found, "damage": None}
    result = _build(task)
    write_json(note, result)
    return {**result, "damage": damage}


def _build(task: ShardTask) -> dict[str, Any]:
    plan, config = task.plan, task.plan.config
    rng = stream(config.seed, "pairs", **task.coordinates)
    text, layout, drops = _OBJECTIVES[config.next_sentence](task, rng)
    tokenizer = load_once(plan.tokenizer)
    examples = assemble(layout.take(rng.permutation(len(layout))), text, tokenizer)
    if config.masking == "static" or task.split.name == "validation":
        rng = stream(config.seed, "mask", **task.coordinates)
        examples = mask_examples(examples, masking_rule(tokenizer, config), rng)
    _check_claim(plan)
    record = write_shard(plan.output, task.name, examples)
    statistics = summary.measure(examples, tokenizer, config.max_seq_length)
    return {"record": record.as_json(), "statistics": statistics, "drops": dict(drops)}


def _check_claim(plan: BuildPlan) -> None:
    """Write nothing into a folder that meanwhile belongs to another command.

    The command that sent this task may be dead, its folder moved aside, and the task still run on a cluster.
    """
    if (plan.output / RECORDS / CLAIM).read_text() != plan.claim:
        raise DataError("the output was claimed by another command", where=str(plan.output), remedy="let that one work")


def _next_sentence_pairs(task: ShardTask, rng: np.random.Generator) -> tuple[Text, Layout, Counter[str]]:
    """Half of the windows keep their B, half get one of another document (BERT)."""
    plan, config = task.plan, task.plan.config
    for num_lenders in (0, 64, 4096):
        text, documents, num_own_spans = _read_text(task, num_lenders)
        if len(np.unique(documents[spans_with_windows(text, plan.max_tokens)])) != 1:
            break
    else:
        raise InputError(
            f"only one document of the {task.split.name} split has two sentences, so there is no other to take a "
            "random B from",
            where=f"{task.split.num_documents:,} documents",
            remedy=SINGLE_SENTENCES_REMEDY,
        )
    windows, single = cut_windows(text, documents, plan.max_tokens, config.short_seq_prob, rng)
    num_own = int((windows.a_start < text.sentence_starts[text.span_sentences[num_own_spans]]).sum())
    dealt = pairs.deal_pairs(windows, plan.max_tokens, num_own, rng)
    return text, layout_of_pairs(dealt), Counter({"single_sentence_spans": single})


def _sentence_orders(task: ShardTask, rng: np.random.Generator) -> tuple[Text, Layout, Counter[str]]:
    """Half of the windows are swapped (ALBERT)."""
    plan = task.plan
    text, documents, _ = _read_text(task, num_lenders=0)
    windows, single = cut_whole_windows(text, documents, plan.max_tokens, plan.config.short_seq_prob, rng)
    return text, layout_of_pairs(pairs.deal_orders(windows, rng)), Counter({"single_sentence_spans": single})


def _full_sentences(task: ShardTask, rng: np.random.Generator) -> tuple[Text, Layout, Counter[str]]:
    """No pairs: text in order, over the ends of documents (RoBERTa)."""
    text, _, _ = _read_text(task, num_lenders=0)
    return text, pack_sentences(text, task.plan.config.max_seq_length), Counter()


_OBJECTIVES = {"nsp": _next_sentence_pairs, "sop": _sentence_orders, "none": _full_sentences}


def _read_text(task: ShardTask, num_lenders: int) -> tuple[Text, np.ndarray, int]:
    """Read a shard's text, with spans of other documents that lend their Bs where all its own pairs are of one."""
    plan, split = task.plan, task.split
    numbers, parts, of_parts = shard_spans(plan, split, task.number)
    num_own = len(numbers)
    if num_lenders:
        rng = stream(plan.config.seed, "lenders", split=split.name, shard=task.number)
        few = split.num_documents <= num_lenders
        picks = np.arange(split.num_documents) if few else rng.integers(0, split.num_documents, num_lenders)
        lenders = locate_spans(plan, split, picks)
        others = ~np.isin(lenders[0], numbers) & ~plan.selection.is_left_out(lenders[0])
        numbers, parts, of_parts = (
            np.concatenate([own, lent[others]]) for own, lent in zip((numbers, parts, of_parts), lenders, strict=True)
        )
    text = _store(plan.store, plan.num_pieces, plan.run).read(
        numbers, parts, of_parts, plan.max_tokens + plan.max_tokens // 2
    )
    return text, numbers, num_own


@lru_cache(maxsize=1)
def _store(folder: Path, num_pieces: int, run: str) -> TokenStore:
    return TokenStore(folder, num_pieces)
