"""The plan of a build: which documents take part, how many shards each split has, and which documents each gets.

Documents are known by their numbers in the token store, and assigned by keyed permutations, without a table of them;
long ones in several slices. Weighted inputs take part in more or fewer of the copies.
"""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from bert_pretrain import rng
from bert_pretrain.config import DataConfig
from bert_pretrain.io.files import save_array
from bert_pretrain.io.manifest import library_versions
from bert_pretrain.make_data.pairs import NUM_SPECIAL
from bert_pretrain.make_data.token_store import TokenStore
from bert_pretrain.rng import Permutation
from bert_pretrain.text import ragged
from bert_pretrain.text.sources import MIN_CORPUS_DOCUMENTS, Source, is_mix
from bert_pretrain.text.tokenizer import Tokenizer

MAX_SLICE_TOKENS = 1 << 15
SLICES_PER_SHARD = 16
MAX_HELD_OUT_SHARE = 0.1
"""Share of the text above which held-out documents give a warning, and `run auto` plans none."""
BUCKET_DOCUMENTS = 1 << 22


@dataclass(frozen=True)
class Plan:
    """All that the shards of a data folder are built from; small, since it is sent with every shard to build.

    The store holds the training inputs first. A permutation of their documents begins with those that are held out, and
    continues with those for training. A split is a list of positions: its documents, then the slices after the first of
    its long documents. For every copy, another permutation assigns them to shards.
    """

    store: TokenStore
    tokenizer: Tokenizer
    output: Path
    config: DataConfig
    first_documents: tuple[int, ...]
    """The number of the first document of each input, with the total at the end."""
    copies: tuple[float, ...]
    """Copies of each input's documents; a fraction is the share of them in one more copy."""
    num_training: int
    """Documents of the inputs that are not for validation."""
    num_held_out: int = 0
    """How many of these are held out."""
    left_out_file: Path | None = None
    """An `.npy` file of the numbers of documents that take part nowhere, ascending; None if all take part."""
    long_file: Path | None = None
    """An `.npy` file (3, documents): the numbers of long documents, ascending, the slices of each, and whether it is
    for validation."""
    shards_per_copy: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shards per copy of each split that has documents."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Tokens of each split, each document counted once."""

    @property
    def shards(self) -> list[tuple[str, int]]:
        """The shards to build, each as its split and its number there."""
        return [(split, number) for split, copies in self.shards_per_copy.items() for number in range(sum(copies))]

    @property
    def held_out_share(self) -> float:
        """Validation tokens as a share of all tokens that take part."""
        return self.tokens.get("validation", 0) / max(1, sum(self.tokens.values()))

    @property
    def claim(self) -> str:
        """Keys that distinguish the shards of this plan from those of another; inputs may be moved."""
        of_inputs = {"validation", "input_weights", "document_boundary", "max_record_bytes", "encoding"}
        config = self.config.model_dump(mode="json", exclude=of_inputs)
        inputs = hashlib.sha256(repr((self.first_documents, self.copies, self.num_training)).encode()).hexdigest()
        return json.dumps([self.store.folder.name, self.tokenizer.hash, config, inputs, library_versions()])

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

    def inputs_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the input that each document comes from, (numbers,)."""
        return np.searchsorted(self.first_documents, numbers, side="right") - 1

    def tokens_by_input(self, numbers: np.ndarray) -> np.ndarray:
        """Return the tokens of documents, ascending, by input, (inputs,)."""
        tokens = np.zeros(len(self.copies), dtype=np.int64)
        np.add.at(tokens, self.inputs_of(numbers), self.store.sizes_of(numbers)[1])
        return tokens

    def num_documents(self, split: str) -> int:
        """Return how many documents a split has, those left out among them."""
        num_for_training = self.num_training - self.num_held_out
        return num_for_training if split == "train" else self.store.num_documents - num_for_training

    def documents_at(self, split: str, positions: np.ndarray) -> np.ndarray:
        """Return the documents of a split at positions below their number."""
        if split == "train":
            return self._in_order(self.num_training, self.num_held_out + positions)
        if self.num_held_out == 0:
            return self.num_training + self._in_order(self.store.num_documents - self.num_training, positions)
        held_out = self._in_order(self.num_training, np.minimum(positions, self.num_held_out - 1))
        return np.where(positions < self.num_held_out, held_out, self.num_training + positions - self.num_held_out)

    def _in_order(self, number: int, positions: np.ndarray) -> np.ndarray:
        return Permutation(number, self.config.seed, "split")(positions) if number else positions

    def long_documents(self, split: str) -> np.ndarray:
        """Return the numbers of a split's documents of several slices, ascending, and the slices of each, (2, …)."""
        assert self.long_file is not None
        numbers, slices, is_held_out = np.load(self.long_file)
        return np.stack([numbers, slices])[:, is_held_out == (split == "validation")]


def make_plan(
    store: TokenStore,
    inputs: Sequence[dict[str, int]],
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    output: Path,
    config: DataConfig,
) -> tuple[Plan, Counter[str]]:
    """Leave out duplicates, hold documents out for validation, and decide how many shards the copies fill.

    The store is complete, with enough documents for the objective. `inputs` are the counts of each source; sources for
    validation are the last. Returns the plan, and how many documents are left out, by reason.
    """
    ends = np.cumsum([counts["documents"] for counts in inputs])
    copies = tuple(0.0 if source.is_validation else config.dupe_factor * source.weight for source in sources)
    num_training = int(ends[sum(not source.is_validation for source in sources) - 1])
    plan, left_out = Plan(store, tokenizer, output, config, (0, *ends.tolist()), copies, num_training), Counter[str]()
    if config.drop_duplicates:
        priorities = np.array([np.inf if source.is_validation else source.weight for source in sources])
        duplicates, left_out = _find_duplicates(plan, priorities)
        plan = replace(plan, left_out_file=_save(store, "duplicates", duplicates) if len(duplicates) else None)
    if is_mix(sources, config) or num_training == store.num_documents:
        plan = replace(plan, num_held_out=_num_held_out(plan))
    held_out = np.sort(plan.documents_at("validation", np.arange(plan.num_documents("validation"))))
    tokens = np.array([counts["tokens"] for counts in inputs], dtype=np.int64) - plan.tokens_by_input(plan.left_out)
    tokens_held_out = plan.tokens_by_input(held_out[~plan.is_left_out(held_out)])
    of_splits = {"train": int((tokens - tokens_held_out).sum()), "validation": int(tokens_held_out.sum())}
    by_copy = {
        "train": [
            float(((tokens - tokens_held_out) * np.clip(np.array(copies) - copy, 0, 1)).sum())
            for copy in range(int(np.ceil(max(copies))))
        ],
        "validation": [float(of_splits["validation"])],
    }
    shards = {
        split: tuple(max(1, round(each / plan.max_tokens / config.examples_per_shard)) for each in tokens_of_copies)
        for split, tokens_of_copies in by_copy.items()
        if plan.num_documents(split)
    }
    # Small enough that a shard holds slices of many documents, large enough that few windows meet a slice's end.
    slice_tokens = config.examples_per_shard * plan.max_tokens // SLICES_PER_SHARD
    slice_tokens = min(MAX_SLICE_TOKENS, max(8 * plan.max_tokens, slice_tokens))
    long, long_tokens = store.documents_longer_than(slice_tokens)
    slices = np.stack([long, -(-long_tokens // slice_tokens), np.isin(long, held_out)])
    long_file = _save(store, "long-documents", slices)
    return replace(plan, long_file=long_file, shards_per_copy=shards, tokens=of_splits), left_out


def _save(store: TokenStore, name: str, values: np.ndarray) -> Path:
    """Save an array of a plan in the store, to which it belongs, under a name of its content."""
    file = store.folder / f"{name}-{hashlib.sha256(np.ascontiguousarray(values).data).hexdigest()[:16]}.npy"
    save_array(file, values)
    return file


def _find_duplicates(plan: Plan, priorities: np.ndarray) -> tuple[np.ndarray, Counter[str]]:
    """Return the numbers of documents that equal another one, ascending, and how many there are, by reason.

    Of equal documents one of the input of highest priority (inputs,), infinity for validation, is kept, the first of
    them. They are found by hashes of their ids, bucket by bucket, so that memory does not grow with their number.
    """
    num_buckets = -(-plan.store.num_documents // BUCKET_DOCUMENTS)
    found = [np.zeros(0, dtype=np.int64)]
    counts: Counter[str] = Counter()
    for bucket in range(num_buckets):
        numbers, hashes, lengths = _bucket(plan.store, bucket, num_buckets)
        priority = priorities[plan.inputs_of(numbers)]
        order = np.lexsort((numbers, -priority, lengths, hashes))
        numbers, hashes, lengths, priority = numbers[order], hashes[order], lengths[order], priority[order]
        is_first = np.ones(len(numbers), dtype=bool)
        is_first[1:] = (hashes[1:] != hashes[:-1]) | (lengths[1:] != lengths[:-1])
        kept = priority[is_first][np.cumsum(is_first) - 1]  # for each document, the priority of the one that is kept
        num_leaks = int((np.isinf(kept) & ~np.isinf(priority)).sum())
        counts["documents_also_in_validation"] += num_leaks
        counts["duplicate_documents"] += int((~is_first).sum()) - num_leaks
        found.append(numbers[~is_first])
    return np.sort(np.concatenate(found)), +counts


def _bucket(store: TokenStore, bucket: int, num_buckets: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return number, hash and tokens of the documents whose hash falls in a bucket."""
    numbers, hashes, lengths = [], [], []
    for index, (first, last) in enumerate(itertools.pairwise(store.first_documents)):
        if first == last:
            continue
        document_hashes = store.map(index, "document_hashes")
        own = np.flatnonzero(document_hashes % np.uint64(num_buckets) == bucket)
        numbers.append(own + first)
        hashes.append(document_hashes[own])
        lengths.append(store.document_sizes(index, own)[1])
    return np.concatenate(numbers), np.concatenate(hashes), np.concatenate(lengths)


def documents_needed(config: DataConfig) -> int:
    """Return how many documents a split needs: a random B comes from another document than A."""
    return 2 if config.next_sentence == "nsp" else 1


def _num_held_out(plan: Plan) -> int:
    """Return how many training documents are held out: the fraction, but at least two, of few as the objective needs.

    A single document is not divided; it is for training.
    """
    config, needed = plan.config, documents_needed(plan.config)
    limit = plan.num_training - needed
    if not config.validation_fraction or limit < needed:
        return 0
    least = needed if plan.num_training < MIN_CORPUS_DOCUMENTS else 2
    count = min(max(least, round(config.validation_fraction * plan.num_training)), limit)
    missing = needed  # documents held out that must give examples
    for first in range(0, limit, 1024):
        numbers = plan.documents_at("train", np.arange(first, min(first + 1024, limit)))
        ascending = np.argsort(numbers)
        sentences, tokens = plan.store.sizes_of(numbers[ascending])
        is_usable = np.ones(len(numbers), dtype=bool)
        if config.next_sentence != "none":
            is_usable[ascending] = (sentences > 1) | (tokens > plan.max_tokens // 2)
        usable = np.flatnonzero(is_usable & ~plan.is_left_out(numbers))
        if len(usable) >= missing:
            return max(count, first + int(usable[missing - 1]) + 1)
        missing -= len(usable)
    return count


def shard_slices(plan: Plan, split: str, number: int) -> np.ndarray:
    """Return the slices assigned to a shard, (3, slices) as `TokenStore.read` takes them.

    There may be none, where most of its documents are left out.
    """
    ends = np.cumsum(plan.shards_per_copy[split])
    copy = int(np.searchsorted(ends, number, side="right"))
    num_shards = plan.shards_per_copy[split][copy]
    position = number - int(ends[copy]) + num_shards
    num_slices = plan.num_documents(split) + int((plan.long_documents(split)[1] - 1).sum())
    # The names of random streams decide what is drawn, so they never change.
    assignment = Permutation(num_slices, plan.config.seed, "deal", split=split, copy=copy)
    begin, end = ((position + side) * num_slices // num_shards for side in (0, 1))
    slices = locate_slices(plan, split, assignment(np.arange(begin, end)))
    documents = slices[0]
    is_in = ~plan.is_left_out(documents)
    if split == "train":
        copies_left = np.array(plan.copies)[plan.inputs_of(documents)] - copy
        is_in &= copies_left > rng.uniform(plan.config.seed, "part of a copy", documents)
    return slices[:, is_in]


def locate_slices(plan: Plan, split: str, positions: np.ndarray) -> np.ndarray:
    """Return the slices of a split at positions, (3, positions): the first of each document, then further ones."""
    num_documents, (long, num_slices) = plan.num_documents(split), plan.long_documents(split)
    firsts = ragged.offsets_of(num_slices - 1)  # of the further slices
    slices = np.ones((3, len(positions)), dtype=np.int64)
    documents, which, of = slices
    is_extra = positions >= num_documents
    rows = positions[is_extra] - num_documents
    documents[~is_extra], which[~is_extra] = plan.documents_at(split, positions[~is_extra]), 0
    owners = np.searchsorted(firsts, rows, side="right") - 1
    documents[is_extra], which[is_extra] = long[owners], 1 + rows - firsts[owners]
    is_long = np.isin(documents, long)
    of[is_long] = num_slices[np.searchsorted(long, documents[is_long])]
    return slices
