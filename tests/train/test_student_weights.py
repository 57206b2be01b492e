"""A student with a teacher: first weights, whole runs, and what is refused."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bert_pretrain.config import Config, ModelConfig
from bert_pretrain.errors import DataError, OutputError
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.huggingface import save_model
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.train.run import train
from bert_pretrain.train.student_weights import start_from_teacher
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


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    save_model(bert(2, hidden_size=64, num_hidden_layers=3), folder, tokenizer)
    return folder


def test_a_student_continues_bit_for_bit_where_its_teacher_has_moved(
    tiny: Tiny, data_folder: Path, teacher_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny(teacher=str(teacher_folder), log_every=2), data_folder, tmp_path / "whole")
    out = capsys.readouterr().out
    assert "first weights from the teacher: token embeddings on 32 principal axes" in out
    assert f"teacher    {teacher_folder}, 3 layers of 64, 2 heads" in out

    # As killed after step 8.
    run = interrupted_copy(tmp_path / "whole", tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "step-00000012")
    moved = shutil.copytree(teacher_folder, tmp_path / "moved")
    train(tiny(teacher=str(moved), log_every=2), data_folder, run)
    assert "continues from step 8" in capsys.readouterr().out
    assert_same_run(tmp_path / "whole", run)
    with pytest.raises(OutputError, match="another command or configuration"):
        train(tiny(log_every=2), data_folder, run)


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
    other = Tokenizer([*tokenizer.tokens[:-1], "other"], lowercase=True, strip_accents=None, handle_chinese_chars=True)
    (tmp_path / "words").mkdir()
    save_model(bert(2), tmp_path / "words", other)
    with pytest.raises(DataError, match="is not that of the data"):
        train(tiny(teacher=str(tmp_path / "words")), data_folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()
