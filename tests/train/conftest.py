"""Fixtures with a synthetic language that is easy to learn: four topics of twelve words in a cyclic order.

A masked word is determined by its neighbors. B follows A if both have the same topic.
"""

import inspect
import itertools
import json
import multiprocessing
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bert_pretrain import ragged
from bert_pretrain.config import Config, DataConfig, TrainConfig
from bert_pretrain.examples.examples import Examples, Masks
from bert_pretrain.examples.shards import write_shard
from bert_pretrain.io.files import read_json
from bert_pretrain.io.manifest import Output
from bert_pretrain.make_data import summary
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.train.cuda_graph import StepGraphs
from bert_pretrain.train.hardware import activation_bytes_per_token, compile_layers, logits_bytes, state_bytes
from bert_pretrain.train.loss import PretrainingLoss
from bert_pretrain.train.optimizers import make_optimizers
from bert_pretrain.train.packing import (
    Batch,
    GlobalBatch,
    ShapeMultiples,
    assign_by_length,
    assign_evenly,
    global_batch_of,
)
from bert_pretrain.train.run import train
from bert_pretrain.train.signals import checkpoint_paths
from bert_pretrain.train.state import LossScale, StepSums, TrainState
from bert_pretrain.train.step import train_step
from tests.conftest import reopen

NUM_TOPICS, WORDS_PER_TOPIC = 4, 12
FIRST_WORD = 104
VOCAB_SIZE = FIRST_WORD + NUM_TOPICS * WORDS_PER_TOPIC
NewData = Fit = Callable[..., Path]
"""What the fixtures `new_data_folder` and `fit` are."""
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CLOCK_AND_MEMORY = dict.fromkeys(
    ["elapsed_seconds", "examples_per_second", "tokens_per_second", "data_wait_share", "peak_memory_bytes", "time"]
)


def make_tokenizer() -> Tokenizer:
    words = [f"{topic}{letter}" for topic in "wxyz" for letter in "abcdefghijkl"]
    tokens = ["[PAD]", *(f"[unused{number}]" for number in range(99)), "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    return Tokenizer(tokens, lowercase=True, strip_accents=None, handle_chinese_chars=True)


def make_examples(rows: int, seed: int | np.random.Generator = 0, max_seq_length: int = 32) -> Examples:
    """Draw examples of mixed lengths with unequal numbers of masks."""
    generator = np.random.default_rng(seed)
    columns: dict[str, list[Any]] = {"ids": [], "starts": [], "positions": [], "labels": []}
    next_sentence_label = generator.permutation(rows) % 2
    for label in next_sentence_label:
        len_a, len_b = generator.integers(3, (max_seq_length - 3) // 2 + 1, size=2)
        topic = int(generator.integers(NUM_TOPICS))
        other = (topic + int(generator.integers(1, NUM_TOPICS)) * int(label)) % NUM_TOPICS
        first, second = (
            FIRST_WORD
            + which * WORDS_PER_TOPIC
            + (generator.integers(WORDS_PER_TOPIC) + np.arange(n)) % WORDS_PER_TOPIC
            for which, n in ((topic, len_a), (other, len_b))
        )
        ids = np.concatenate([[101], first, [102], second, [102]])
        maskable = np.flatnonzero(ids >= FIRST_WORD)
        number = max(1, round(float(generator.uniform(0.1, 0.25)) * len(maskable)))
        positions = np.sort(generator.choice(maskable, number, replace=False))
        columns["labels"].append(ids[positions].copy())
        ids[positions] = 103
        columns["ids"].append(ids)
        columns["starts"].append(len_a + 2)
        columns["positions"].append(positions)
    return Examples(
        input_ids=np.concatenate(columns["ids"]).astype(np.uint16),
        offsets=ragged.offsets_of(np.array([len(ids) for ids in columns["ids"]])),
        segment_b_start=np.array(columns["starts"], dtype=np.uint16),
        masks=Masks(
            np.concatenate(columns["positions"]).astype(np.uint16),
            np.concatenate(columns["labels"]).astype(np.uint16),
            ragged.offsets_of(np.array([len(positions) for positions in columns["positions"]])),
        ),
        next_sentence_label=next_sentence_label.astype(np.uint8),
    )


def unmasked(examples: Examples) -> Examples:
    """The same examples before they were masked."""
    masks = examples.masks
    assert masks is not None
    ids = examples.input_ids.copy()
    ids[np.repeat(examples.offsets[:-1], np.diff(masks.offsets)) + masks.positions] = masks.original_ids
    return replace(examples, input_ids=ids, masks=None)


def make_data_folder(
    folder: Path,
    *,
    shard_rows: tuple[int, ...] = (150, 90, 120),
    validation_rows: int = 60,
    starts_word: Callable[[np.ndarray], np.ndarray] | None = None,
    **settings: Any,
) -> Path:
    """Write a data folder as stage 2 does; settings are those of the section `data`."""
    generator = np.random.default_rng(7)
    (folder / "tokenizer").mkdir(parents=True)
    tokenizer = make_tokenizer()
    tokenizer.save(folder / "tokenizer")
    config = DataConfig.model_validate({"max_seq_length": 32, **settings})
    splits: dict[str, Any] = {}
    counts: dict[str, np.ndarray] = {}
    for split, rows_of in (("train", shard_rows), ("validation", (validation_rows,) if validation_rows else ())):
        shards: list[dict[str, Any]] = []
        counts[split] = np.zeros(tokenizer.vocab_size, dtype=np.int64)
        for number, rows in enumerate(rows_of):
            examples = make_examples(rows, generator)
            if settings.get("next_sentence") == "none":
                lengths = examples.lengths.astype(np.uint16)
                examples = replace(examples, segment_b_start=lengths, next_sentence_label=None)
            if settings.get("masking") == "dynamic" and split == "train":
                examples = unmasked(examples)
                if starts_word is not None:
                    examples = replace(examples, starts_word=starts_word(examples.input_ids))
            counts[split] += summary.token_counts(examples, tokenizer)
            (folder / split).mkdir(parents=True, exist_ok=True)
            record = asdict(write_shard(folder, f"{split}/{number:05d}.parquet", examples))
            statistics = summary.measure(examples, tokenizer)
            shards.append({"record": record, "statistics": statistics})
        splits[split] = summary.join_split(shards, config)
        splits[split]["statistics"]["unigram_entropy"] = summary.unigram_entropy(counts[split], counts["train"])
    body = {
        "config": {"data": {"max_seq_length": 32, "language": "en", **settings}},
        "tokenizer": {"vocab_size": tokenizer.vocab_size, "hash": tokenizer.hash},
        "inputs": [],
        "corpus": {
            "documents": 40, "sentences": 800, "words": 16_000, "tokens": 16_000, "unk_share": 0.0, "inputs": [],
            "repairs_and_drops": {}, "left_out": {},
        },
        "splits": splits,
    }  # fmt: skip
    Output(folder, "data", {}).publish(body)
    return folder


def rows_of(micros: Iterable[Batch]) -> list[tuple[tuple[int, ...], ...]]:
    """Ids, token types and labels (-100 where nothing is predicted) of each sequence, without dummy tails."""
    found = []
    for micro in micros:
        labels = torch.full_like(micro.input_ids, -100)
        number = micro.num_predictions
        labels[micro.masked_positions[:number]] = micro.masked_labels[:number]
        for begin, end in itertools.pairwise(micro.cu_seqlens[: micro.num_sequences + 1].tolist()):
            columns = (micro.input_ids, micro.token_type_ids, labels)
            found.append(tuple(tuple(column[begin:end].tolist()) for column in columns))
    return found


def cut(examples: Examples, micro_batch_tokens: int, rank: int = 0, num_ranks: int = 1) -> GlobalBatch:
    """Divide a global batch by `assign_by_length` and return one rank's micro-batches, without tails."""
    assigned = assign_by_length(examples.lengths, micro_batch_tokens, rank, num_ranks)
    return global_batch_of(examples, assigned)


def cut_alike(
    examples: Examples, tokens: int, max_seq_length: int, mean_tokens: float, rank: int = 0, num_ranks: int = 1
) -> GlobalBatch:
    """One rank's micro-batches of nearly equal shape, as `TrainingData` cuts them with `static_shapes`."""
    assigned = assign_evenly(examples.lengths, tokens, rank, num_ranks)
    multiples = ShapeMultiples.for_equal_shares(len(examples), len(assigned) * num_ranks, max_seq_length, mean_tokens)
    return global_batch_of(examples, assigned, multiples)


def tiny(*, model: dict[str, Any] | None = None, **train: Any) -> Config:
    """Make the configuration of a tiny run on the CPU; keywords go into the section `train`."""
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
        "max_position_embeddings": 32,
    }  # fmt: skip
    settings = {
        "global_batch_size": 16, "micro_batch_tokens": 256, "max_steps": 12, "peak_lr": 1e-3, "precision": "fp32",
        "device": "cpu", "log_every": 5, "eval_every": 6, "save_every": 4,
    }  # fmt: skip
    return Config.model_validate({"model": {**sizes, **(model or {})}, "train": {**settings, **train}})


def without_pairs(batch: GlobalBatch) -> GlobalBatch:
    """Return the batch without next-sentence labels."""
    micro_batches = [replace(micro, next_sentence_labels=None) for micro in batch.micro_batches]
    return replace(batch, micro_batches=micro_batches, num_pairs=0)


def make_model(config: Config, attention: str = "padded") -> BertForPreTraining:
    model = BertForPreTraining(config.model, VOCAB_SIZE, attention=attention)
    model.initialize(1)
    return model


def estimate_memory(
    config: TrainConfig, model: BertForPreTraining, max_seq_length: int, micro_batch_tokens: int, *, dtype: torch.dtype
) -> int:
    """Estimate the peak memory of training, in bytes, from the terms that `choose_micro_batch_tokens` uses."""
    checkpointing = config.activation_checkpointing
    kept, backward, at_logits = activation_bytes_per_token(model, max_seq_length, dtype, checkpointing)
    # The logits of a block and the backward pass of a layer do not exist at the same time.
    with_logits = logits_bytes(model, dtype) + at_logits * micro_batch_tokens
    return state_bytes(config, model, dtype) + max(with_logits, (kept + backward) * micro_batch_tokens)


def make_state(
    config: Config,
    *,
    attention: str = "padded",
    compiled: bool = False,
    loss_scale: LossScale | None = None,
    device: str = "cpu",
) -> TrainState:
    model = make_model(config, attention).to(device)
    if compiled:
        compile_layers(model)
    network = PretrainingLoss(model, compiled=compiled)
    return TrainState(model, network, make_optimizers(model, config.train), loss_scale)


def step(
    state: TrainState,
    batch: GlobalBatch,
    number: int = 0,
    dtype: torch.dtype = torch.float32,
    rate: float = 1e-3,
    graphs: StepGraphs | None = None,
) -> None:
    state.network.train()
    config = TrainConfig(seed=1, max_grad_norm=1.0)
    train_step(state, batch, config, step=number, learning_rate=rate, dtype=dtype, graphs=graphs)


def take_steps(
    state: TrainState,
    batches: Iterable[GlobalBatch],
    dtype: torch.dtype = torch.float32,
    rates: Sequence[float] = (1e-3,),
    graphs: StepGraphs | None = None,
) -> list[StepSums]:
    """Take one step per batch, cycling through the learning rates, and return the metrics of each step."""
    metrics = []
    for number, batch in enumerate(batches):
        state.sums.zero_()
        step(state, batch, number, dtype, rates[number % len(rates)], graphs)
        metrics.append(StepSums.read(state.sums))
    return metrics


def metrics(run: Path, key: str = "step") -> list[dict[str, Any]]:
    """The lines of a run's metrics that have a key."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if key in line]


def status(run: Path) -> str:
    """How the last session of a run ended."""
    return str(read_json(run / "status.json")["status"])


def final_tensors(run: Path) -> dict[str, torch.Tensor]:
    newest = checkpoint_paths(run / "checkpoints")[-1]
    tensors = {**load_file(run / "model" / "model.safetensors"), **load_file(newest / "training_state.safetensors")}
    if (run / "generator").is_dir():  # of an ELECTRA
        weights = load_file(run / "generator" / "model.safetensors")
        tensors |= {f"generator/{name}": tensor for name, tensor in weights.items()}
    return tensors


def assert_same_run(left: Path, right: Path) -> None:
    torch.testing.assert_close(final_tensors(left), final_tensors(right), rtol=0, atol=0)
    lines = [[{**line, **CLOCK_AND_MEMORY} for line in metrics(run)] for run in (left, right)]
    assert lines[0] == lines[1]


def interrupted_copy(finished: Path, run: Path, *lost: str) -> Path:
    """Copy a finished run as if it had been killed before its end, without the named checkpoints."""
    shutil.copytree(finished, run)
    reopen(run)
    for folder in ("model", *(f"checkpoints/{name}" for name in lost)):
        shutil.rmtree(run / folder)
    return run


def flip_bit(path: Path, position: int = 1000) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Kill the processes that a failed test has left; pytest would wait for them."""
    yield
    for process in multiprocessing.active_children():
        process.kill()
        process.join()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: it is the fastest at these sizes, and parallel tests do not compete for cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train without matplotlib: drawing the curves of a run would take as long as its steps."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return make_tokenizer()


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data_folder(tmp_path_factory.mktemp("data") / "data")


@pytest.fixture
def new_data_folder(tmp_path: Path) -> NewData:
    """Return a function that makes a data folder, which the test may change."""
    return lambda name="data", **settings: make_data_folder(tmp_path / name, **settings)


@pytest.fixture
def fit(data_folder: Path, tmp_path: Path) -> Fit:
    """Train: `fit("name", max_steps=5, init_from=folder)`; keywords that `train` does not take go into the section."""
    of_train = inspect.signature(train).parameters

    def fit(output: str | Path = "run", data: Path = data_folder, **settings: Any) -> Path:
        options = {name: settings.pop(name) for name in of_train if name in settings}
        train(tiny(**settings), data, tmp_path / output, **options)
        return tmp_path / output

    return fit


@pytest.fixture(scope="session")
def finished(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One undisturbed run of twelve steps, not to be changed."""
    run = tmp_path_factory.mktemp("finished") / "run"
    assert train(tiny(), data_folder, run) == run / "model"
    return run


@pytest.fixture
def model(finished: Path, tmp_path: Path) -> Path:
    """The model of the finished run, to be changed."""
    folder = shutil.copytree(finished / "model", tmp_path / "model")
    (folder / "checksums.json").unlink()
    return folder
