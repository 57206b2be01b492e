"""Assign documents to shards: which documents are used, the shards of each split, and the text of each shard.

Documents are identified by their numbers in the token store. Keyed permutations assign them to shards, without a table.
Long documents are divided into slices. The weight of an input decides how many copies of it are used.
"""

import io
import math
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from bert_pretrain import ragged, rng
from bert_pretrain.config import DataConfig
from bert_pretrain.io.files import atomic_path, json_digest, remove_temporaries
from bert_pretrain.io.manifest import library_versions
from bert_pretrain.make_data.pairs import NUM_SPECIAL
from bert_pretrain.make_data.token_store import Slices, TokenStore
from bert_pretrain.text.sources import MIN_CORPUS_DOCUMENTS, Source, is_mix
from bert_pretrain.text.tokenizer import Tokenizer

# Maximum share of held-out text. `make-data` warns above the larger of this and twice `validation_fraction`. `run auto`
# plans no validation split if the minimum number of validation documents exceeds this share.
MAX_HELD_OUT_SHARE = 0.1
# Maximum number of tokens to hold out by default: 10,000 examples of 128 tokens. It is the same for all lengths, so
# that a phase of longer examples is not evaluated on the training documents of an earlier phase.
MAX_HELD_OUT_TOKENS = 10_000 * 128
BUCKET_DOCUMENTS = 1 << 22  # mean number of documents in a bucket of hashes
RECORDS = ".records"  # start of the name of a hidden folder in the output, which is removed at the end
LEFT_OUT = "left-out.npy"


@dataclass(frozen=True)
class Assignment:
    """Which text each shard of a data folder has. It is sent with every task, so it must be small.

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
    shards_per_copy: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of each split that has documents
    documents: dict[str, int] = field(default_factory=dict)  # of each split, without those that are left out
    tokens: dict[str, int] = field(default_factory=dict)  # of these documents

    @property
    def shards(self) -> list[tuple[str, int]]:
        """The shards to build, as (split, number)."""
        return [(split, number) for split, copies in self.shards_per_copy.items() for number in range(sum(copies))]

    @property
    def records(self) -> Path:
        """The folder with the arrays of this assignment and the results of its finished shards.

        Its name differs for assignments with different shards. It does not depend on the paths of inputs.
        """
        input_keys = {"validation", "input_weights", "document_boundary", "max_record_bytes", "encoding"}
        config = self.config.model_dump(mode="json", exclude=input_keys)
        inputs = [self.first_documents, self.copies, self.num_training]
        content = [self.store.folder.name, self.tokenizer.hash, config, inputs, library_versions()]
        return self.output / f"{RECORDS}{json_digest(content)[:16]}"

    @property
    def max_tokens(self) -> int:
        """The maximum number of tokens of A and B together."""
        return self.config.max_seq_length - NUM_SPECIAL

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
        return rng.Permutation(max(1, num_documents), self.config.seed, "split")(positions)

    @property
    def left_out(self) -> np.ndarray:
        """The numbers of documents that are not used, ascending, and the number of all documents as a last element."""
        return np.asarray(np.load(self.records / LEFT_OUT, mmap_mode="r"))

    def is_left_out(self, numbers: np.ndarray) -> np.ndarray:
        """Return which documents are not used, (numbers,) bool."""
        left_out = self.left_out
        return left_out[np.searchsorted(left_out, numbers)] == numbers

    def inputs_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the input of each document, (numbers,)."""
        return np.searchsorted(self.first_documents, numbers, side="right") - 1

    def shard_slices(self, split: str, number: int) -> Slices:
        """Return the slices of a shard. There are none if all its documents are left out."""
        ends = np.cumsum(self.shards_per_copy[split])
        copy = int(np.searchsorted(ends, number, side="right"))
        num_shards = self.shards_per_copy[split][copy]
        place = number - int(ends[copy]) + num_shards  # in the copy
        _, num_slices = self._long_documents(split)
        num_positions = self.num_documents(split) + int((num_slices - 1).sum())
        # The name of a random stream decides the draws, so it must not change.
        permutation = rng.Permutation(
            num_positions,
            self.config.seed,
            "deal",
            split=split,
            copy=copy,
        )
        positions = np.arange(place * num_positions // num_shards, (place + 1) * num_positions // num_shards)
        slices = self.locate(split, permutation(positions))
        is_used = ~self.is_left_out(slices.document)
        if split == "train":
            copies_left = np.array(self.copies)[self.inputs_of(slices.document)] - copy
            is_used &= copies_left > rng.uniform(self.config.seed, "part of a copy", slices.document)
        return slices.take(is_used)

    def locate(self, split: str, positions: np.ndarray) -> Slices:
        """Return the slices at `positions` of a split."""
        long, num_slices = self._long_documents(split)
        num_documents = self.num_documents(split)
        is_other = positions >= num_documents  # not the first slice of its document
        others = positions[is_other] - num_documents
        offsets = ragged.offsets_of(num_slices - 1)  # of the other slices of each long document
        owners = np.searchsorted(offsets, others, side="right") - 1
        document = np.empty_like(positions)
        document[~is_other] = self.documents_at(split, positions[~is_other])
        document[is_other] = long[owners]
        place = np.zeros_like(positions)
        place[is_other] = 1 + others - offsets[owners]
        of_document = np.ones_like(positions)
        is_long = np.isin(document, long)
        of_document[is_long] = num_slices[np.searchsorted(long, document[is_long])]
        return Slices(document, place, num_slices=of_document)

    def _long_documents(self, split: str) -> np.ndarray:
        """Return the numbers of a split's long documents, ascending, and their numbers of slices, (2, documents)."""
        return np.load(self.records / f"long-{split}.npy")


def assign(
    store: TokenStore,
    counts: Sequence[dict[str, int]],
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    output: Path,
    config: DataConfig,
) -> tuple[Assignment, dict[str, int]]:
    """Leave out duplicates, hold out documents for validation, and compute the number of shards of each copy.

    `counts` are those of each source; validation sources come last. Returns the assignment, and the number of
    duplicates left out, by reason.
    """
    num_training_inputs = sum(not source.is_validation for source in sources)
    ends = np.cumsum([each["documents"] for each in counts])
    assignment = Assignment(
        store,
        tokenizer,
        output,
        config,
        first_documents=(0, *ends.tolist()),
        copies=tuple(0.0 if source.is_validation else config.dupe_factor * source.weight for source in sources),
        num_training=int(ends[num_training_inputs - 1]),
    )
    _open_records(assignment.records)
    duplicates = np.zeros(0, dtype=np.int64)
    reasons: Counter[str] = Counter()
    if config.drop_duplicates:
        duplicates, reasons = _find_duplicates(assignment, sources)
    _save(assignment.records / LEFT_OUT, np.append(duplicates, store.num_documents))
    if is_mix(sources, config) or assignment.num_training == store.num_documents:
        num_tokens = sum(each["tokens"] for each in counts[:num_training_inputs])
        num_held_out = _num_held_out(assignment, held_out_share(config, num_tokens))
        assignment = replace(assignment, num_held_out=num_held_out)
    held_out = np.sort(assignment.documents_at("validation", np.arange(assignment.num_documents("validation"))))
    used_held_out = held_out[~assignment.is_left_out(held_out)]
    held_out_tokens = _tokens_by_input(assignment, used_held_out)
    train_tokens = np.array([each["tokens"] for each in counts]) - _tokens_by_input(assignment, duplicates)
    train_tokens -= held_out_tokens
    _save_long_documents(assignment, held_out)
    shards = {"train": _shards_per_copy(assignment, train_tokens, np.array(assignment.copies))}
    if len(held_out):
        shards["validation"] = _shards_per_copy(assignment, held_out_tokens, np.ones(len(counts)))
    num_train = store.num_documents - len(duplicates) - len(used_held_out)
    assignment = replace(
        assignment,
        shards_per_copy=shards,
        documents={"train": num_train, "validation": len(used_held_out)},
        tokens={"train": int(train_tokens.sum()), "validation": int(held_out_tokens.sum())},
    )
    return assignment, dict(reasons)


def _open_records(records: Path) -> None:
    """Create the folder of records, and remove those of other assignments, as from before a library was upgraded."""
    for other in records.parent.glob(f"{RECORDS}*"):
        if other != records:
            shutil.rmtree(other)
    records.mkdir(parents=True, exist_ok=True)
    remove_temporaries(records)


def _save(path: Path, values: np.ndarray) -> None:
    buffer = io.BytesIO()
    np.save(buffer, values)  # on a full disk, it would not report that it cannot write to a file
    with atomic_path(path) as temporary:
        temporary.write_bytes(buffer.getbuffer())


def _tokens_by_input(assignment: Assignment, numbers: np.ndarray) -> np.ndarray:
    """Return the total tokens of documents by input, (inputs,). `numbers` must ascend."""
    _, tokens = assignment.store.sizes_of(numbers)
    totals = np.zeros(len(assignment.copies), dtype=np.int64)
    np.add.at(totals, assignment.inputs_of(numbers), tokens)
    return totals


def _shards_per_copy(assignment: Assignment, tokens: np.ndarray, copies: np.ndarray) -> tuple[int, ...]:
    """Return the number of shards of each copy, given the tokens and the copies of each input, both (inputs,)."""
    shard_tokens = assignment.max_tokens * assignment.config.examples_per_shard
    shares = [np.clip(copies - copy, 0, 1) for copy in range(math.ceil(copies.max()))]
    return tuple(max(1, round(float((tokens * share).sum()) / shard_tokens)) for share in shares)


def _save_long_documents(assignment: Assignment, held_out: np.ndarray) -> None:
    """Divide long documents into slices, and save the numbers of slices for each split.

    Small slices mix many documents in a shard. Slices of eight windows or more keep windows that end early rare.
    """
    max_tokens = assignment.max_tokens
    slice_tokens = min(1 << 15, max(8 * max_tokens, assignment.config.examples_per_shard * max_tokens // 16))
    long = assignment.store.documents_longer_than(slice_tokens)
    _, tokens = assignment.store.sizes_of(long)
    slices = np.stack([long, -(-tokens // slice_tokens)])
    is_held_out = np.isin(long, held_out)
    _save(assignment.records / "long-train.npy", slices[:, ~is_held_out])
    _save(assignment.records / "long-validation.npy", slices[:, is_held_out])


def _find_duplicates(assignment: Assignment, sources: Sequence[Source]) -> tuple[np.ndarray, Counter[str]]:
    """Return the duplicate documents to leave out, ascending, and their count by reason.

    Of equal documents, a held-out one is kept, or else the first one in the input with the greatest weight. Documents
    are compared by hash, bucket by bucket to bound memory.
    """
    store = assignment.store
    priorities = np.array([np.inf if source.is_validation else source.weight for source in sources])
    num_buckets = -(-store.num_documents // BUCKET_DOCUMENTS)
    duplicates = [np.zeros(0, dtype=np.int64)]
    reasons: Counter[str] = Counter()
    for bucket in range(num_buckets):
        numbers, hashes = _bucket(store, bucket, num_buckets)
        priority = priorities[assignment.inputs_of(numbers)]
        order = np.argsort(-priority, kind="stable")
        _, firsts = np.unique(hashes[order], return_index=True)
        duplicates.append(np.delete(numbers[order], firsts))
        is_held_out = np.isinf(priority)
        num_leaks = int(np.isin(hashes[~is_held_out], hashes[is_held_out]).sum())
        reasons["documents_also_in_validation"] += num_leaks
        reasons["duplicate_documents"] += len(duplicates[-1]) - num_leaks
    return np.sort(np.concatenate(duplicates)), +reasons


def _bucket(store: TokenStore, bucket: int, num_buckets: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers, ascending, and the hashes of the documents whose hash is in a bucket."""
    numbers: list[np.ndarray] = []
    hashes: list[np.ndarray] = []
    for index, first in enumerate(store.first_documents[:-1]):
        of_shard = store.map(index, "document_hashes")
        selected = np.flatnonzero(of_shard % np.uint64(num_buckets) == bucket)
        numbers.append(first + selected)
        hashes.append(of_shard[selected])
    return np.concatenate(numbers), np.concatenate(hashes)


def min_documents(config: DataConfig) -> int:
    """Return the minimum number of documents of a split: a random B comes from another document than A."""
    return 2 if config.next_sentence == "nsp" else 1


def held_out_share(config: DataConfig, num_tokens: float) -> float:
    """Return the share of the documents to hold out from training inputs with `num_tokens` tokens."""
    share = config.validation_fraction
    if share == DataConfig().validation_fraction:
        share = min(share, MAX_HELD_OUT_TOKENS / max(1, num_tokens))
    return share


def _num_held_out(assignment: Assignment, share: float) -> int:
    """Return the number of training documents for a share of them, but at least two.

    With fewer than `MIN_CORPUS_DOCUMENTS` documents, the minimum is what the objective needs (`min_documents`). The
    result is 0 if there are fewer than twice `min_documents`. Otherwise it is increased until enough held-out documents
    give examples.
    """
    needed = min_documents(assignment.config)
    num_documents = assignment.num_training
    limit = num_documents - needed
    if not share or limit < needed:
        return 0
    minimum = needed if num_documents < MIN_CORPUS_DOCUMENTS else 2
    num_held_out = min(max(minimum, round(share * num_documents)), limit)
    num_missing = needed  # hold out more documents until this number of them gives examples
    for first in range(0, limit, 1024):
        usable = np.flatnonzero(_gives_examples(assignment, np.arange(first, min(first + 1024, limit))))
        if len(usable) >= num_missing:
            return max(num_held_out, first + int(usable[num_missing - 1]) + 1)
        num_missing -= len(usable)
    return num_held_out


def _gives_examples(assignment: Assignment, positions: np.ndarray) -> np.ndarray:
    """Return which training documents are used and, if the objective needs that, can be divided into A and B."""
    numbers = assignment.documents_at("train", positions)
    is_used = ~assignment.is_left_out(numbers)
    if assignment.config.next_sentence != "none":
        ascending = np.argsort(numbers)
        sentences, tokens = assignment.store.sizes_of(numbers[ascending])
        is_used[ascending] &= (sentences > 1) | (tokens > assignment.max_tokens // 2)
    return is_used
