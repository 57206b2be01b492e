"""The plan of a build: which documents take part, how many shards each split has, and which documents each gets.

Documents are known by their numbers in the token store, and assigned by keyed permutations, without a table of them;
long ones in several slices. Weighted inputs take part in more or fewer of the copies.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bert_pretrain import rng
from bert_pretrain.config import DataConfig
from bert_pretrain.io.files import save_array
from bert_pretrain.make_data.duplicates import find_duplicates
from bert_pretrain.make_data.pairs import NUM_SPECIAL
from bert_pretrain.make_data.summary import TextCounts
from bert_pretrain.make_data.token_store import DocumentSlices, TokenStore
from bert_pretrain.rng import Permutation
from bert_pretrain.text import ragged
from bert_pretrain.text.sources import FEW_DOCUMENTS
from bert_pretrain.text.tokenizer import Tokenizer

MAX_SLICE_TOKENS = 1 << 15
SLICES_PER_SHARD = 16
MAX_HELD_OUT_SHARE = 0.1
"""Of the text, above which holding documents out is worth a warning, and `run auto` does not plan it."""


@dataclass(frozen=True)
class SplitPlan:
    """The documents of `train` or `validation` and how they are assigned to shards, differently for every copy.

    A document is a position, from `first` on, in a permutation of the document numbers `numbers`. Of long documents,
    the slices after the first are `num_extra` further ones. A shard holds those of them that take part.
    """

    name: str
    numbers: range
    first: int
    num_documents: int
    num_extra: int
    also: range
    """Numbers of documents after those of the permutation."""
    long_file: Path
    """An `.npy` file (2, documents): the numbers of the split's long documents, ascending, and the slices of each."""
    shards_per_copy: tuple[int, ...]
    tokens: int
    """Of the documents, each counted once."""

    @property
    def num_slices(self) -> int:
        return self.num_documents + self.num_extra

    @property
    def num_shards(self) -> int:
        return sum(self.shards_per_copy)


@dataclass(frozen=True)
class Plan:
    """All that the shards of a data folder are built from; small, since it is sent with every shard to build."""

    store: TokenStore
    tokenizer: Tokenizer
    output: Path
    config: DataConfig
    first_documents: tuple[int, ...]
    """The number of the first document of each input, with the total at the end."""
    copies: tuple[float, ...]
    """In how many copies the documents of each input take part; a fraction is the share of them in one more copy."""
    left_out_file: Path | None = None
    """An `.npy` file of the numbers of documents that take part nowhere, ascending; None if all take part."""
    splits: tuple[SplitPlan, ...] = ()

    @property
    def held_out_share(self) -> float:
        """Of the tokens that take part, the share of those for validation."""
        held_out = sum(split.tokens for split in self.splits if split.name == "validation")
        return held_out / max(1, sum(split.tokens for split in self.splits))

    @property
    def claim(self) -> str:
        """What distinguishes the shards of this plan from those of another."""
        return f"{self.store.folder.name} {self.tokenizer.hash} {self.config.model_dump_json()}"

    @property
    def max_tokens(self) -> int:
        """Tokens of A and B together at most."""
        return self.config.max_seq_length - NUM_SPECIAL

    @property
    def left_out(self) -> np.ndarray:
        """The numbers of documents that take part nowhere, ascending."""
        if self.left_out_file is None:
            return np.zeros(0, dtype=np.int64)
        return np.asarray(np.load(self.left_out_file, mmap_mode="r"))

    def is_left_out(self, numbers: np.ndarray) -> np.ndarray:
        """Return which documents take part nowhere, (numbers,) bool."""
        left_out = self.left_out
        if len(left_out) == 0:
            return np.zeros(len(numbers), dtype=bool)
        rows = np.minimum(np.searchsorted(left_out, numbers), len(left_out) - 1)
        return left_out[rows] == numbers

    def is_in_copy(self, numbers: np.ndarray, copy: int) -> np.ndarray:
        """Return which documents take part in a copy of the training documents, unless left out, (numbers,) bool."""
        left = np.array(self.copies)[self.inputs_of(numbers)] - copy
        return left > rng.uniform(self.config.seed, "part of a copy", numbers)

    def inputs_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the input that each document comes from, (numbers,)."""
        return np.searchsorted(self.first_documents, numbers, side="right") - 1

    def tokens_by_input(self, numbers: np.ndarray) -> np.ndarray:
        """Return the tokens of documents, ascending, by input, (inputs,)."""
        tokens = np.zeros(len(self.copies), dtype=np.int64)
        np.add.at(tokens, self.inputs_of(numbers), self.store.sizes_of(numbers)[1])
        return tokens

    def tokens_by_copy(self, tokens: np.ndarray) -> list[float]:
        """Return how many of the inputs' tokens, (inputs,), take part in each copy."""
        copies = np.array(self.copies)
        return [float((tokens * np.clip(copies - copy, 0, 1)).sum()) for copy in range(int(np.ceil(copies.max())))]


def make_plan(
    store: TokenStore,
    inputs: Sequence[TextCounts],
    weights: Sequence[float | None],
    tokenizer: Tokenizer,
    output: Path,
    config: DataConfig,
    *,
    is_mix: bool = False,
) -> tuple[Plan, Counter[str]]:
    """Leave out duplicates, hold documents out for validation, and decide how many shards the copies fill.

    The store is complete, with enough documents for the objective. The weight of an input is None where it is for
    validation; such inputs are the last. With `is_mix`, documents are held out besides them. Returns the plan, and how
    many documents are left out, by reason.
    """
    ends = np.cumsum([counts["documents"] for counts in inputs])
    copies = tuple(0.0 if weight is None else config.dupe_factor * weight for weight in weights)
    plan = Plan(store, tokenizer, output, config, (0, *ends.tolist()), copies)
    left_out: Counter[str] = Counter()
    if config.drop_duplicates:
        plan, left_out = _leave_out_duplicates(plan, ends, weights)
    training = range(sum(each["documents"] for each, weight in zip(inputs, weights, strict=True) if weight is not None))
    validation, also = range(len(training), store.num_documents), range(0)
    count, first, held_out = len(validation), 0, np.array(validation, dtype=np.int64)
    if is_mix or not validation:
        validation, also = training, validation
        first = num_held_out(plan, len(training))
        count = first + len(also)
        held_out = np.concatenate([np.sort(split_order(training, config)(np.arange(first))), held_out])
    tokens = np.array([counts["tokens"] for counts in inputs], dtype=np.int64) - plan.tokens_by_input(plan.left_out)
    tokens_held_out = plan.tokens_by_input(held_out[~plan.is_left_out(held_out)])
    by_copy, num_held_out_tokens = plan.tokens_by_copy(tokens - tokens_held_out), int(tokens_held_out.sum())
    long = _long_documents(store, config)
    is_held_out = np.isin(long[0], held_out)
    left, long_left, long_held_out = (
        int(tokens.sum()) - num_held_out_tokens,
        long[:, ~is_held_out],
        long[:, is_held_out],
    )
    splits = (
        _plan_split(plan, "train", training, first, len(training) - first, range(0), left, by_copy, long_left),
        _plan_split(
            plan, "validation", validation, 0, count, also, num_held_out_tokens, [num_held_out_tokens], long_held_out
        ),
    )
    return replace(plan, splits=tuple(split for split in splits if split.num_documents)), left_out


def _leave_out_duplicates(plan: Plan, ends: np.ndarray, weights: Sequence[float | None]) -> tuple[Plan, Counter[str]]:
    """Return the plan without duplicates; their list is kept in the store, to which it belongs."""
    priorities = np.array([np.inf if weight is None else weight for weight in weights])
    numbers, counts = find_duplicates(plan.store, lambda documents: priorities[plan.inputs_of(documents)])
    if len(numbers) == 0:
        return plan, counts
    digest = hashlib.sha256(np.concatenate([ends, priorities]).tobytes()).hexdigest()[:16]
    file = plan.store.folder / f"duplicates-{digest}.npy"
    save_array(file, numbers)
    return replace(plan, left_out_file=file), counts


def _long_documents(store: TokenStore, config: DataConfig) -> np.ndarray:
    """Return the numbers of documents of several slices, ascending, and how many each has, (2, documents)."""
    max_tokens = config.max_seq_length - NUM_SPECIAL
    # Small enough that a shard holds slices of many documents, large enough that few windows meet a slice's end.
    slice_tokens = config.examples_per_shard * max_tokens // SLICES_PER_SHARD
    slice_tokens = min(MAX_SLICE_TOKENS, max(8 * max_tokens, slice_tokens))
    documents, tokens = store.documents_longer_than(slice_tokens)
    return np.stack([documents, -(-tokens // slice_tokens)])


def _plan_split(
    plan: Plan,
    name: str,
    numbers: range,
    first: int,
    num_documents: int,
    also: range,
    tokens: int,
    tokens_by_copy: Sequence[float],
    long: np.ndarray,
) -> SplitPlan:
    digest = hashlib.sha256(long.tobytes()).hexdigest()[:16]
    long_file = plan.store.folder / f"long-documents-{digest}.npy"
    save_array(long_file, long)
    num_shards = tuple(
        max(1, round(each / plan.max_tokens / plan.config.examples_per_shard)) for each in tokens_by_copy
    )
    return SplitPlan(name, numbers, first, num_documents, int((long[1] - 1).sum()), also, long_file, num_shards, tokens)


def documents_needed(config: DataConfig) -> int:
    """Return how many documents a split needs: a random B comes from another document than A."""
    return 2 if config.next_sentence == "nsp" else 1


def num_held_out(plan: Plan, num_documents: int) -> int:
    """Return how many documents go to validation: the fraction, but at least two, of few as the objective needs.

    A single document is not divided; it is for training.
    """
    config = plan.config
    needed = documents_needed(config)
    limit = num_documents - needed
    if not config.validation_fraction or limit < needed:
        return 0
    least = needed if num_documents < FEW_DOCUMENTS else 2
    count = min(max(least, round(config.validation_fraction * num_documents)), limit)
    order = split_order(range(num_documents), config)
    usable = 0
    for first in range(0, limit, 1024):
        numbers = order(np.arange(first, min(first + 1024, limit)))
        ascending = np.argsort(numbers)
        sentences, tokens = plan.store.sizes_of(numbers[ascending])
        is_usable = np.ones(len(numbers), dtype=bool)
        if config.next_sentence != "none":
            is_usable[ascending] = (sentences > 1) | (tokens > plan.max_tokens // 2)
        found = np.flatnonzero(is_usable & ~plan.is_left_out(numbers))
        if usable + len(found) >= needed:
            return max(count, first + int(found[needed - 1 - usable]) + 1)
        usable += len(found)
    return count


def split_order(numbers: range, config: DataConfig) -> Permutation:
    """Return the order of documents whose beginning is the validation split, as positions in `numbers`."""
    return Permutation(len(numbers), config.seed, "split")


def shard_slices(plan: Plan, split: SplitPlan, number: int) -> DocumentSlices:
    """Return the slices assigned to a shard; there may be none, where most of its documents are left out."""
    ends = np.cumsum(split.shards_per_copy)
    copy = int(np.searchsorted(ends, number, side="right"))
    num_shards = split.shards_per_copy[copy]
    position = number - int(ends[copy]) + num_shards
    # The names of random streams decide what is drawn, so they never change.
    assignment = Permutation(split.num_slices, plan.config.seed, "deal", split=split.name, copy=copy)
    begin, end = ((position + side) * split.num_slices // num_shards for side in (0, 1))
    slices = locate_slices(plan, split, assignment(np.arange(begin, end)))
    is_in = ~plan.is_left_out(slices.documents)
    if split.name == "train":
        is_in &= plan.is_in_copy(slices.documents, copy)
    return slices.take(is_in)


def locate_slices(plan: Plan, split: SplitPlan, positions: np.ndarray) -> DocumentSlices:
    """Return the slices of a split at positions in [0, num_slices): the first of each document, then further ones."""
    long_documents, num_slices = np.load(split.long_file)
    extra = ragged.positions_within(ragged.offsets_of(num_slices - 1))
    is_extra = positions >= split.num_documents
    rows = positions[is_extra] - split.num_documents
    documents, which = np.empty(len(positions), dtype=np.int64), np.zeros(len(positions), dtype=np.int64)
    order = split_order(split.numbers, plan.config)
    own = split.num_documents - len(split.also)
    at = positions[~is_extra]
    documents[~is_extra] = np.where(
        at < own,
        split.numbers.start + order(split.first + np.minimum(at, max(own - 1, 0))),
        split.also.start + at - own,
    )
    documents[is_extra], which[is_extra] = np.repeat(long_documents, num_slices - 1)[rows], 1 + extra[rows]
    is_long = np.isin(documents, long_documents)
    of = np.ones(len(positions), dtype=np.int64)
    of[is_long] = num_slices[np.searchsorted(long_documents, documents[is_long])]
    return DocumentSlices(documents, which, of)
