"""Sentence vectors learn what can be learned from texts and pairs, and `sentence-transformers` opens them."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy import stats
from sentence_transformers import SentenceTransformer

from bert_pretrain.config import TrainConfig
from bert_pretrain.finetune import training
from bert_pretrain.finetune.classify import Example
from bert_pretrain.finetune.inputs import LabelledInput
from bert_pretrain.finetune.run import finetune
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.similarity import Comparison, Similarity
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.tools.embed import embed
from bert_pretrain.train.device import hardware
from tests.finetune.conftest import FILLERS

FAST: dict[str, Any] = {"learning_rate": 3e-3, "batch_size": 16}
PAIRS: dict[str, Any] = {"text_field": "a", "pair_field": "b"}
ENGLISH, OTHERS = ["film", "book", "day", "good", "bad"], ["anna", "berlin", "paris", "fine", "poor"]


def translations(count: int, seed: int) -> list[dict[str, Any]]:
    """Return pairs of texts without a word in common, each word of one standing for one of the other."""
    draw = random.Random(seed)
    chosen = [draw.sample(range(5), 3) for _ in range(count)]
    return [{"a": " ".join(ENGLISH[i] for i in each), "b": " ".join(OTHERS[i] for i in each)} for each in chosen]


def scored(count: int, seed: int) -> list[dict[str, Any]]:
    """Return pairs of texts with the share of words that have their translation in the other text."""
    left, right = translations(count, seed), translations(count, seed + 100)
    seconds = [one["b"] if i % 2 else two["b"] for i, (one, two) in enumerate(zip(left, right, strict=True))]
    return [
        {"a": one["a"], "b": second, "label": len({*one["b"].split()} & {*second.split()}) / 3}
        for one, second in zip(left, seconds, strict=True)
    ]


def results(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    lines = (folder / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    return json.loads((folder / "metrics.json").read_text()), [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def paired(tmp_path_factory: pytest.TempPathFactory, toy_model: Path, as_jsonl) -> Path:
    """A model trained on pairs that mean the same."""
    place = tmp_path_factory.mktemp("paired")
    train = as_jsonl(place / "train.jsonl", translations(120, 1))
    test = as_jsonl(place / "test.jsonl", translations(40, 2))
    settings = Settings(**FAST, **PAIRS, epochs=3, max_length=16)
    return finetune(
        "similarity", toy_model, train=train, test=test, output=place / "o", settings=settings, device="cpu"
    )


def test_pairs_that_mean_the_same_are_found_among_all(paired: Path) -> None:
    report, predictions = results(paired)
    assert report["rows"] == {"train": 108, "validation": 12, "test": 40}
    assert report["main_metric"] == "mrr"
    assert report["test"]["mrr"] == pytest.approx(np.mean([1 / line["rank"] for line in predictions]))
    assert report["test"]["mrr"] > 0.7  # by chance 0.16
    best = max(report["epochs"], key=lambda epoch: epoch["eval_mrr"])
    assert report["best_epoch"] == best["epoch"]
    assert not report["warning"]


def test_the_library_and_embed_give_the_vectors_of_the_predictions(paired: Path, tmp_path: Path) -> None:
    _, predictions = results(paired)
    model = SentenceTransformer(str(paired), device="cpu")
    assert model.max_seq_length == 16
    first, second = (model.encode([line[key] for line in predictions]) for key in ("text", "pair"))
    cosines = model.similarity_pairwise(first, second).numpy()
    np.testing.assert_allclose(cosines, [line["prediction"] for line in predictions], atol=2e-6)
    texts = [*(line["text"] for line in predictions), "film book day " * 8]  # the last is truncated
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n")
    embed(paired, [str(tmp_path / "texts.txt")], tmp_path / "v.npy", config=TrainConfig(precision="fp32"))
    np.testing.assert_allclose(np.load(tmp_path / "v.npy"), model.encode(texts), atol=2e-5)


def test_the_card_names_the_library_that_opens_it(paired: Path) -> None:
    card = (paired / "README.md").read_text()
    assert "library_name: sentence-transformers" in card
    assert 'model = SentenceTransformer("path/to/this/folder")' in card
    assert "transformers import BertModel" not in card


def test_scores_are_learned_and_correlated_as_scipy_does(toy_model: Path, tmp_path: Path, as_jsonl) -> None:
    train, test = as_jsonl(tmp_path / "train.jsonl", scored(160, 1)), as_jsonl(tmp_path / "test.jsonl", scored(60, 2))
    settings = Settings(**FAST, **PAIRS, epochs=3)
    output = finetune("similarity", toy_model, train=train, test=test, output=tmp_path / "o", settings=settings)
    report, predictions = results(output)
    truth, found = ([line[key] for line in predictions] for key in ("label", "prediction"))
    assert report["test"]["spearman"] == pytest.approx(stats.spearmanr(truth, found).statistic, abs=1e-5)
    assert report["test"]["spearman"] > 0.5


def test_pairs_without_scores_are_scored_only_where_training_had_none(
    toy_model: Path, tmp_path: Path, as_jsonl
) -> None:
    rows = {"scores": scored(10, 1), "pairs": translations(10, 1)}
    locations = {kind: as_jsonl(tmp_path / f"{kind}.jsonl", each) for kind, each in rows.items()}
    for kind, is_scored in (("scores", False), ("pairs", True)):
        task = Similarity(Settings(**PAIRS), Tokenizer.load(toy_model))
        train = task.read(LabelledInput(locations[kind], "--train"))
        test = task.read(LabelledInput(locations["pairs"], "--test"))
        task.set_labels(train, [], test)
        assert task.kind == kind
        assert task.is_scored(test) == is_scored
        assert task.is_scored(train)


def test_texts_alone_spread_the_vectors_and_keep_the_last_epoch(
    toy_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(1)
    texts = [" ".join(draw.choices(FILLERS, k=4)) for _ in range(160)]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n\n" + texts[0] + "\n")
    settings = Settings(**FAST, epochs=2)
    train = str(tmp_path / "texts.txt")
    output = finetune("similarity", toy_model, train=train, output=tmp_path / "o", settings=settings, device="cpu")
    report = json.loads((output / "metrics.json").read_text())
    assert report["rows"] == {"train": len(set(texts))}
    assert (report["main_metric"], report["best_epoch"]) == (None, 2)
    assert not (output / "predictions.jsonl").exists()
    assert "the last." in (output / "README.md").read_text()
    assert "the model has no dropout, which texts alone need: 0.1" in capsys.readouterr().out
    before, after = (_mean_cosine(folder, texts[:50]) for folder in (toy_model, output))
    assert after < before - 0.2


def _mean_cosine(folder: Path, texts: list[str]) -> float:
    vectors = SentenceTransformer(str(folder), device="cpu").encode(sorted(set(texts)), normalize_embeddings=True)
    return float((vectors @ vectors.T).mean())


def test_pairs_select_the_epoch_of_a_training_on_texts(
    toy_model: Path, tmp_path: Path, as_jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both in fp32: while training, vectors are compared in bf16 where the CPU has it, which turns close ranks around.
    monkeypatch.setattr(hardware, "cpu_bf16_feature", lambda: None)
    (tmp_path / "texts.txt").write_text("\n".join(row["a"] for row in translations(100, 1)))
    validation = as_jsonl(tmp_path / "validation.jsonl", translations(20, 2))
    output = finetune(
        "similarity", toy_model, train=str(tmp_path / "texts.txt"), validation=validation, output=tmp_path / "o",
        settings=Settings(**FAST, **PAIRS, epochs=2), device="cpu",
    )  # fmt: skip
    report, _ = results(output)
    figures = [epoch["eval_mrr"] for epoch in report["epochs"]]
    assert report["validation"]["mrr"] == pytest.approx(max(figures))
    assert report["best_epoch"] == figures.index(max(figures)) + 1


def test_ranks_are_those_of_sorting_and_equal_vectors_find_nothing(toy_model: Path) -> None:
    task = Similarity(Settings(**PAIRS), Tokenizer.load(toy_model))
    draw = np.random.default_rng(1)
    rows = [Example(i, "", f"a{i}", f"b{i % 7}", None) for i in range(9)]
    vectors = {text: draw.normal(size=4) for row in rows for text in (row.text, str(row.pair))}
    vectors = {text: vector / np.linalg.norm(vector) for text, vector in vectors.items()}
    for row, found in zip(rows, task.compare(rows, vectors), strict=True):
        order = sorted((f"b{i}" for i in range(7)), key=lambda pair: -vectors[row.text] @ vectors[pair])
        assert order[found.rank - 1] == row.pair
        assert found.cosine == pytest.approx(vectors[row.text] @ vectors[str(row.pair)])
    equal = task.compare(rows, dict.fromkeys(vectors, np.array([0.6, 0.8])))
    assert task.score(rows, equal) == {"mrr": pytest.approx(1 / 7), "accuracy_at_1": 0.0}
    assert task.no_better_than(rows, equal) == "a random order (mrr 0.3704)"
    assert not task.no_better_than(rows, [Comparison(1.0, 1)] * 9)


def test_a_stopped_training_continues_to_the_same_weights(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(row["a"] for row in translations(60, 1)))
    call = {"train": str(tmp_path / "texts.txt"), "settings": Settings(**FAST, epochs=2), "device": "cpu"}
    save = training._Seal.on_save

    def stop(*arguments: Any, **others: Any) -> None:
        save(*arguments, **others)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(training._Seal, "on_save", stop)
        with pytest.raises(KeyboardInterrupt):
            finetune("similarity", toy_model, output=tmp_path / "stopped", **call)
    for name in ("stopped", "whole"):
        finetune("similarity", toy_model, output=tmp_path / name, **call)
        assert ("continues from checkpoint-" in capsys.readouterr().out) == (name == "stopped")
    stopped, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("stopped", "whole"))
    assert all(torch.equal(stopped[name], whole[name]) for name in whole)


def test_lines_are_read_in_the_encoding_that_is_named(toy_model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("café\nbœuf\n".encode("cp1252"))
    task = Similarity(Settings(), Tokenizer.load(toy_model))
    source = LabelledInput(str(tmp_path / "a.txt"), "--train", encoding="cp1252")
    assert [example.text for example in task.read(source)] == ["café", "bœuf"]
