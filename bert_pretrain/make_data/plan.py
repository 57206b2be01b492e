"""The plan of a build: which documents go to which split, how many shards there are, and what each is dealt.

Documents are dealt by keyed permutations, without a table of them; long ones in pieces that keep their identity.
"""

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from bert_pretrain import ragged
from bert_pretrain.config import DataConfig
from bert_pretrain.files import save_array
from bert_pretrain.make_data.pairs import NUM_SPECIAL
from bert_pretrain.make_data.selection import InputShare, Selection, select
from bert_pretrain.make_data.token_store import TokenStore
from bert_pretrain.places import Place
from bert_pretrain.rng import Permutation
from bert_pretrain.tokenizer import Tokenizer, TokenizerReference

MAX_PIECE_TOKENS = 1 << 15
PIECES_PER_SHARD = 16

Spans = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Spans of documents: the document's number, which part of it, and of how many parts; each (spans,) int64."""


@dataclass(frozen=True)
class Split:
    """The documents of `train` or `validation` and how they are dealt to shards, afresh for every copy.

    A document is a place, from `first` on, in a permutation of the document numbers `ordered`. One longer than a piece
    is dealt in several parts; the later ones are `num_extra` further spans. A shard holds those of its documents that
    the selection takes.
    """

    name: str
    ordered: range
    first: int
    num_documents: int
    num_extra: int
    shards_per_copy: tuple[int, ...]

    @property
    def num_spans(self) -> int:
        return self.num_documents + self.num_extra

    @property
    def num_shards(self) -> int:
        return sum(self.shards_per_copy)


@dataclass(frozen=True)
class BuildPlan:
    """All that the shards of a data folder are built from; small, since it goes with every task."""

    store: Path
    num_pieces: int
    tokenizer: TokenizerReference
    output: Place
    config: DataConfig
    long_file: Path
    """An `.npy` file (2, documents): the numbers of those dealt in parts, ascending, and into how many."""
    selection: Selection
    splits: tuple[Split, ...]
    run: str
    """A name for this run alone, lest a process that lives on uses what it has mapped for an earlier one."""

    @property
    def claim(self) -> str:
        """What tells the shards of this plan from those of another."""
        return f"{self.store.name} {self.tokenizer.hash} {self.config.model_dump_json()}"

    @property
    def max_tokens(self) -> int:
        """Tokens of A and B together at most."""
        return self.config.max_seq_length - NUM_SPECIAL


def plan_build(
    store: TokenStore, shares: Sequence[InputShare], tokenizer: Tokenizer, output: Place, config: DataConfig
) -> tuple[BuildPlan, Counter[str]]:
    """Leave out duplicates, set documents aside for validation, and settle how many shards the copies fill.

    Args:
        store: the token store, complete, of enough documents for the objective.
        shares: what is there of each input, in the order of the store.
        tokenizer: the one that made the store, opened from a folder.
        output: the data folder.
        config: the section `data`.

    Returns:
        the plan, and how many documents are left out, by reason.
    """
    max_tokens = config.max_seq_length - NUM_SPECIAL
    selection, left_out = select(store, shares, config)
    # Small enough that a shard holds pieces of many documents, large enough that few windows meet a piece's end.
    piece_tokens = config.examples_per_shard * max_tokens // PIECES_PER_SHARD
    piece_tokens = min(MAX_PIECE_TOKENS, max(8 * max_tokens, piece_tokens))
    long_documents, long_lengths = store.documents_longer_than(piece_tokens)
    long_file = store.folder / f"longer-than-{piece_tokens}.npy"
    save_array(long_file, np.stack([long_documents, -(-long_lengths // piece_tokens)]))
    training = range(sum(share.documents for share in shares if not share.is_validation))
    if any(share.is_validation for share in shares):
        held_out, ordered = store.num_documents - len(training), range(len(training), store.num_documents)
        validation, train_first = np.array(ordered, dtype=np.int64), 0
    else:
        held_out, ordered = num_held_out(store, selection, config), training
        validation, train_first = _first_of_order(training, held_out, config), held_out
    tokens = selection.tokens_of_inputs(store, shares)
    validation_tokens = selection.tokens_of(store, validation)
    plan = BuildPlan(
        store.folder,
        store.num_pieces,
        tokenizer.reference,
        output,
        config,
        long_file,
        selection,
        (),
        secrets.token_hex(8),
    )
    splits = []
    for name, numbers, first, count, copies in (
        ("train", training, train_first, len(training) - train_first, tokens - validation_tokens),
        ("validation", ordered, 0, held_out, validation_tokens),
    ):
        if count:
            of_copies = selection.tokens_of_copies(copies) if name == "train" else [copies.sum()]
            num_shards = tuple(max(1, round(each / max_tokens / config.examples_per_shard)) for each in of_copies)
            split = Split(name, numbers, first, count, 0, num_shards)
            splits.append(replace(split, num_extra=len(_extra_spans(plan, split)[0])))
    return replace(plan, splits=tuple(splits)), left_out


def documents_needed(config: DataConfig) -> int:
    """Return how many documents a split needs: a random B comes from another document than A."""
    return 2 if config.next_sentence == "nsp" else 1


def num_held_out(store: TokenStore, selection: Selection, config: DataConfig) -> int:
    """Return how many documents go to validation: the fraction, but at least two, as many as the objective needs.

    A single document is not divided; it is for training.
    """
    least = documents_needed(config)
    most = store.num_documents - least
    if not config.validation_fraction or most < least:
        return 0
    count = min(max(2, round(config.validation_fraction * store.num_documents)), most)
    order = split_order(range(store.num_documents), config)
    max_tokens = config.max_seq_length - NUM_SPECIAL
    usable = 0
    for first in range(0, most, 1024):
        numbers = order(np.arange(first, min(first + 1024, most)))
        places = np.argsort(numbers)
        sentences, tokens = store.sizes_of(numbers[places])
        is_usable = np.ones(len(numbers), dtype=bool)
        if config.next_sentence != "none":
            is_usable[places] = (sentences > 1) | (tokens > max_tokens // 2)
        found = np.flatnonzero(is_usable & ~selection.is_left_out(numbers))
        if usable + len(found) >= least:
            return max(count, first + int(found[least - 1 - usable]) + 1)
        usable += len(found)
    return count


def split_order(numbers: range, config: DataConfig) -> Permutation:
    """Return the order of documents whose beginning is the validation split, as places in `numbers`."""
    return Permutation(len(numbers), config.seed, "split")


def _first_of_order(numbers: range, count: int, config: DataConfig) -> np.ndarray:
    return np.sort(split_order(numbers, config)(np.arange(count)))


def shard_spans(plan: BuildPlan, split: Split, number: int) -> Spans:
    """Return the spans dealt to a shard; there may be none, where most of its documents are left out."""
    ends = np.cumsum(split.shards_per_copy)
    copy = int(np.searchsorted(ends, number, side="right"))
    num_shards = split.shards_per_copy[copy]
    place = number - int(ends[copy]) + num_shards
    deal = Permutation(split.num_spans, plan.config.seed, "deal", split=split.name, copy=copy)
    bounds = [(place + side) * split.num_spans // num_shards for side in (0, 1)]
    numbers, parts, of_parts = locate_spans(plan, split, deal(np.arange(*bounds)))
    is_in = ~plan.selection.is_left_out(numbers)
    if split.name == "train":
        is_in &= plan.selection.is_in_copy(numbers, copy)
    return numbers[is_in], parts[is_in], of_parts[is_in]


def locate_spans(plan: BuildPlan, split: Split, spans: np.ndarray) -> Spans:
    """Return the spans of a split by their places among its `num_spans`."""
    is_extra = spans >= split.num_documents
    numbers = np.empty(len(spans), dtype=np.int64)
    order = split_order(split.ordered, plan.config)
    numbers[~is_extra] = split.ordered.start + order(split.first + spans[~is_extra])
    parts = np.zeros(len(spans), dtype=np.int64)
    extra_documents, extra_parts = _extra_spans(plan, split)
    numbers[is_extra] = extra_documents[spans[is_extra] - split.num_documents]
    parts[is_extra] = extra_parts[spans[is_extra] - split.num_documents]
    long_documents, long_parts = _load(plan.long_file, plan.run)
    of_parts = np.ones(len(spans), dtype=np.int64)
    if len(long_documents):
        rows = np.minimum(np.searchsorted(long_documents, numbers), len(long_documents) - 1)
        is_long = long_documents[rows] == numbers
        of_parts[is_long] = long_parts[rows[is_long]]
    return numbers, parts, of_parts


@lru_cache(maxsize=2)
def _extra_spans(plan: BuildPlan, split: Split) -> tuple[np.ndarray, np.ndarray]:
    """Return the parts of long documents of a split but for the first ones: the document's number, and which part."""
    documents, num_parts = _load(plan.long_file, plan.run)
    is_own = (documents >= split.ordered.start) & (documents < split.ordered.stop)
    if split.num_documents < len(split.ordered):
        held_out = _first_of_order(split.ordered, split.first or split.num_documents, plan.config)
        is_own &= np.isin(documents, held_out) == (split.first == 0)
    extra = num_parts[is_own] - 1
    within = ragged.positions_within(ragged.offsets_of(extra))
    return np.repeat(documents[is_own], extra), within + 1


@lru_cache(maxsize=2)
def _load(file: Path, run: str) -> np.ndarray:
    return np.load(file)
