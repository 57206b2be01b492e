"""A student with a teacher: the relations' loss and its gradient, first weights, whole runs, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from bert_pretrain.config import Config, ModelConfig, TrainConfig
from bert_pretrain.errors import ConfigError, DataError, OutputError
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.huggingface import save_model
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.train import distillation
from bert_pretrain.train.batches import Batch, ShapeMultiples, cut, with_tail
from bert_pretrain.train.device.flops import batch_flops, teaching_flops
from bert_pretrain.train.device.memory import estimate_memory
from bert_pretrain.train.distillation import Teacher, num_relation_heads
from bert_pretrain.train.loss import PretrainingLoss
from bert_pretrain.train.run import train
from bert_pretrain.train.student_weights import spread, start_from_teacher
from tests.train.test_resume import assert_same_run, interrupted_copy

Tiny = Callable[..., Config]
VOCAB_SIZE = 152


def bert(seed: int, **sizes: int) -> BertForPreTraining:
    """A model without dropout, with weights large enough that tokens differ."""
    config = ModelConfig.model_validate(
        {
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
            "max_position_embeddings": 32, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0,
            "initializer_range": 0.3, **sizes,
        }
    )  # fmt: skip
    model = BertForPreTraining(config, VOCAB_SIZE)
    model.initialize(seed)
    return model


def plain_relation_loss(own: Tensor, target: Tensor, batch: Batch, num_heads: int) -> Tensor:
    """MiniLMv2's loss by its definition: a sequence, a vector and a head at a time, in fp64."""
    total = torch.zeros((), dtype=torch.float64)
    for begin, end in zip(batch.cu_seqlens[: batch.num_sequences], batch.cu_seqlens[1:], strict=False):
        for mine, theirs in zip(own[begin:end].chunk(3, 1), target[begin:end].chunk(3, 1), strict=True):
            for ours, others in zip(
                mine.double().chunk(num_heads, 1), theirs.double().chunk(num_heads, 1), strict=True
            ):
                log_own, log_target = (torch.log_softmax(x @ x.T / x.shape[1] ** 0.5, dim=1) for x in (ours, others))
                total = total + F.kl_div(log_own, log_target, reduction="sum", log_target=True) / num_heads
    return total


@pytest.mark.parametrize("block_scores", [1, 3000, 1 << 22])
@pytest.mark.parametrize("has_tail", [False, True])
def test_the_loss_and_its_gradient_are_those_of_the_definition(
    examples: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, block_scores: int, has_tail: bool
) -> None:
    monkeypatch.setattr(distillation, "BLOCK_SCORES", block_scores)
    monkeypatch.setattr(distillation, "RELATION_HEAD_SIZE", 8)
    student, teacher = bert(1), Teacher(bert(2, hidden_size=48, num_attention_heads=3, num_hidden_layers=3), 32)
    batch = cut(examples(9), 10**6).micro_batches[0]
    if has_tail:
        batch = with_tail(batch, ShapeMultiples(64, 32, 4, 8))
        assert len(batch.cu_seqlens) - 1 > batch.num_sequences
    _, own = student.forward_and_project(*batch.sequences, batch.masked_positions)
    own = own.detach().requires_grad_()
    expected = plain_relation_loss(own, teacher.network.project_last(*batch.sequences), batch, teacher.num_heads)
    (wanted,) = torch.autograd.grad(expected, own)
    found = teacher.relation_loss(own, batch)
    (gradient,) = torch.autograd.grad(2.0 * found, own)
    assert teacher.num_heads == 2
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert expected > 1.0
    torch.testing.assert_close(gradient, 2.0 * wanted, rtol=1e-3, atol=1e-6)


def test_a_student_equal_to_its_teacher_has_nothing_to_learn_from_it(examples: Callable[..., Any]) -> None:
    batch = cut(examples(5), 10**6).micro_batches[0]
    losses = PretrainingLoss(bert(1), teacher=Teacher(bert(1), 32)).train()
    relation_loss = losses(batch).relation_loss
    relation_loss.backward()
    assert relation_loss.item() == pytest.approx(0.0, abs=1e-5)
    assert max(p.grad.abs().max().item() for p in losses.parameters() if p.grad is not None) < 1e-6
    assert losses.eval()(batch).relation_loss is None


def test_the_teacher_is_frozen_and_without_dropout_and_no_parameter_of_the_student(
    examples: Callable[..., Any],
) -> None:
    network = bert(2, hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5)  # type: ignore[arg-type]
    losses = PretrainingLoss(bert(1), teacher=Teacher(network, 32)).train()
    batch = cut(examples(5), 10**6).micro_batches[0]
    first, second = losses(batch), losses(batch)
    first.mean(10, 5, batch.num_tokens).backward()
    assert torch.equal(first.relation_loss, second.relation_loss)
    assert {id(p) for p in losses.parameters()} == {id(p) for p in losses.model.parameters()}
    assert all(p.grad is None for p in network.parameters())


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_micro_batches_and_ranks_change_nothing_but_rounding(examples: Callable[..., Any], num_ranks: int) -> None:
    found = []
    for budget, ranks in ((10**6, 1), (100, num_ranks)):
        losses = PretrainingLoss(bert(1), teacher=Teacher(bert(2, hidden_size=64), 32)).train()
        total = torch.zeros(())
        for rank in range(ranks):
            batch = cut(examples(30), budget, rank, ranks)
            for micro in batch.micro_batches:
                part = losses(micro).mean(batch.num_predictions, batch.num_pairs, batch.num_tokens)
                part.backward()
                total += part.detach()
        found.append((total, [p.grad.clone() for p in losses.parameters() if p.grad is not None]))
    (loss, gradients), (other_loss, other_gradients) = found
    torch.testing.assert_close(loss, other_loss, rtol=1e-5, atol=0)
    for one, other in zip(gradients, other_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_student_computes_what_it_computes_without_a_teacher(
    examples: Callable[..., Any], checkpointing: bool
) -> None:
    batch = cut(examples(6), 10**6).micro_batches[0]
    model = bert(3, num_hidden_layers=3).train()
    model.encoder.activation_checkpointing = checkpointing
    plain = model(*batch.sequences, batch.masked_positions)
    (features, logits), projected = model.forward_and_project(*batch.sequences, batch.masked_positions)
    assert torch.equal(plain.mlm_features, features)
    assert torch.equal(plain.nsp_logits, logits)
    assert torch.equal(projected, model.project_last(*batch.sequences))
    (projected.square().sum() + features.sum()).backward()
    assert model.embeddings.word_embeddings.weight.grad is not None


def test_relation_heads_fit_any_two_widths() -> None:
    assert num_relation_heads(384, 768) == 12
    assert num_relation_heads(128, 256) == 4
    assert num_relation_heads(312, 768) == 1  # of the greatest common divisor, 24
    assert num_relation_heads(112, 112) == 2  # 3 would not divide it
    assert num_relation_heads(31, 768) == 1


def test_flops_are_those_that_torch_counts(examples: Callable[..., Any]) -> None:
    # One sequence, so that nothing is padded.
    batch = cut(examples(1), 10**6)
    micro, network = batch.micro_batches[0], bert(2, num_hidden_layers=3, hidden_size=64)
    own = bert(1).project_last(*micro.sequences).detach().requires_grad_()
    attention: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # torch counts it from 2.15 on
    formulas = {attention: lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)}
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        Teacher(network, 32).relation_loss(own, micro)
    counted = teaching_flops(network.config, 32, batch.num_tokens, batch.sum_squared_lengths)
    assert counted == counter.get_total_flops()
    student = bert(1).config
    both = batch_flops(batch, student, VOCAB_SIZE, network.config)
    assert both == batch_flops(batch, student, VOCAB_SIZE) + counted


def test_a_student_of_equal_width_starts_with_layers_of_its_teacher() -> None:
    teacher = bert(2, num_hidden_layers=6, intermediate_size=64)
    student = bert(1, num_hidden_layers=3, max_position_embeddings=16)
    assert "layers 1, 3, 6" in start_from_teacher(student, teacher)
    own, theirs = dict(student.named_parameters()), dict(teacher.named_parameters())
    for name, parameter in own.items():
        for mine, other in enumerate((0, 2, 5)):
            if f".layers.{mine}." in name:
                name = name.replace(f".layers.{mine}.", f".layers.{other}.")
                break
        expected = theirs[name][tuple(map(slice, parameter.shape))]
        assert torch.equal(parameter, expected), name


def test_a_teacher_of_equal_shape_is_copied_whole(examples: Callable[..., Any]) -> None:
    student, teacher = bert(1), bert(2)
    start_from_teacher(student, teacher)
    batch = cut(examples(4), 10**6).micro_batches[0]
    arguments = (*batch.sequences, batch.masked_positions)
    assert torch.equal(student(*arguments).mlm_features, teacher(*arguments).mlm_features)


def test_a_narrower_student_starts_with_the_likeness_of_tokens() -> None:
    student, teacher = bert(1, hidden_size=16), bert(2)
    rows = torch.randn(VOCAB_SIZE, 16) @ torch.randn(16, 32)  # of rank 16, so that nothing is lost
    teacher.embeddings.word_embeddings.weight.data.copy_(rows)
    teacher.mlm_head.bias.data.normal_()
    before = student.encoder.layers[0].attention.output.weight.clone()  # type: ignore[union-attr]
    start_from_teacher(student, teacher)
    found = student.embeddings.word_embeddings.weight
    expected = rows @ rows.T
    torch.testing.assert_close((found @ found.T) / (found @ found.T).norm(), expected / expected.norm())
    assert found.square().mean().sqrt().item() == pytest.approx(student.config.initializer_range, rel=1e-4)
    assert torch.equal(student.mlm_head.bias, teacher.mlm_head.bias)
    assert torch.equal(student.encoder.layers[0].attention.output.weight, before)  # type: ignore[union-attr]


def test_layers_are_spread_from_the_first_to_the_last() -> None:
    assert spread(6, 12) == [0, 2, 4, 7, 9, 11]
    assert spread(12, 12) == list(range(12))
    assert spread(2, 12) == [0, 11]
    assert spread(1, 12) == [0]


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    save_model(bert(2, hidden_size=64, num_hidden_layers=3), folder, tokenizer)
    return folder


def test_a_run_learns_the_relations_and_continues_bit_for_bit(
    tiny: Tiny, data_folder: Path, teacher_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(teacher=str(teacher_folder), log_every=2, peak_lr=5e-3)
    train(config, data_folder, tmp_path / "whole")
    assert "first weights from the teacher: token embeddings on 32 principal axes" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    relations = [line["relation_loss"] for line in lines if "relation_loss" in line]
    assert 0.0 < relations[-1] < 0.9 * relations[0]
    assert all(line["loss"] == pytest.approx(line["mlm_loss"] + line["nsp_loss"], rel=0.02) for line in lines[1:3])

    # As killed after step 8; the teacher has been moved meanwhile.
    run = interrupted_copy(tmp_path / "whole", tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "step-00000012")
    moved = shutil.copytree(teacher_folder, tmp_path / "moved")
    train(tiny(teacher=str(moved), log_every=2, peak_lr=5e-3), data_folder, run)
    assert "continues from step 8" in capsys.readouterr().out
    assert_same_run(tmp_path / "whole", run)
    with pytest.raises(OutputError, match="another command or configuration"):
        train(tiny(log_every=2, peak_lr=5e-3), data_folder, run)


def test_a_weight_of_zero_takes_the_first_weights_only(
    tiny: Tiny, data_folder: Path, teacher_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(teacher=str(teacher_folder), relation_weight=0, max_steps=5)
    train(config, data_folder, tmp_path / "run")
    out = capsys.readouterr().out
    assert "2 heads, first weights only" in out
    assert "first weights from the teacher" in out
    assert "relation_loss" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(OutputError, match="another command or configuration"):
        train(tiny(teacher=str(teacher_folder), max_steps=5), data_folder, tmp_path / "run")


def test_the_weight_multiplies_the_loss(examples: Callable[..., Any]) -> None:
    batch = cut(examples(5), 10**6).micro_batches[0]
    once, thrice = (
        PretrainingLoss(bert(1), teacher=Teacher(bert(2), 32, weight)).train()(batch) for weight in (1.0, 3.0)
    )
    assert thrice.relation_loss.item() == pytest.approx(3.0 * once.relation_loss.item(), rel=1e-6)
    assert (thrice.mean(10, 5, 100) - once.mean(10, 5, 100)).item() == pytest.approx(
        0.02 * once.relation_loss.item(), rel=1e-3
    )


def test_another_teacher_is_another_run(
    tiny: Tiny, data_folder: Path, teacher_folder: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    train(tiny(teacher=str(teacher_folder), max_steps=1), data_folder, tmp_path / "run")
    (tmp_path / "other").mkdir()
    save_model(bert(3), tmp_path / "other", tokenizer)
    with pytest.raises(OutputError, match="teacher"):
        train(tiny(teacher=str(tmp_path / "other"), max_steps=1), data_folder, tmp_path / "run")


def test_init_from_decides_the_first_weights(
    tiny: Tiny, data_folder: Path, teacher_folder: Path, finished: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    config = tiny(teacher=str(teacher_folder), max_steps=1)
    train(config, data_folder, tmp_path / "run", init_from=finished / "model")
    out = capsys.readouterr().out
    assert "weights from" in out
    assert "first weights from the teacher" not in out


def test_a_teacher_that_does_not_fit_is_refused(
    tiny: Tiny, data_folder: Path, teacher_folder: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (tmp_path / "short").mkdir()
    save_model(bert(2, max_position_embeddings=16), tmp_path / "short", tokenizer)
    with pytest.raises(ConfigError, match="the teacher has 16 positions, the data up to 32"):
        train(tiny(teacher=str(tmp_path / "short")), data_folder, tmp_path / "run")
    other = Tokenizer([*tokenizer.tokens[:-1], "other"], lowercase=True, strip_accents=None, handle_chinese_chars=True)
    (tmp_path / "words").mkdir()
    save_model(bert(2), tmp_path / "words", other)
    with pytest.raises(DataError, match="is not that of the data"):
        train(tiny(teacher=str(tmp_path / "words")), data_folder, tmp_path / "run")
    with pytest.raises(DataError, match="there is no folder"):
        train(tiny(teacher=str(tmp_path / "nowhere")), data_folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_memory_of_a_teacher_is_estimated() -> None:
    with torch.device("meta"):
        sizes = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
        student, teacher = bert(1), BertForPreTraining(ModelConfig(**sizes), VOCAB_SIZE)  # type: ignore[arg-type]
    alone, taught = (
        estimate_memory(TrainConfig(), student, 128, 1000, dtype=torch.float32, teacher=each)
        for each in (None, teacher)
    )
    assert taught.state - alone.state == 4 * teacher.num_parameters
    assert taught.activations - alone.activations >= 1000 * 4 * (3 * 768 + 2 * 3072)


def test_the_dry_run_counts_the_teacher(
    tiny: Tiny, data_folder: Path, teacher_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny(teacher=str(teacher_folder)), data_folder, tmp_path / "run", dry_run=True)
    out = capsys.readouterr().out
    assert f"teacher    {teacher_folder}, 3 layers of 64, 2 heads, relations with a weight of 1" in out
    assert not (tmp_path / "run").exists()
