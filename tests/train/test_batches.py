"""Batches: packed as the model reads them, each example once an epoch, any step at once."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_pretrain import rng
from bert_pretrain.errors import DataError
from bert_pretrain.examples.shards import DataFolder, read_shard
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.train.batches import Batch, cut, pack
from bert_pretrain.train.loader import Prefetcher, TrainingData
from bert_pretrain.train.loss import pretraining_loss
from tests.train.static_batches import cut_alike

CPU = torch.device("cpu")


def open_data(folder: Path, *, batch: int = 16, seed: int = 1, tokens: int = 256) -> TrainingData:
    return TrainingData(DataFolder.open(folder), seed=seed, global_batch_size=batch, micro_batch_tokens=tokens)


def sequences(batch: Batch) -> list[tuple[int, ...]]:
    """The real sequences of a batch; a dummy tail is left out."""
    bounds = batch.cu_seqlens[: batch.num_sequences + 1].tolist()
    return [tuple(batch.input_ids[a:b].tolist()) for a, b in itertools.pairwise(bounds)]


def assert_equal(left: Batch, right: Batch) -> None:
    for field in fields(Batch):
        a, b = getattr(left, field.name), getattr(right, field.name)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_packing_keeps_every_example(examples: Callable[..., Any]) -> None:
    table = examples(7)
    batch = pack(table)
    assert batch.num_sequences == 7
    assert batch.max_seqlen == table.lengths.max()
    assert cut(table, 10**6).sum_squared_lengths == (table.lengths**2).sum()
    for row in range(7):
        begin, end = batch.cu_seqlens[row : row + 2].tolist()
        length = end - begin
        assert (
            batch.input_ids[begin:end].tolist() == table.input_ids[table.offsets[row] : table.offsets[row + 1]].tolist()
        )
        assert batch.position_ids[begin:end].tolist() == list(range(length))
        b_start = int(table.segment_b_start[row])
        assert batch.token_type_ids[begin:end].tolist() == [0] * b_start + [1] * (length - b_start)
        mask = slice(table.masks.offsets[row], table.masks.offsets[row + 1])
        inside = (batch.masked_positions >= begin) & (batch.masked_positions < end)
        assert (batch.masked_positions[inside] - begin).tolist() == table.masks.positions[mask].tolist()
        assert batch.masked_labels[inside].tolist() == table.masks.original_ids[mask].tolist()
    assert (batch.input_ids[batch.masked_positions] == 103).all()
    assert batch.next_sentence_labels.tolist() == table.next_sentence_label.tolist()


def test_micro_batches_hold_the_budget_and_every_example_once(examples: Callable[..., Any]) -> None:
    table = examples(50)
    whole = cut(table, 100)
    assert all(batch.num_tokens <= 100 for batch in whole.micro_batches)
    assert sorted(row for batch in whole.micro_batches for row in sequences(batch)) == sorted(sequences(pack(table)))
    assert whole.num_predictions == sum(batch.num_predictions for batch in whole.micro_batches)
    assert whole.num_tokens == len(table.input_ids)
    assert [batch.num_sequences for batch in cut(table, 1).micro_batches] == [1] * 50  # a longer one is alone


def test_an_epoch_holds_every_example_once_and_epochs_differ(data_folder: Path) -> None:
    data = open_data(data_folder, batch=30)
    folder = DataFolder.open(data_folder)
    stored = Counter(
        row for record in folder.shards("train") for row in sequences(pack(read_shard(folder.path, record)))
    )
    orders = []
    for epoch in range(2):
        steps = [data.global_batch(step) for step in range(epoch * 12, epoch * 12 + 12)]
        rows = [row for step in steps for batch in step.micro_batches for row in sequences(batch)]
        assert Counter(rows) == stored
        orders.append(rows)
    assert orders[0] != orders[1]
    assert data.global_batch(0).num_sequences == 30
    assert open_data(data_folder, batch=1000).global_batch(0).num_sequences == 1000  # of 360 rows


def test_any_step_is_reached_at_once_and_the_order_depends_on_the_seed(data_folder: Path) -> None:
    walked = open_data(data_folder)
    steps = [walked.global_batch(step) for step in range(40)]
    for step in (39, 0, 23):
        for left, right in zip(
            open_data(data_folder).global_batch(step).micro_batches, steps[step].micro_batches, strict=True
        ):
            assert_equal(left, right)
    other = open_data(data_folder, seed=2).global_batch(0).micro_batches[0]
    assert sequences(other) != sequences(steps[0].micro_batches[0])


def test_a_batch_of_another_size_goes_on_where_the_last_one_ended(data_folder: Path) -> None:
    before = open_data(data_folder, batch=40)
    after = TrainingData(
        DataFolder.open(data_folder), seed=1, global_batch_size=80, micro_batch_tokens=700, first_step=3,
        first_example=120,
    )  # fmt: skip
    batches = [*(before.global_batch(step) for step in range(3)), *(after.global_batch(step) for step in (3, 4, 5))]
    seen = [row for batch in batches for micro in batch.micro_batches for row in sequences(micro)]
    whole = open_data(data_folder, batch=360).global_batch(0).micro_batches
    assert sorted(seen) == sorted(row for micro in whole for row in sequences(micro))
    assert after.epoch(6) == 1.0


def test_only_the_shards_of_a_batch_are_read(new_data_folder: Callable[..., Path]) -> None:
    folder = new_data_folder(shard_rows=(40, 40, 40))
    path = folder / f"train/{rng.stream(1, 'shard order', epoch=0).permutation(3)[0]:05d}.parquet"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    data = open_data(folder, batch=20)
    assert data.global_batch(2).num_sequences == 20  # rows 40 to 60 lie in the second shard
    with pytest.raises(DataError, match="SHA-256"):
        data.global_batch(0)


def test_the_reader_runs_ahead_in_order_and_stops(data_folder: Path) -> None:
    data = open_data(data_folder)
    asked: list[int] = []
    batches = (asked.append(step) or data.global_batch(step) for step in range(3, 90))
    with contextlib.closing(Prefetcher(batches, CPU)) as reader:
        for step in range(3, 6):
            for left, right in zip(next(reader).micro_batches, data.global_batch(step).micro_batches, strict=True):
                assert_equal(left, right)
    assert 3 <= len(asked) <= 10
    assert len(list(Prefetcher(data.batches(3, 9), CPU))) == 6


@pytest.mark.parametrize(
    ("rows", "budget", "ranks"), [(256, 2000, 1), (256, 2000, 3), (64, 700, 2), (10, 40, 4), (5, 1, 5)]
)
def test_micro_batches_for_a_compiler_have_few_shapes_and_hardly_a_tail(
    examples: Callable[..., Any], rows: int, budget: int, ranks: int
) -> None:
    shapes = set()
    for seed in range(6):
        table = examples(rows, seed)
        shares = [cut_alike(table, budget, 32, 16.5, rank, ranks) for rank in range(ranks)]
        micros = [micro for share in shares for micro in share.micro_batches]
        assert len({len(share.micro_batches) for share in shares}) == 1
        assert sum(micro.num_tokens for micro in micros) == len(table.input_ids)
        assert sorted(row for micro in micros for row in sequences(micro)) == sorted(sequences(pack(table)))
        assert len({micro.cu_seqlens.shape for micro in micros}) == 1
        for micro in micros:
            tokens, bounds = micro.input_ids.shape[0], micro.cu_seqlens
            assert tokens == bounds[-1] == len(micro.token_type_ids) == len(micro.position_ids)
            assert bounds.diff().min() >= 1
            assert bounds.diff().max() <= micro.max_seqlen
            tail_sequences = len(bounds) - 1 - micro.num_sequences
            assert tokens - micro.num_tokens <= 0.02 * sum(m.num_tokens for m in micros) / len(micros) + tail_sequences
            assert len(micro.masked_positions) >= micro.num_predictions
            shapes.add((tokens, len(bounds), micro.max_seqlen))
    assert len({(count, longest) for _, count, longest in shapes}) == 1
    if rows == 256:
        assert len({tokens for tokens, _, _ in shapes}) <= 25


def test_a_run_has_few_shapes_and_short_tails(data_folder: Path) -> None:
    data = open_data(data_folder, batch=64, tokens=512)
    micros = [micro for step in range(60) for micro in data.global_batch(step).micro_batches]
    for micro in micros:
        tokens, sequences_of_tail = len(micro.input_ids), len(micro.cu_seqlens) - 1 - micro.num_sequences
        assert tokens == micro.cu_seqlens[-1] == len(micro.token_type_ids) == len(micro.position_ids)
        assert tokens - micro.num_tokens <= 0.02 * 512 + sequences_of_tail
        assert 1 <= sequences_of_tail <= 2
        assert micro.cu_seqlens.diff().min() >= 1
        assert micro.cu_seqlens.diff().max() <= micro.max_seqlen
        assert 0 <= len(micro.masked_positions) - micro.num_predictions < 32
    exact = {(m.num_tokens, m.num_predictions, m.num_sequences) for m in micros}
    assert len({len(micro.input_ids) for micro in micros}) <= 512 // 8
    assert len({len(micro.masked_positions) for micro in micros}) <= 5
    assert len({(len(m.cu_seqlens), m.max_seqlen) for m in micros}) <= 40
    assert len(exact) > 150  # without tails nearly every micro-batch had another shape


@pytest.mark.parametrize("static_shapes", [False, True])
def test_ranks_share_a_global_batch_and_agree_on_its_numbers(data_folder: Path, static_shapes: bool) -> None:
    def of_rank(rank: int, ranks: int) -> Any:
        return TrainingData(
            DataFolder.open(data_folder), seed=1, global_batch_size=50, micro_batch_tokens=200, rank=rank,
            num_ranks=ranks, static_shapes=static_shapes,
        ).global_batch(7)  # fmt: skip

    whole = of_rank(0, 1)
    shares = [of_rank(rank, 3) for rank in range(3)]
    rows = [sorted(row for micro in share.micro_batches for row in sequences(micro)) for share in shares]
    assert sorted(row for share in rows for row in share) == sorted(
        row for micro in whole.micro_batches for row in sequences(micro)
    )
    assert len({len(share.micro_batches) for share in shares}) == 1
    for name in ("num_sequences", "num_pairs", "num_predictions", "num_tokens", "sum_squared_lengths"):
        assert {getattr(share, name) for share in shares} == {getattr(whole, name)}
    assert whole.num_predictions == sum(m.num_predictions for share in shares for m in share.micro_batches)


def test_one_tail_for_all_or_none_the_losses_are_the_same(
    examples: Callable[..., Any], tiny: Callable[..., Any]
) -> None:
    model = BertForPreTraining(tiny(model={"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}).model, 152)
    model.initialize(1)
    table = examples(40)
    found = []
    for batch in (cut(table, 300), cut_alike(table, 300, 32, 16.5)):
        model.zero_grad()
        parts = [pretraining_loss(model, micro) for micro in batch.micro_batches]
        total = sum((part.mean(batch.num_predictions, batch.num_pairs) for part in parts), torch.zeros(()))
        total.backward()
        correct = sum(int(part.mlm_correct) + int(part.nsp_correct) for part in parts)
        found.append((total.detach(), correct, [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-5)
