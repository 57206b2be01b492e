"""Building shards: which documents a shard gets, and its examples from them.

A shard is a pure function of (store, configuration, seed, shard number), so it may be built anywhere, in any order and
again. Documents are dealt by keyed permutations, without a table of them; long ones in pieces that keep their identity.
"""

import secrets
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from bert_pretrain.config import DataConfig
from bert_pretrain.errors import DataError, InputError
from bert_pretrain.files import read_json, remove_temporaries, write_json, write_text
from bert_pretrain.make_data import pairs, summary
from bert_pretrain.make_data.full_sentences import pack_sentences
from bert_pretrain.make_data.layout import Layout, assemble, layout_of_pairs
from bert_pretrain.make_data.pairs import NUM_SPECIAL
from bert_pretrain.make_data.token_store import Text, TokenStore
from bert_pretrain.make_data.windows import cut_whole_windows, cut_windows, spans_with_windows
from bert_pretrain.masking import MaskingRule, mask_examples, masking_rule
from bert_pretrain.rng import Permutation, stream
from bert_pretrain.shards import ShardRecord, damage_of, write_shard
from bert_pretrain.tokenizer import Tokenizer

RECORDS = ".records"
"""The folder of notes about finished shards, in an output that is not complete."""
CLAIM = "claim"
MAX_PIECE_TOKENS = 1 << 15
PIECES_PER_SHARD = 16
SINGLE_SENTENCES_REMEDY = (
    "if blank lines stand between sentences rather than documents, set data.document_boundary=file; "
    "if a line is a document, join related lines, or set data.next_sentence=none"
)


@dataclass(frozen=True)
class Split:
    """The documents of `train` or `validation` and how they are dealt to shards, afresh for every copy.

    A document is a place in the permutation of all documents, from `first` on; one longer than a piece is dealt in
    several parts, the later ones listed in `extra_documents` (their numbers) and `extra_parts`.
    """

    name: str
    first: int
    num_documents: int
    extra_documents: np.ndarray
    extra_parts: np.ndarray
    copies: int
    shards_per_copy: int

    @property
    def num_spans(self) -> int:
        return self.num_documents + len(self.extra_documents)

    @property
    def num_shards(self) -> int:
        return self.copies * self.shards_per_copy


@dataclass(frozen=True)
class BuildPlan:
    """All that the shards of a data folder are built from."""

    store: Path
    num_pieces: int
    num_documents: int
    tokenizer: Path
    tokenizer_hash: str
    output: Path
    config: DataConfig
    long_documents: np.ndarray
    """Numbers of the documents dealt in parts, ascending."""
    long_parts: np.ndarray
    """Into how many each is dealt."""
    splits: tuple[Split, ...]
    run: str
    """A name for this run alone, lest a process that lives on uses what it has mapped for an earlier one."""

    @property
    def claim(self) -> str:
        """What tells the shards of this plan from those of another."""
        return f"{self.store.name} {self.tokenizer_hash} {self.config.model_dump_json()}"

    @property
    def max_tokens(self) -> int:
        """Tokens of A and B together at most."""
        return self.config.max_seq_length - NUM_SPECIAL


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


def plan_build(store: TokenStore, tokens: int, tokenizer: Tokenizer, output: Path, config: DataConfig) -> BuildPlan:
    """Set documents aside for validation and settle how many shards the copies fill.

    Args:
        store: the token store, complete, of enough documents for the objective.
        tokens: how many it holds.
        tokenizer: the one that made it, opened from a folder.
        output: the data folder.
        config: the section `data`.
    """
    assert tokenizer.folder is not None
    num_documents = store.num_documents
    held_out = num_held_out(store, config)
    max_tokens = config.max_seq_length - NUM_SPECIAL
    # Small enough that a shard holds pieces of many documents, large enough that few windows meet a piece's end.
    piece_tokens = config.examples_per_shard * max_tokens // PIECES_PER_SHARD
    piece_tokens = min(MAX_PIECE_TOKENS, max(8 * max_tokens, piece_tokens))
    long_documents, long_lengths = store.documents_longer_than(piece_tokens)
    long_parts = -(-long_lengths // piece_tokens)
    validation = np.sort(split_order(num_documents, config)(np.arange(held_out)))
    validation_tokens = int(store.sizes_of(validation)[1].sum())
    splits = []
    for name, first, count, copies, split_tokens in (
        ("train", held_out, num_documents - held_out, config.dupe_factor, tokens - validation_tokens),
        ("validation", 0, held_out, 1, validation_tokens),
    ):
        if count == 0:
            continue
        own = np.isin(long_documents, validation, invert=name == "train")
        extra_parts = [np.arange(1, parts) for parts in long_parts[own]]
        splits.append(
            Split(
                name,
                first,
                count,
                np.repeat(long_documents[own], long_parts[own] - 1),
                np.concatenate([np.zeros(0, dtype=np.int64), *extra_parts]),
                copies,
                max(1, round(split_tokens / max_tokens / config.examples_per_shard)),
            )
        )
    return BuildPlan(
        store.folder,
        store.num_pieces,
        num_documents,
        tokenizer.folder.absolute(),
        tokenizer.hash,
        output,
        config,
        long_documents,
        long_parts,
        tuple(splits),
        secrets.token_hex(8),
    )


def documents_needed(config: DataConfig) -> int:
    """Return how many documents a split needs: a random B comes from another document than A."""
    return 2 if config.next_sentence == "nsp" else 1


def num_held_out(store: TokenStore, config: DataConfig) -> int:
    """Return how many documents go to validation: the fraction, but at least two, as many as the objective needs.

    A single document is not divided; it is for training.
    """
    least = documents_needed(config)
    most = store.num_documents - least
    if not config.validation_fraction or most < least:
        return 0
    count = min(max(2, round(config.validation_fraction * store.num_documents)), most)
    if config.next_sentence == "none":
        return count
    order = split_order(store.num_documents, config)
    max_tokens = config.max_seq_length - NUM_SPECIAL
    pairable = 0
    for first in range(0, most, 1024):
        numbers = order(np.arange(first, min(first + 1024, most)))
        places = np.argsort(numbers)
        sentences, tokens = store.sizes_of(numbers[places])
        is_pairable = np.zeros(len(numbers), dtype=bool)
        is_pairable[places] = (sentences > 1) | (tokens > max_tokens // 2)
        found = np.flatnonzero(is_pairable)
        if pairable + len(found) >= least:
            return max(count, first + int(found[least - 1 - pairable]) + 1)
        pairable += len(found)
    return count


def split_order(num_documents: int, config: DataConfig) -> Permutation:
    """Return the order of all documents whose beginning is the validation split."""
    return Permutation(num_documents, config.seed, "split")


def shard_spans(plan: BuildPlan, split: Split, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the spans dealt to a shard: document numbers, which part of each, and of how many parts."""
    copy, place = divmod(number, split.shards_per_copy)
    deal = Permutation(split.num_spans, plan.config.seed, "deal", split=split.name, copy=copy)
    bounds = [(place + side) * split.num_spans // split.shards_per_copy for side in (0, 1)]
    spans = deal(np.arange(*bounds))
    return _locate_spans(plan, split, spans)


def _locate_spans(plan: BuildPlan, split: Split, spans: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    is_extra = spans >= split.num_documents
    numbers = np.empty(len(spans), dtype=np.int64)
    numbers[~is_extra] = split_order(plan.num_documents, plan.config)(split.first + spans[~is_extra])
    numbers[is_extra] = split.extra_documents[spans[is_extra] - split.num_documents]
    parts = np.zeros(len(spans), dtype=np.int64)
    parts[is_extra] = split.extra_parts[spans[is_extra] - split.num_documents]
    of_parts = np.ones(len(spans), dtype=np.int64)
    if len(plan.long_documents):
        rows = np.searchsorted(plan.long_documents, numbers)
        rows = np.minimum(rows, len(plan.long_documents) - 1)
        is_long = plan.long_documents[rows] == numbers
        of_parts[is_long] = plan.long_parts[rows[is_long]]
    return numbers, parts, of_parts


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
    tokenizer, rule = _tables(plan.tokenizer, plan.tokenizer_hash, config)
    examples = assemble(layout.take(rng.permutation(len(layout))), text, tokenizer)
    if config.masking == "static" or task.split.name == "validation":
        examples = mask_examples(examples, rule, stream(config.seed, "mask", **task.coordinates))
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
            where=f"{plan.num_documents:,} documents",
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
        lenders = _locate_spans(plan, split, picks)
        others = ~np.isin(lenders[0], numbers)
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


@lru_cache(maxsize=1)
def _tables(folder: Path, tokenizer_hash: str, config: DataConfig) -> tuple[Tokenizer, MaskingRule]:
    tokenizer = Tokenizer.load(folder)
    if tokenizer.hash != tokenizer_hash:
        raise DataError("the tokenizer changed while it was used", where=str(folder), remedy="run the command again")
    return tokenizer, masking_rule(tokenizer, config)
