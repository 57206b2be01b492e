"""The plan of a build: which documents go to which split, how many shards there are, and which documents each gets.

Documents are assigned by keyed permutations, without a table of them; long ones in several slices.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bert_pretrain.config import DataConfig
from bert_pretrain.io.files import save_array
from bert_pretrain.make_data.pairs import NUM_SPECIAL
from bert_pretrain.make_data.selection import InputShare, Selection, select
from bert_pretrain.make_data.token_store import DocumentSlices, TokenStore
from bert_pretrain.rng import Permutation
from bert_pretrain.text import ragged
from bert_pretrain.text.sources import FEW_DOCUMENTS
from bert_pretrain.text.tokenizer import Tokenizer, TokenizerReference

MAX_SLICE_TOKENS = 1 << 15
SLICES_PER_SHARD = 16
MAX_HELD_OUT_SHARE = 0.1
"""Of the text, above which holding documents out is worth a warning, and `run auto` does not plan it."""


@dataclass(frozen=True)
class SplitPlan:
    """The documents of `train` or `validation` and how they are assigned to shards, differently for every copy.

    A document is a position, from `first` on, in a permutation of the document numbers `numbers`. Of long documents,
    the slices after the first are `num_extra` further ones. A shard holds those that the selection keeps.
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
class BuildPlan:
    """All that the shards of a data folder are built from; small, since it is sent with every task."""

    store: TokenStore
    tokenizer: TokenizerReference
    output: Path
    config: DataConfig
    selection: Selection
    splits: tuple[SplitPlan, ...]

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


def plan_build(
    store: TokenStore,
    shares: Sequence[InputShare],
    tokenizer: Tokenizer,
    output: Path,
    config: DataConfig,
    *,
    is_mix: bool = False,
) -> tuple[BuildPlan, Counter[str]]:
    """Leave out duplicates, hold documents out for validation, and decide how many shards the copies fill.

    The store is complete, with enough documents for the objective. With `is_mix`, documents are held out although some
    inputs are held out whole. Returns the plan, and how many documents are left out, by reason.
    """
    selection, left_out = select(store, shares, config)
    training = range(sum(share.documents for share in shares if not share.is_validation))
    validation, also = range(len(training), store.num_documents), range(0)
    count, first, held_out = len(validation), 0, np.array(validation, dtype=np.int64)
    if is_mix or not validation:
        validation, also = training, validation
        first = num_held_out(store, selection, config, len(training))
        count = first + len(also)
        held_out = np.concatenate([np.sort(split_order(training, config)(np.arange(first))), held_out])
    tokens, held_out_tokens = selection.tokens_of_inputs(store, shares), selection.tokens_of(store, held_out)
    copies = selection.tokens_of_copies(tokens - held_out_tokens)
    long = _long_documents(store, config)
    is_held_out = np.isin(long[0], held_out)
    tokens_held_out = int(held_out_tokens.sum())
    left, long_left, long_held_out = int(tokens.sum()) - tokens_held_out, long[:, ~is_held_out], long[:, is_held_out]
    splits = (
        _plan_split("train", training, first, len(training) - first, range(0), left, copies, long_left, store, config),
        _plan_split(
            "validation", validation, 0, count, also, tokens_held_out, [tokens_held_out], long_held_out, store, config
        ),
    )
    splits_with_documents = tuple(split for split in splits if split.num_documents)
    return BuildPlan(store, tokenizer.reference, output, config, selection, splits_with_documents), left_out


def _long_documents(store: TokenStore, config: DataConfig) -> np.ndarray:
    """Return the numbers of documents of several slices, ascending, and how many each has, (2, documents)."""
    max_tokens = config.max_seq_length - NUM_SPECIAL
    # Small enough that a shard holds slices of many documents, large enough that few windows meet a slice's end.
    slice_tokens = config.examples_per_shard * max_tokens // SLICES_PER_SHARD
    slice_tokens = min(MAX_SLICE_TOKENS, max(8 * max_tokens, slice_tokens))
    documents, tokens = store.documents_longer_than(slice_tokens)
    return np.stack([documents, -(-tokens // slice_tokens)])


def _plan_split(
    name: str,
    numbers: range,
    first: int,
    num_documents: int,
    also: range,
    tokens: int,
    tokens_of_copies: Sequence[float],
    long: np.ndarray,
    store: TokenStore,
    config: DataConfig,
) -> SplitPlan:
    max_tokens = config.max_seq_length - NUM_SPECIAL
    digest = hashlib.sha256(long.tobytes()).hexdigest()[:16]
    long_file = store.folder / f"long-documents-{digest}.npy"
    save_array(long_file, long)
    num_shards = tuple(max(1, round(each / max_tokens / config.examples_per_shard)) for each in tokens_of_copies)
    return SplitPlan(name, numbers, first, num_documents, int((long[1] - 1).sum()), also, long_file, num_shards, tokens)


def documents_needed(config: DataConfig) -> int:
    """Return how many documents a split needs: a random B comes from another document than A."""
    return 2 if config.next_sentence == "nsp" else 1


def num_held_out(store: TokenStore, selection: Selection, config: DataConfig, num_documents: int) -> int:
    """Return how many documents go to validation: the fraction, but at least two, of few as the objective needs.

    A single document is not divided; it is for training.
    """
    needed = documents_needed(config)
    limit = num_documents - needed
    if not config.validation_fraction or limit < needed:
        return 0
    least = needed if num_documents < FEW_DOCUMENTS else 2
    count = min(max(least, round(config.validation_fraction * num_documents)), limit)
    order = split_order(range(num_documents), config)
    max_tokens = config.max_seq_length - NUM_SPECIAL
    usable = 0
    for first in range(0, limit, 1024):
        numbers = order(np.arange(first, min(first + 1024, limit)))
        ascending = np.argsort(numbers)
        sentences, tokens = store.sizes_of(numbers[ascending])
        is_usable = np.ones(len(numbers), dtype=bool)
        if config.next_sentence != "none":
            is_usable[ascending] = (sentences > 1) | (tokens > max_tokens // 2)
        found = np.flatnonzero(is_usable & ~selection.is_left_out(numbers))
        if usable + len(found) >= needed:
            return max(count, first + int(found[needed - 1 - usable]) + 1)
        usable += len(found)
    return count


def split_order(numbers: range, config: DataConfig) -> Permutation:
    """Return the order of documents whose beginning is the validation split, as positions in `numbers`."""
    return Permutation(len(numbers), config.seed, "split")


def shard_slices(plan: BuildPlan, split: SplitPlan, number: int) -> DocumentSlices:
    """Return the slices assigned to a shard; there may be none, where most of its documents are left out."""
    ends = np.cumsum(split.shards_per_copy)
    copy = int(np.searchsorted(ends, number, side="right"))
    num_shards = split.shards_per_copy[copy]
    position = number - int(ends[copy]) + num_shards
    # The names of random streams decide what is drawn, so they never change.
    assignment = Permutation(split.num_slices, plan.config.seed, "deal", split=split.name, copy=copy)
    begin, end = ((position + side) * split.num_slices // num_shards for side in (0, 1))
    slices = locate_slices(plan, split, assignment(np.arange(begin, end)))
    is_in = ~plan.selection.is_left_out(slices.documents)
    if split.name == "train":
        is_in &= plan.selection.is_in_copy(slices.documents, copy)
    return slices.take(is_in)


def locate_slices(plan: BuildPlan, split: SplitPlan, positions: np.ndarray) -> DocumentSlices:
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
