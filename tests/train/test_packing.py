"""Global batches: packed, each example once per epoch, readable from any step."""

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.examples.masking import mask_examples
from bert_pretrain.examples.shards import read_shard
from bert_pretrain.rng import stream
from bert_pretrain.train.distributed import DistContext
from bert_pretrain.train.loader import Prefetcher, TrainingData
from bert_pretrain.train.loss import pretraining_loss
from bert_pretrain.train.packing import GlobalBatch, pack
from tests.train.conftest import (
    FIRST_WORD,
    NO_DROPOUT,
    NewData,
    cut,
    cut_alike,
    make_examples,
    make_model,
    rows_of,
    tiny,
)


def open_data(folder: Path, *, batch: int = 16, seed: int = 1, tokens: int = 256, **more: Any) -> TrainingData:
    return TrainingData(DataFolder.open(folder), seed=seed, global_batch_size=batch, micro_batch_tokens=tokens, **more)


def test_micro_batches_keep_the_budget_and_have_each_example_once() -> None:
    table = make_examples(50)
    whole = cut(table, 100)
    assert all(batch.num_tokens <= 100 for batch in whole.micro_batches)
    assert all(batch.max_seqlen == batch.cu_seqlens.diff().max() for batch in whole.micro_batches)
    assert sorted(rows_of(whole.micro_batches)) == sorted(rows_of([pack(table)]))
    assert pack(table).next_sentence_labels.tolist() == table.next_sentence_label.tolist()
    assert whole.num_predictions == sum(batch.num_predictions for batch in whole.micro_batches)
    assert whole.num_tokens == len(table.input_ids)
    alone = cut(table, 1).micro_batches  # each example is longer than the budget
    assert [batch.num_sequences for batch in alone] == [1] * 50


STORED_WORDS = {
    "whole_word_mask": True,
    "word_segmenter": "jieba",
    "starts_word": lambda ids: (ids >= FIRST_WORD) & (ids % 3 == 0),  # cannot be derived from the word pieces
}


@pytest.mark.parametrize(
    ("batch", "tokens", "settings"),
    [
        (30, 256, {"masking": "static"}),
        (30, 256, {"masking": "dynamic"}),
        (8, 40, {"masking": "dynamic", **STORED_WORDS}),
    ],
    ids=["static", "dynamic", "whole words"],
)
def test_each_epoch_has_every_example_once_in_a_new_order(
    new_data_folder: NewData, batch: int, tokens: int, settings: dict[str, Any]
) -> None:
    folder, masking = DataFolder.open(new_data_folder(**settings)), settings["masking"]
    data = open_data(folder.path, batch=batch, tokens=tokens)
    stored = [read_shard(folder.path, one) for one in folder.shards("train")]
    orders: dict[int, list[Any]] = {}
    for epoch in (1, 0):  # the second one first: epochs do not depend on each other
        expected = [
            examples
            if masking == "static"
            else mask_examples(examples, folder.tokenizer(), folder.config, stream(1, "mask", epoch=epoch, shard=shard))
            for shard, examples in enumerate(stored)
        ]
        num_steps = 360 // batch
        steps = [data.global_batch(step) for step in range(epoch * num_steps, (epoch + 1) * num_steps)]
        orders[epoch] = rows_of(micro for step in steps for micro in step.micro_batches)
        assert Counter(orders[epoch]) == Counter(rows_of(map(pack, expected)))
    assert orders[0] != orders[1]
    other = open_data(folder.path, batch=batch, tokens=tokens, seed=2).global_batch(0)
    assert rows_of(other.micro_batches) != orders[0][:batch]
    assert (len(set(orders[0]) & set(orders[1])) < 100) == (masking == "dynamic")
    assert open_data(folder.path, batch=1000).global_batch(0).num_sequences == 1000  # of 360 rows


def test_new_batch_size_continues_at_the_same_example(data_folder: Path) -> None:
    before = open_data(data_folder, batch=40)
    after = open_data(data_folder, batch=80, tokens=700, offset=3 * (40 - 80))
    batches = [*(before.global_batch(step) for step in range(3)), *(after.global_batch(step) for step in (3, 4, 5))]
    whole = open_data(data_folder, batch=360).global_batch(0)
    seen = rows_of(micro for batch in batches for micro in batch.micro_batches)
    assert sorted(seen) == sorted(rows_of(whole.micro_batches))
    assert after.epoch(6) == 1.0


def test_prefetcher_keeps_the_order_and_stops(data_folder: Path) -> None:
    data = open_data(data_folder)
    asked: list[int] = []
    batches = (asked.append(step) or data.global_batch(step) for step in range(3, 90))
    with contextlib.closing(Prefetcher(batches, torch.device("cpu"))) as reader:
        for step in range(3, 6):
            assert rows_of(next(reader).micro_batches) == rows_of(data.global_batch(step).micro_batches)
    assert 3 <= len(asked) <= 10
    assert len(list(Prefetcher(data.batches(3, 9), torch.device("cpu")))) == 6


@pytest.mark.parametrize(("rows", "budget", "ranks"), [(256, 2000, 3), (10, 40, 4), (5, 1, 5)])
def test_static_micro_batches_have_few_shapes_and_short_tails(rows: int, budget: int, ranks: int) -> None:
    shapes = set()
    for seed in range(6):
        table = make_examples(rows, seed)
        shares = [cut_alike(table, budget, 32, 16.5, rank, ranks) for rank in range(ranks)]
        micros = [micro for share in shares for micro in share.micro_batches]
        assert len({len(share.micro_batches) for share in shares}) == 1
        assert sorted(rows_of(micros)) == sorted(rows_of([pack(table)]))
        for micro in micros:
            tokens, bounds = len(micro.input_ids), micro.cu_seqlens
            assert tokens == bounds[-1] == len(micro.token_type_ids) == len(micro.position_ids)
            assert 1 <= bounds.diff().min() <= bounds.diff().max() <= micro.max_seqlen
            tail_sequences = len(bounds) - 1 - micro.num_sequences
            assert tokens - micro.num_tokens <= 0.02 * len(table.input_ids) / len(micros) + tail_sequences
            assert len(micro.masked_positions) >= micro.num_predictions
            assert micro.is_real.tolist() == [token < micro.num_tokens for token in range(tokens)]
            shapes.add((tokens, len(bounds), micro.max_seqlen))
    assert len({(count, longest) for _, count, longest in shapes}) == 1
    assert len({tokens for tokens, _, _ in shapes}) <= 25


@pytest.mark.parametrize("static_shapes", [False, True])
@pytest.mark.parametrize("masking", ["static", "dynamic"])
def test_ranks_share_a_global_batch_and_agree_on_its_counts(
    new_data_folder: NewData, masking: str, static_shapes: bool
) -> None:
    folder = new_data_folder(masking, masking=masking)

    def share(rank: int, ranks: int) -> GlobalBatch:
        ranks_of = {"dist_context": DistContext(rank, ranks), "static_shapes": static_shapes}
        return open_data(folder, batch=50, tokens=200, **ranks_of).global_batch(7)

    whole, shares = share(0, 1), [share(rank, 3) for rank in range(3)]
    assert sorted(row for one in shares for row in rows_of(one.micro_batches)) == sorted(rows_of(whole.micro_batches))
    assert len({len(share.micro_batches) for share in shares}) == 1
    for name in ("num_sequences", "num_pairs", "num_predictions", "num_tokens", "sum_squared_lengths"):
        assert {getattr(share, name) for share in shares} == {getattr(whole, name)}
    tokens = [sum(micro.num_tokens for micro in share.micro_batches) for share in shares]
    assert max(tokens) - min(tokens) <= 2 * 32


def test_losses_and_gradients_do_not_depend_on_micro_batches() -> None:
    model, table, results = make_model(tiny(model=NO_DROPOUT)), make_examples(32), []
    quarter = int(table.lengths.sum() / 4) + 20
    cuts = [cut(table, 10_000), cut(table, quarter), cut_alike(table, quarter, 32, 16.5)]
    assert len({micro.num_predictions / micro.num_sequences for micro in cuts[1].micro_batches}) == 4
    for batch in cuts:
        model.zero_grad()
        parts = [pretraining_loss(model, micro) for micro in batch.micro_batches]
        total = sum((part.mean(batch.num_predictions, batch.num_pairs) for part in parts), torch.zeros(()))
        total.backward()
        correct = sum(int(part.mlm_correct) + int(part.nsp_correct) for part in parts)
        results.append((total.detach(), correct, [p.grad.clone() for p in model.parameters()]))
    torch.testing.assert_close(results[1], results[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(results[2], results[0], atol=1e-6, rtol=1e-5)
