"""A micro-batch that does not fit into memory: halved, until one example does not fit; and evaluations of a part."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_pretrain.config import Config
from bert_pretrain.errors import ConfigError
from bert_pretrain.examples.shards import DataFolder, read_shard
from bert_pretrain.train.batches import Batch
from bert_pretrain.train.loader import evaluation_batches
from bert_pretrain.train.loss import PretrainingLoss
from bert_pretrain.train.run import train
from tests.train.test_resume import metrics

Tiny = Callable[..., Config]


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let training refuse micro-batches of more tokens than given, as a GPU does, from its third forward pass on."""
    forward, calls = PretrainingLoss.forward, 0

    def limit(tokens: int) -> None:
        def limited(self: PretrainingLoss, batch: Batch) -> Any:
            nonlocal calls
            calls += self.training
            if self.training and calls > 2 and batch.num_tokens > tokens:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return forward(self, batch)

        monkeypatch.setattr(PretrainingLoss, "forward", limited)

    return limit


def test_a_run_goes_on_with_half_micro_batches_to_the_same_losses(
    small_memory: Callable[[int], None],
    tiny: Tiny,
    data_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # its masks follow micro-batches
    config = tiny(model=dropout, micro_batch_tokens="auto")
    train(config, data_folder, tmp_path / "large")
    small_memory(200)
    train(config, data_folder, tmp_path / "small")
    assert "from now on" in capsys.readouterr().out
    small, large = metrics(tmp_path / "small"), metrics(tmp_path / "large")
    assert [line["step"] for line in small] == [line["step"] for line in large]
    assert small[-1]["validation_mlm_loss"] == pytest.approx(large[-1]["validation_mlm_loss"], rel=1e-4)
    states = sorted((tmp_path / "small" / "checkpoints").glob("*/training_state.json"))
    assert json.loads(states[-1].read_text())["micro_batch_tokens"] < 512


def test_where_one_example_does_not_fit_or_the_size_was_given_one_message_says_what_to_do(
    small_memory: Callable[[int], None], tiny: Tiny, data_folder: Path, tmp_path: Path
) -> None:
    small_memory(0)
    with pytest.raises(ConfigError, match="one example"):
        train(tiny(micro_batch_tokens="auto"), data_folder, tmp_path / "auto")
    with pytest.raises(ConfigError, match=r"train\.micro_batch_tokens"):
        train(tiny(micro_batch_tokens=64), data_folder, tmp_path / "given")


def test_an_evaluation_takes_some_rows_evenly_and_the_last_one_all(
    tiny: Tiny, new_data_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = new_data_folder(validation_rows=23)
    data = DataFolder.open(folder)
    rows = [read_shard(folder, record) for record in data.shards("validation")]
    assert sum(map(len, rows)) == 23
    few = list(evaluation_batches(data, "validation", 64, at_most=5))
    chosen = np.linspace(0, 23, 5, endpoint=False).astype(int)
    assert sum(batch.num_sequences for batch in few) == 5
    assert sum(batch.num_predictions for batch in few) == len(rows[0].take(chosen).masks.positions)
    whole = list(evaluation_batches(data, "validation", 64, at_most=100))
    assert sum(batch.num_sequences for batch in whole) == 23
    ranks = [list(evaluation_batches(data, "validation", 64, rank=rank, num_ranks=3)) for rank in range(3)]
    for number, batch in enumerate(whole):  # they take them in turns
        assert torch.equal(ranks[number % 3][number // 3].input_ids, batch.input_ids)
    assert sum(map(len, ranks)) == len(whole)
    runs = [train(tiny(eval_examples=size), folder, tmp_path / str(size)).parent for size in (5, None)]
    part, whole = (
        [line["validation_mlm_loss"] for line in metrics(run) if "validation_mlm_loss" in line] for run in runs
    )
    assert [a == b for a, b in zip(part, whole, strict=True)] == [False, False, True]
