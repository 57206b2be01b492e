"""The loss of a student against a teacher equals a plain one with the networks of `transformers`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining

from bert_pretrain.config import Config, DataConfig
from bert_pretrain.errors import ConfigError, DataError
from bert_pretrain.examples.examples import IGNORE_INDEX
from bert_pretrain.examples.padded import pad
from bert_pretrain.io.files import read_json
from bert_pretrain.model.huggingface import to_huggingface
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.train.decoder_loss import Targets, TeacherLayer, decoder_loss
from bert_pretrain.train.distillation import DistillationLoss
from bert_pretrain.train.loss import Counts
from bert_pretrain.train.packing import ShapeMultiples, pack
from bert_pretrain.train.run import train
from bert_pretrain.train.sampled_softmax import Candidates, CandidateSampler, sampled_softmax_loss
from tests.conftest import run_stages, save_model
from tests.model.conftest import make_model
from tests.train.conftest import NO_DROPOUT, Fit, NewData, make_examples, metrics, tiny
from tests.train.test_distributed import on_two_ranks

VOCABULARY = 300


def layers(rows: int = 50) -> tuple[list[Tensor], TeacherLayer, Targets]:
    """Return features, matrix and bias of a student, with gradients, the layer of a wider teacher, and its features."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    student = [normal(rows, 16), 0.3 * normal(VOCABULARY, 16), normal(VOCABULARY)]
    teacher = TeacherLayer(0.3 * normal(VOCABULARY, 24), normal(VOCABULARY), torch.zeros(VOCABULARY))
    labels = torch.randint(0, VOCABULARY, (rows,), generator=generator)
    labels[-3:] = IGNORE_INDEX
    return [each.requires_grad_() for each in student], teacher, Targets(labels, teacher_features=normal(rows, 24))


def plain(logits: Tensor, teacher_logits: Tensor, labels: Tensor, correction: Tensor | float = 0.0) -> list[Tensor]:
    """Return the summed losses against the labels and against the teacher; `correction` is the candidates' weight."""
    mlm = F.cross_entropy(logits + correction, labels, reduction="sum")
    softened = [(each / 2 + correction)[labels >= 0].log_softmax(1) for each in (logits, teacher_logits)]
    return [mlm, 4 * F.kl_div(*softened, reduction="sum", log_target=True)]


def check(ours: tuple[Tensor, ...], expected: list[Tensor], student: list[Tensor], tolerance: float = 1e-5) -> None:
    """Compare both sums, and the gradients of 2 * masked tokens + 5 * distillation."""
    for our, their in zip((ours[0], ours[2]), expected, strict=True):
        torch.testing.assert_close(our, their, atol=tolerance, rtol=tolerance)
    gradients = torch.autograd.grad(2 * (ours[0] + 2.5 * ours[2]), student)
    their_gradients = torch.autograd.grad(2 * expected[0] + 5 * expected[1], student)
    for gradient, their in zip(gradients, their_gradients, strict=True):
        torch.testing.assert_close(gradient, their, atol=tolerance * max(1.0, float(their.abs().max())), rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [50, 200])
def test_losses_and_gradients_equal_kl_divergence(dtype: torch.dtype, rows: int) -> None:
    student, teacher, targets = layers(rows)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        ours = decoder_loss(*student, targets, teacher=teacher)
    assert targets.teacher_features is not None
    teacher_logits = F.linear(targets.teacher_features, teacher.weight, teacher.bias)
    expected = plain(F.linear(*student), teacher_logits, targets.labels)
    check(ours, expected, student, 1e-5 if dtype == torch.float32 else 0.03)


def test_candidates_are_weighted_in_both_distributions() -> None:
    student, teacher, targets = layers()
    frequencies = np.random.default_rng(0).pareto(1.0, VOCABULARY) + 0.01
    sampler = CandidateSampler(frequencies, 100, seed=0)
    student[2].data.copy_(torch.from_numpy(np.log(frequencies)))
    teacher = teacher._replace(bias=2 * student[2].detach())
    assert targets.teacher_features is not None
    teacher_logits = F.linear(targets.teacher_features, teacher.weight, teacher.bias)
    exact = plain(F.linear(*student), teacher_logits, targets.labels)[1]
    estimates = []
    for step in range(300):
        candidates = sampler.draw(step)
        ours = sampled_softmax_loss(*student, targets, candidates, teacher=teacher)
        estimates.append(ours[2].item())
        if step < 3:
            # The same on the whole vocabulary: other tokens have the weight 0, and the label 1.
            weights = torch.full((len(targets.labels), VOCABULARY), -1e9)
            weights[:, candidates.token_ids] = -candidates.log_probabilities
            weights.scatter_(1, targets.labels.clamp(min=0)[:, None], 0.0)
            check(ours, plain(F.linear(*student), teacher_logits, targets.labels, weights), student)
    assert np.mean(estimates) == pytest.approx(exact.item(), rel=0.01)  # without the weights: 176 instead of 222


def test_all_tokens_as_candidates_give_the_exact_loss() -> None:
    student, teacher, targets = layers()
    candidates = Candidates(torch.arange(VOCABULARY), torch.zeros(VOCABULARY))
    exact = decoder_loss(*student, targets, teacher=teacher)
    sampled = sampled_softmax_loss(*student, targets, candidates, teacher=teacher)
    torch.testing.assert_close(sampled, exact, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("sizes", [{}, {"hidden_size": 48}, {"architecture": "modernbert"}])
def test_loss_and_gradients_equal_transformers(sizes: dict[str, Any], tokenizer: Tokenizer, tmp_path: Path) -> None:
    model, teacher = make_model(seed=1), make_model(dropout=0.5, seed=2, num_hidden_layers=3, **sizes).eval()
    examples = make_examples(5, 0, max_seq_length=24)
    padded = pad(examples, 0, int(examples.lengths.max()))
    is_real = padded["attention_mask"].bool()
    labels = padded["labels"][is_real]
    inputs = {name: padded[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    peers: list[Any] = []
    for kind, ours in ((AutoModelForPreTraining, model), (AutoModelForMaskedLM, teacher)):
        save_model(ours, tmp_path, tokenizer)
        peers.append(kind.from_pretrained(tmp_path, attn_implementation="eager").eval())
    peer, peer_teacher = peers
    theirs = peer(**padded, output_hidden_states=True)
    with torch.no_grad():
        if "architecture" in sizes:
            del inputs["token_type_ids"]
        taught = peer_teacher(**inputs, output_hidden_states=True)
    mlm, kl = plain(theirs.prediction_logits[is_real], taught.logits[is_real], labels)
    number = int((labels >= 0).sum())
    nsp = F.cross_entropy(theirs.seq_relationship_logits, padded["next_sentence_label"])
    expected = 5 * kl / number + 2 * mlm / number + nsp
    hidden = [output.hidden_states[-1][is_real] for output in (theirs, taught)]
    if "hidden_size" not in sizes:
        expected = expected + F.cosine_embedding_loss(*hidden, torch.ones(len(hidden[0])))

    losses = DistillationLoss(model, teacher)
    assert not {name for name in losses.state_dict() if "teacher" in name}
    packed = pack(examples, ShapeMultiples(64, masked=8, sequences=4, max_seqlen=8, with_labels=True))
    counts = Counts(*(torch.tensor(count) for count in (packed.num_predictions, 5, packed.num_tokens)))
    loss = losses.mean(losses(packed), counts)
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    loss.backward()
    expected.backward()
    gradients = to_huggingface({name: p.grad for name, p in model.named_parameters()}, "bert")
    for name, parameter in peer.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=2e-5, rtol=1e-5, msg=name)


@pytest.fixture
def teacher(tokenizer: Tokenizer, tmp_path: Path) -> str:
    folder = tmp_path / "teacher"
    folder.mkdir()
    save_model(make_model(seed=2, num_hidden_layers=3, hidden_size=36, max_position_embeddings=32), folder, tokenizer)
    return str(folder)


def test_run_logs_the_losses_and_its_records_name_the_teacher(fit: Fit, teacher: str, finished: Path, capsys) -> None:
    run = fit(teacher=teacher, distillation=True, max_steps=40, log_every=1, peak_lr=5e-3)
    printed = capsys.readouterr().out
    assert "distributions (hidden states have another width)" in printed
    lines = metrics(run, "loss")
    assert lines[-1]["distillation_loss"] < 0.8 * lines[0]["distillation_loss"]
    for line in lines:
        assert "hidden_loss" not in line
        total = 2 * line["mlm_loss"] + 5 * line["distillation_loss"] + line["nsp_loss"]
        assert line["loss"] == pytest.approx(total, rel=1e-6)
    assert f"| teacher | {Path(teacher).name}, also in the loss |" in (run / "model" / "README.md").read_text()
    assert not [name for line in metrics(run, "validation_mlm_loss") for name in line if "distillation" in name]
    manifests = [read_json(folder / "manifest.json") for folder in (run, finished)]
    # A run without distillation has the identity of one of an earlier version, which it can therefore resume.
    assert [manifest["identity"]["train"].get("distillation") for manifest in manifests] == [True, None]
    assert manifests[0]["config"]["train"]["teacher"] == teacher


def test_teacher_that_does_not_fit_is_refused(
    fit: Fit, teacher: str, tokenizer: Tokenizer, new_data_folder: NewData, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="distillation needs a teacher"):
        Config.model_validate({"train": {"distillation": True}})
    short = tmp_path / "short"
    short.mkdir()
    save_model(make_model(max_position_embeddings=24), short, tokenizer)
    fit("first weights", teacher=str(short), max_steps=1)
    with pytest.raises(ConfigError, match="up to 32 tokens, but the teacher has only 24 positions"):
        fit(teacher=str(short), distillation=True)
    other = new_data_folder("other")
    (other / "tokenizer" / "vocab.txt").write_text("\n".join(tokenizer.tokens[:-1]))
    (other / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(DataError):
        fit(data=other, teacher=teacher, distillation=True)


def test_two_ranks_match_one(data_folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = tmp_path / "teacher"
    folder.mkdir()
    save_model(make_model(seed=2, max_position_embeddings=32), folder, tokenizer)
    # 15 examples give the ranks shares and micro-batches of different sizes.
    config = tiny(
        model=NO_DROPOUT, teacher=str(folder), distillation=True, softmax_candidates=20,
        max_steps=4, log_every=1, global_batch_size=15, micro_batch_tokens=90,
    )  # fmt: skip
    on_two_ranks(train, config, data_folder, tmp_path / "two")
    train(config, data_folder, tmp_path / "one")
    for one, two in zip(*(metrics(tmp_path / name, "hidden_loss") for name in ("one", "two")), strict=True):
        for name in ("loss", "mlm_loss", "nsp_loss", "distillation_loss", "hidden_loss", "grad_norm"):
            assert one[name] == pytest.approx(two[name], rel=1e-5), name


def test_run_of_all_stages_takes_the_vocabulary_of_the_teacher(
    teacher: str, tokenizer: Tokenizer, english_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(teacher=teacher, distillation=True, max_steps=2)
    data = DataConfig(max_seq_length=32, dupe_factor=1)
    config = config.model_copy(update={"inputs": (str(english_text),), "data": data})
    model = run_stages(config, tmp_path / "out")
    assert Tokenizer.load(model, "MODEL").tokens == tokenizer.tokens
    assert not (tmp_path / "out" / "vocab").exists()
    assert run_stages(config, tmp_path / "out") == model
    assert "up to date" in capsys.readouterr().out


@pytest.mark.parametrize("pair", [("bert", "modernbert"), ("modernbert", "bert")])
def test_teacher_of_another_architecture_gives_embeddings(
    fit: Fit, new_data_folder: NewData, tokenizer: Tokenizer, tmp_path: Path, pair: tuple[str, str], capsys
) -> None:
    folder = tmp_path / "teacher"
    folder.mkdir()
    save_model(make_model(architecture=pair[1], max_position_embeddings=32), folder, tokenizer)
    data = new_data_folder("tokens", next_sentence="none", masking="dynamic")
    settings = {"teacher": str(folder), "distillation": True, "softmax_candidates": 20, "max_steps": 2}
    run = fit(data=data, model={"architecture": pair[0]}, **settings, log_every=1)
    assert "token embeddings on 32 principal axes" in capsys.readouterr().out
    line = metrics(run, "loss")[-1]
    total = 2 * line["mlm_loss"] + 5 * line["distillation_loss"] + line["hidden_loss"]
    assert line["loss"] == pytest.approx(total, rel=1e-6)
