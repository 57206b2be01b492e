"""Plan the shards of a data folder: which documents are used, the shards of each split, and their documents.

Documents are identified by their numbers in the token store. Keyed permutations assign them to shards, without a table.
Long documents are divided into slices. The weight of an input decides how many copies of it are used.
"""

import hashlib
import io
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from bert_pretrain import ragged, rng
from bert_pretrain.config import DataConfig
from bert_pretrain.io.files import atomic_path
from bert_pretrain.io.manifest import library_versions
from bert_pretrain.make_data.pairs import NUM_SPECIAL
from bert_pretrain.make_data.token_store import TokenStore
from bert_pretrain.text.sources import MIN_CORPUS_DOCUMENTS, Source, is_mix
from bert_pretrain.text.tokenizer import Tokenizer

# Maximum share of held-out text. `make-data` warns above the larger of this and twice `validation_fraction`. `run auto`
# plans no validation split if the minimum number of validation documents exceeds this share.
MAX_HELD_OUT_SHARE = 0.1
# Maximum number of tokens to hold out by default: 10,000 examples of 128 tokens. It is the same for all lengths, so
# that a phase of longer examples is not evaluated on the training documents of an earlier phase.
MAX_HELD_OUT_TOKENS = 10_000 * 128
BUCKET_DOCUMENTS = 1 << 22  # mean number of documents in a bucket of hashes


@dataclass(frozen=True)
class Plan:
    """Everything needed to build the shards of a data folder. It is sent with every task, so it must be small.

    In the store, training inputs come before validation inputs. A permutation of the training documents puts the
    held-out documents first. The slices of a split are numbered by position: the first slices of all documents come
    first, then the other slices of long documents. For each copy, another permutation assigns positions to shards.
    """

    store: TokenStore
    tokenizer: Tokenizer
    output: Path
    config: DataConfig
    first_documents: tuple[int, ...]  # the first document of each input, with the total at the end
    copies: tuple[float, ...]  # of each input's documents; with 1.5, half of them are in a second copy
    num_training: int  # documents of the training inputs
    num_held_out: int = 0  # documents of the training inputs that are held out for validation
    left_out_file: Path | None = None  # .npy of the numbers of documents that are not used, ascending; None if none
    # .npy (3, documents): the long documents, ascending; their numbers of slices; whether they are for validation
    long_file: Path | None = None
    shards_per_copy: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of each split that has documents
    tokens: dict[str, int] = field(default_factory=dict)  # of each split, before documents are repeated in copies

    @property
    def shards(self) -> list[tuple[str, int]]:
        """The shards to build, as (split, number)."""
        return [(split, number) for split, copies in self.shards_per_copy.items() for number in range(sum(copies))]

    @property
    def held_out_share(self) -> float:
        """Validation tokens as a share of all tokens used."""
        return self.tokens.get("validation", 0) / max(1, sum(self.tokens.values()))

    @property
    def fingerprint(self) -> str:
        """A string that differs for plans with different shards. It does not depend on the paths of inputs."""
        input_keys = {"validation", "input_weights", "document_boundary", "max_record_bytes", "encoding"}
        config = self.config.model_dump(mode="json", exclude=input_keys)
        inputs = hashlib.sha256(repr((self.first_documents, self.copies, self.num_training)).encode()).hexdigest()
        return json.dumps([self.store.folder.name, self.tokenizer.hash, config, inputs, library_versions()])

    @property
    def max_tokens(self) -> int:
        """The maximum number of tokens of A and B together."""
        return self.config.max_seq_length - NUM_SPECIAL

    @property
    def left_out(self) -> np.ndarray:
        """The numbers of documents that are not used, ascending."""
        if self.left_out_file is None:
            return np.zeros(0, dtype=np.int64)
        return np.asarray(np.load(self.left_out_file, mmap_mode="r"))

    def is_left_out(self, numbers: np.ndarray) -> np.ndarray:
        """Return which documents are not used, (numbers,) bool."""
        left_out = self.left_out
        if len(left_out) == 0:
            return np.zeros(len(numbers), dtype=bool)
        rows = np.minimum(np.searchsorted(left_out, numbers), len(left_out) - 1)
        return left_out[rows] == numbers

    def inputs_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the input of each document, (numbers,)."""
        return np.searchsorted(self.first_documents, numbers, side="right") - 1

    def tokens_by_input(self, numbers: np.ndarray) -> np.ndarray:
        """Return the total tokens of documents by input, (inputs,). `numbers` must ascend."""
        tokens = np.zeros(len(self.copies), dtype=np.int64)
        np.add.at(tokens, self.inputs_of(numbers), self.store.sizes_of(numbers)[1])
        return tokens

    def num_documents(self, split: str) -> int:
        """Return the number of documents of a split, including those that are left out."""
        num_for_training = self.num_training - self.num_held_out
        return num_for_training if split == "train" else self.store.num_documents - num_for_training

    def documents_at(self, split: str, positions: np.ndarray) -> np.ndarray:
        """Return the documents at `positions` of a split, each below `num_documents(split)`."""
        if split == "train":
            return self._permuted(self.num_training, self.num_held_out + positions)
        if self.num_held_out == 0:
            return self.num_training + self._permuted(self.store.num_documents - self.num_training, positions)
        held_out = self._permuted(self.num_training, np.minimum(positions, self.num_held_out - 1))
        return np.where(positions < self.num_held_out, held_out, self.num_training + positions - self.num_held_out)

    def _permuted(self, num_documents: int, positions: np.ndarray) -> np.ndarray:
        return rng.Permutation(num_documents, self.config.seed, "split")(positions) if num_documents else positions

    def long_documents(self, split: str) -> np.ndarray:
        """Return the numbers of a split's long documents, ascending, and their numbers of slices, (2, documents)."""
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
    """Leave out duplicates, hold out documents for validation, and compute the number of shards of each copy.

    `inputs` are the counts of each source; validation sources come last. The store must be complete and have enough
    documents for the objective. Returns the plan, and the number of duplicates left out, by reason.
    """
    ends = np.cumsum([counts["documents"] for counts in inputs])
    copies = tuple(0.0 if source.is_validation else config.dupe_factor * source.weight for source in sources)
    num_inputs = sum(not source.is_validation for source in sources)  # for training
    num_training = int(ends[num_inputs - 1])
    plan, left_out = Plan(store, tokenizer, output, config, (0, *ends.tolist()), copies, num_training), Counter[str]()
    if config.drop_duplicates:
        priorities = np.array([np.inf if source.is_validation else source.weight for source in sources])
        duplicates, left_out = _find_duplicates(plan, priorities)
        plan = replace(plan, left_out_file=_save(store, "duplicates", duplicates) if len(duplicates) else None)
    if is_mix(sources, config) or num_training == store.num_documents:
        num_tokens = sum(counts["tokens"] for counts in inputs[:num_inputs])
        plan = replace(plan, num_held_out=_num_held_out(plan, held_out_share(config, num_tokens)))
    held_out = np.sort(plan.documents_at("validation", np.arange(plan.num_documents("validation"))))
    tokens = np.array([counts["tokens"] for counts in inputs], dtype=np.int64) - plan.tokens_by_input(plan.left_out)
    tokens_held_out = plan.tokens_by_input(held_out[~plan.is_left_out(held_out)])
    train_tokens = tokens - tokens_held_out
    split_tokens = {"train": int(train_tokens.sum()), "validation": int(tokens_held_out.sum())}
    shares = [np.clip(np.array(copies) - copy, 0, 1) for copy in range(int(np.ceil(max(copies))))]  # of each input
    by_copy = {
        "train": [float((train_tokens * share).sum()) for share in shares],
        "validation": [float(split_tokens["validation"])],
    }
    shards = {
        split: tuple(max(1, round(each / plan.max_tokens / config.examples_per_shard)) for each in copy_tokens)
        for split, copy_tokens in by_copy.items()
        if plan.num_documents(split)
    }
    # Small slices mix many documents in a shard. Slices of eight windows or more keep windows that end early rare.
    slice_tokens = min(1 << 15, max(8 * plan.max_tokens, config.examples_per_shard * plan.max_tokens // 16))
    long, long_tokens = store.documents_longer_than(slice_tokens)
    slices = np.stack([long, -(-long_tokens // slice_tokens), np.isin(long, held_out)])
    long_file = _save(store, "long-documents", slices)
    return replace(plan, long_file=long_file, shards_per_copy=shards, tokens=split_tokens), left_out


def _save(store: TokenStore, name: str, values: np.ndarray) -> Path:
    """Save an array of a plan in the store atomically, with the hash of its content in the file name."""
    file = store.folder / f"{name}-{hashlib.sha256(np.ascontiguousarray(values).data).hexdigest()[:16]}.npy"
    buffer = io.BytesIO()
    np.save(buffer, values)  # on a full disk, it would not report that it cannot write to a file
    with atomic_path(file) as temporary:
        temporary.write_bytes(buffer.getbuffer())
    return file


def _find_duplicates(plan: Plan, priorities: np.ndarray) -> tuple[np.ndarray, Counter[str]]:
    """Return the duplicate documents to leave out, ascending, and their count by reason.

    Of equal documents, the first one in the input with the highest priority is kept. `priorities`, (inputs,), are
    infinite for validation inputs. Documents are compared by hash and length, bucket by bucket to bound memory.
    """
    num_buckets = -(-plan.store.num_documents // BUCKET_DOCUMENTS)
    duplicates = [np.zeros(0, dtype=np.int64)]
    counts: Counter[str] = Counter()
    for bucket in range(num_buckets):
        numbers, hashes, lengths = _bucket(plan.store, bucket, num_buckets)
        priority = priorities[plan.inputs_of(numbers)]
        order = np.lexsort((numbers, -priority, lengths, hashes))
        numbers, hashes, lengths, priority = numbers[order], hashes[order], lengths[order], priority[order]
        is_first = np.ones(len(numbers), dtype=bool)
        is_first[1:] = (hashes[1:] != hashes[:-1]) | (lengths[1:] != lengths[:-1])
        kept = priority[is_first][np.cumsum(is_first) - 1]  # the priority of the document that is kept instead
        num_leaks = int((np.isinf(kept) & ~np.isinf(priority)).sum())
        counts["documents_also_in_validation"] += num_leaks
        counts["duplicate_documents"] += int((~is_first).sum()) - num_leaks
        duplicates.append(numbers[~is_first])
    return np.sort(np.concatenate(duplicates)), +counts


def _bucket(store: TokenStore, bucket: int, num_buckets: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the numbers, hashes and lengths in tokens of the documents whose hash is in a bucket."""
    numbers, hashes, lengths = [], [], []
    for index, (first, last) in enumerate(itertools.pairwise(store.first_documents)):
        if first == last:
            continue
        document_hashes = store.map(index, "document_hashes")
        selected = np.flatnonzero(document_hashes % np.uint64(num_buckets) == bucket)
        numbers.append(selected + first)
        hashes.append(document_hashes[selected])
        lengths.append(store.document_sizes(index, selected)[1])
    return np.concatenate(numbers), np.concatenate(hashes), np.concatenate(lengths)


def min_documents(config: DataConfig) -> int:
    """Return the minimum number of documents of a split: a random B comes from another document than A."""
    return 2 if config.next_sentence == "nsp" else 1


def held_out_share(config: DataConfig, num_tokens: float) -> float:
    """Return the share of the documents to hold out from training inputs with `num_tokens` tokens."""
    share = config.validation_fraction
    if share == DataConfig().validation_fraction:
        share = min(share, MAX_HELD_OUT_TOKENS / num_tokens)
    return share


def _num_held_out(plan: Plan, share: float) -> int:
    """Return the number of training documents for a share of them, but at least two.

    With fewer than `MIN_CORPUS_DOCUMENTS` documents, the minimum is what the objective needs (`min_documents`). The
    result is 0 if there are fewer than twice `min_documents`. Otherwise it is increased until enough held-out documents
    give examples.
    """
    config, needed = plan.config, min_documents(plan.config)
    limit = plan.num_training - needed
    if not share or limit < needed:
        return 0
    minimum = needed if plan.num_training < MIN_CORPUS_DOCUMENTS else 2
    num_held_out = min(max(minimum, round(share * plan.num_training)), limit)
    num_missing = needed  # hold out more documents until this number of them gives examples
    for first in range(0, limit, 1024):
        numbers = plan.documents_at("train", np.arange(first, min(first + 1024, limit)))
        ascending = np.argsort(numbers)
        sentences, tokens = plan.store.sizes_of(numbers[ascending])
        is_usable = np.ones(len(numbers), dtype=bool)
        if config.next_sentence != "none":
            is_usable[ascending] = (sentences > 1) | (tokens > plan.max_tokens // 2)
        usable = np.flatnonzero(is_usable & ~plan.is_left_out(numbers))
        if len(usable) >= num_missing:
            return max(num_held_out, first + int(usable[num_missing - 1]) + 1)
        num_missing -= len(usable)
    return num_held_out


def shard_slices(plan: Plan, split: str, number: int) -> np.ndarray:
    """Return the slices of a shard, (3, slices) as for `TokenStore.read`. Empty if all its documents are left out."""
    ends = np.cumsum(plan.shards_per_copy[split])
    copy = int(np.searchsorted(ends, number, side="right"))
    num_shards = plan.shards_per_copy[split][copy]
    position = number - int(ends[copy]) + num_shards
    num_slices = plan.num_documents(split) + int((plan.long_documents(split)[1] - 1).sum())
    # The name of a random stream decides the draws, so it must not change.
    assignment = rng.Permutation(num_slices, plan.config.seed, "deal", split=split, copy=copy)
    start, end = ((position + side) * num_slices // num_shards for side in (0, 1))
    slices = locate_slices(plan, split, assignment(np.arange(start, end)))
    documents = slices[0]
    is_used = ~plan.is_left_out(documents)
    if split == "train":
        copies_left = np.array(plan.copies)[plan.inputs_of(documents)] - copy
        is_used &= copies_left > rng.uniform(plan.config.seed, "part of a copy", documents)
    return slices[:, is_used]


def locate_slices(plan: Plan, split: str, positions: np.ndarray) -> np.ndarray:
    """Return the slices at `positions` of a split, (3, positions) as for `TokenStore.read`.

    The first slices of all documents have the first positions. The other slices of the long documents follow.
    """
    num_documents, (long, num_slices) = plan.num_documents(split), plan.long_documents(split)
    offsets = ragged.offsets_of(num_slices - 1)  # of the other slices of each long document
    slices = np.ones((3, len(positions)), dtype=np.int64)
    documents, indices, counts = slices  # views of its rows
    is_other = positions >= num_documents
    rows = positions[is_other] - num_documents
    documents[~is_other], indices[~is_other] = plan.documents_at(split, positions[~is_other]), 0
    owners = np.searchsorted(offsets, rows, side="right") - 1
    documents[is_other], indices[is_other] = long[owners], 1 + rows - offsets[owners]
    is_long = np.isin(documents, long)
    counts[is_long] = num_slices[np.searchsorted(long, documents[is_long])]
    return slices
