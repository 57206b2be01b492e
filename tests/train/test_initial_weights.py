"""Initial weights: from a teacher, with positional heads, and with token frequencies."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from bert_pretrain.config import ModelConfig
from bert_pretrain.errors import ConfigError, OutputError
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.examples.shards import read_shard
from bert_pretrain.model.bert import (
    BertForPreTraining,
    ElectraForPreTraining,
    Encoder,
    SelfAttention,
    make_network,
)
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.train.initial_weights import (
    UNSEEN_COUNT,
    start_from_cooccurrences,
    start_from_teacher,
    start_positional_heads,
    unigram_bias,
)
from tests.conftest import save_model
from tests.train.conftest import NO_DROPOUT, VOCAB_SIZE, Fit, assert_same_run, interrupted_copy, metrics, unmasked


def bert(seed: int, **sizes: Any) -> BertForPreTraining:
    """Return a small model with weights large enough that tokens differ."""
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    settings = {**NO_DROPOUT, **small, "max_position_embeddings": 32, "initializer_range": 0.3, **sizes}
    model = BertForPreTraining(ModelConfig.model_validate(settings), VOCAB_SIZE)
    model.initialize(seed)
    return model


def test_student_of_equal_width_copies_layers() -> None:
    teacher = bert(2, num_hidden_layers=6, intermediate_size=64)
    student = bert(1, num_hidden_layers=3, max_position_embeddings=16)
    assert "layers 1, 3, 6" in start_from_teacher(student, teacher)
    for name, parameter in student.named_parameters():
        source = name.replace(".layers.2.", ".layers.5.").replace(".layers.1.", ".layers.2.")
        expected = teacher.get_parameter(source)[tuple(map(slice, parameter.shape))]
        assert torch.equal(parameter, expected), name


def test_a_modernbert_without_biases_teaches_one_with_biases_and_a_narrower_gate() -> None:
    modern = {"architecture": "modernbert", **NO_DROPOUT}
    teacher = bert(2, biases=False, intermediate_size=64, **modern)
    student = bert(1, num_hidden_layers=3, **modern)
    assert "layers 1, 1, 2" in start_from_teacher(student, teacher)
    gates, expected = (model.encoder.layers[-1].wide_and_gate.weight.chunk(2) for model in (student, teacher))
    for gate, wider in zip(gates, expected, strict=True):
        assert torch.equal(gate, wider[:48])
    assert not student.encoder.layers[-1].wide_and_gate.bias.any()
    assert student.encoder.layers[1].attention_norm.weight.eq(1).all()


def test_narrower_student_keeps_token_similarities() -> None:
    student, teacher = bert(1, hidden_size=16), bert(2)
    rows = torch.randn(VOCAB_SIZE, 16) @ torch.randn(16, 32)  # of rank 16, so the projection is exact
    teacher.embeddings.word_embeddings.weight.data.copy_(rows)
    teacher.mlm_head.bias.data.normal_()
    before = student.encoder.layers[0].attention.output.weight.clone()  # type: ignore[union-attr]
    start_from_teacher(student, teacher)
    embeddings = student.embeddings.word_embeddings.weight
    expected, similarities = rows @ rows.T, embeddings @ embeddings.T
    torch.testing.assert_close(similarities / similarities.norm(), expected / expected.norm())
    assert embeddings.square().mean().sqrt().item() == pytest.approx(student.config.initializer_range, rel=1e-4)
    assert torch.equal(student.mlm_head.bias, teacher.mlm_head.bias)
    assert torch.equal(student.encoder.layers[0].attention.output.weight, before)  # type: ignore[union-attr]


@pytest.mark.parametrize("distillation", [False, True])
def test_student_resumes_bit_equal_after_its_teacher_has_moved(
    fit: Fit, tokenizer: Tokenizer, tmp_path: Path, capsys, distillation: bool
) -> None:
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    save_model(bert(2, hidden_size=64, num_hidden_layers=3), teacher, tokenizer)
    settings = {"log_every": 2, "distillation": distillation}
    fit("uninterrupted", teacher=str(teacher), **settings)
    assert "teacher" in capsys.readouterr().out
    run = interrupted_copy(tmp_path / "uninterrupted", tmp_path / "run", "step-00000012")
    moved = teacher.rename(tmp_path / "moved")
    fit(run, teacher=str(moved), **settings)
    assert_same_run(tmp_path / "uninterrupted", run)
    fit("other", init_from=run / "model", teacher=str(moved), max_steps=1, **settings)
    printed = capsys.readouterr().out
    assert "from the teacher" not in printed  # --init-from takes precedence
    assert ("; the teacher is not used" in printed) is not distillation
    with pytest.raises(OutputError, match="another command"):
        fit(run, log_every=2)


def attention_in_first_layer(
    model: BertForPreTraining, ids: torch.Tensor, encoder: Encoder | None = None
) -> torch.Tensor:
    """Return the attention probabilities, (heads, queries, keys), for one sequence."""
    encoder = encoder or model.encoder
    attention = next(module for module in encoder.modules() if isinstance(module, SelfAttention))
    inputs = encoder.projection(model.embeddings(ids, torch.zeros_like(ids), torch.arange(len(ids))))
    query, key, _ = attention.query_key_value(inputs).view(len(ids), 3, attention.num_heads, -1).unbind(1)
    return (torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5).softmax(-1)


@torch.no_grad()
@pytest.mark.parametrize(("hidden", "heads", "positions"), [(99, 3, 40), (768, 12, 512)])
def test_positional_heads_attend_to_their_offsets(hidden: int, heads: int, positions: int) -> None:
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": 2 * hidden}
    model = bert(3, **sizes, max_position_embeddings=positions, initializer_range=0.02).eval()
    start_positional_heads(model, 3)
    ids = torch.randint(0, VOCAB_SIZE, (positions,), generator=torch.Generator().manual_seed(1))
    shares = attention_in_first_layer(model, ids)
    for head, offset in zip(range(heads), (-1, 1, -2, 2, -3, 3, -4, 4, -5, 5, -6, 6), strict=False):
        assert torch.diagonal(shares[head], offset).mean() > 0.5, offset


@torch.no_grad()
@pytest.mark.parametrize("embedding", [64, 128])
def test_both_networks_of_an_electra_have_positional_heads(embedding: int) -> None:
    sizes = {
        "architecture": "electra", "hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2,
        "intermediate_size": 256, "embedding_size": embedding, "generator_size": 0.5, "max_position_embeddings": 64,
    }  # fmt: skip
    model = make_network(ModelConfig.model_validate({**sizes, **NO_DROPOUT}), VOCAB_SIZE, "padded")
    assert isinstance(model, ElectraForPreTraining)
    model.initialize(1)
    start_positional_heads(model, 3)
    ids = torch.randint(0, VOCAB_SIZE, (64,), generator=torch.Generator().manual_seed(1))
    for encoder, offsets in ((model.encoder, (-1, 1, -2, 2)), (model.generator, (-1, 1))):
        for share, offset in zip(attention_in_first_layer(model, ids, encoder), offsets, strict=True):
            assert torch.diagonal(share, offset).mean() > 0.5, offset


@pytest.mark.parametrize("heads", [1, 2])
def test_start_from_cooccurrences_predicts_from_neighbors(fit: Fit, heads: int, capsys) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": heads}
    run = fit(max_steps=1, init="cooccurrences", mlm_bias="unigram", model=sizes)
    assert "co-occurrences of 48 tokens" in capsys.readouterr().out
    other = fit("other", max_steps=1, init="positional_heads", mlm_bias="unigram", model=sizes)
    computed, random = metrics(run)[0], metrics(other)[0]  # before the first step
    assert computed["validation_mlm_accuracy"] > 0.2 > 0.04 > random["validation_mlm_accuracy"]
    assert computed["validation_mlm_loss"] < random["validation_mlm_loss"] - 0.1


@torch.no_grad()
def test_only_cls_attends_to_all_tokens_at_the_start_from_cooccurrences(data_folder: Path) -> None:
    data = DataFolder.open(data_folder)
    tokenizer = data.tokenizer()
    model = bert(3, hidden_size=64, num_attention_heads=4, initializer_range=0.02).eval()
    start_from_cooccurrences(model, data, tokenizer, 3)
    shares = attention_in_first_layer(model, torch.tensor([tokenizer.cls_id, *tokenizer.word_piece_ids[:31]]))
    assert shares[:, 0].max() < 3 / 32
    assert torch.diagonal(shares[1], 1)[1:].mean() > 0.5


@torch.no_grad()
def test_evidence_of_few_tokens_and_of_no_neighbors_keeps_random_weights(data_folder: Path) -> None:
    """Fewer tokens than dimensions, and offsets beyond all segments: no dimension becomes zero or large."""
    data = DataFolder.open(data_folder)
    for heads in (2, 96):  # 96 heads attend to offsets up to 48; segments have at most 14 tokens
        model = bert(1, hidden_size=96, num_attention_heads=heads, initializer_range=0.02)  # 48 tokens have vectors
        assert start_from_cooccurrences(model, data, data.tokenizer(), 1) == 48
        attention = model.encoder.layers[0].attention
        values = attention.query_key_value.weight[2 * 96 :]  # type: ignore[union-attr, index]
        for matrix in (values, attention.output.weight.T):  # type: ignore[union-attr, operator]
            assert (matrix.norm(dim=1) > 0.01).all()  # type: ignore[operator]
            assert torch.linalg.matrix_norm(matrix, 2) < 20.0  # type: ignore[arg-type]


def test_time_budget_shorter_than_the_start_is_an_error(fit: Fit, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no time is left"):
        fit(max_steps=None, time_budget=0.001)
    assert not (tmp_path / "run" / "manifest.json").exists()


def test_starts_from_cooccurrences_are_bit_equal(fit: Fit) -> None:
    assert_same_run(fit("first", max_steps=3, init="cooccurrences"), fit("second", max_steps=3, init="cooccurrences"))


def test_unigram_bias_is_the_log_frequency_before_masking(data_folder: Path) -> None:
    data = DataFolder.open(data_folder)
    tokenizer = data.tokenizer()
    bias = unigram_bias(data, tokenizer)
    ids = unmasked(read_shard(data_folder, data.shards("train")[0])).input_ids.astype(int)
    counts = torch.bincount(torch.from_numpy(ids), minlength=tokenizer.vocab_size)
    counts[[tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id]] = 0
    assert counts[tokenizer.mask_id] == 0
    counts = counts + UNSEEN_COUNT
    torch.testing.assert_close(bias, (counts / counts.sum()).log(), atol=1e-4, rtol=0, check_dtype=False)


def test_run_with_unigram_bias_starts_near_the_token_entropy(fit: Fit, data_folder: Path) -> None:
    data = DataFolder.open(data_folder)
    bias = unigram_bias(data, data.tokenizer()).double()
    entropy = -(bias.exp() * bias).sum().item()
    assert math.log(VOCAB_SIZE) - entropy > 0.5
    run = fit(max_steps=1, mlm_bias="unigram")
    assert metrics(run)[0]["validation_mlm_loss"] == pytest.approx(entropy, abs=0.35)
