"""Every network is fine-tuned, and its head computes the same as `transformers`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from bert_pretrain.finetune.finetuned_bert import FinetunedBert
from bert_pretrain.finetune.task import Window
from bert_pretrain.io.pool import progress_bar
from bert_pretrain.text.tokenizer import Tokenizer
from tests.finetune.conftest import (
    CPU,
    POSITIONS,
    predicted,
    questions,
    results,
    reviews,
    tagged_sentences,
    write_rows,
)

NETWORKS: dict[str, dict[str, Any]] = {
    "modernbert": {"architecture": "modernbert", "intermediate_size": 40},
    "albert": {"architecture": "albert", "embedding_size": 16},
    "electra": {"architecture": "electra", "embedding_size": 16},
}


@pytest.fixture(scope="module", params=NETWORKS)
def folder(request: pytest.FixtureRequest, make_bert: Callable[..., Path], toy_model: Path) -> Path:
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.1}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "max_position_embeddings": POSITIONS}
    return make_bert(Tokenizer.load(toy_model), seed=1, **{**sizes, **quiet, **NETWORKS[request.param]})


@pytest.mark.parametrize("kind", ["SequenceClassification", "TokenClassification", "QuestionAnswering"])
def test_heads_match_transformers(kind: str, folder: Path, tmp_path: Path) -> None:
    transformers.set_seed(3)
    labels = {} if kind == "QuestionAnswering" else {"num_labels": 3}
    peer = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(folder, **labels).eval()
    for parameter in peer.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.5)  # large enough for different outputs
    peer.save_pretrained(tmp_path)
    Tokenizer.load(folder).save(tmp_path, POSITIONS)
    ids = [[2, 5, 6, 7, 3], [2, 9, 3, 12, 8, 3]]
    windows = [Window(0, each, [0] * len(each), {}) for each in ids]
    ours = FinetunedBert.open(tmp_path, CPU).logits(windows, progress_bar(total=2), 2)
    for number, each in enumerate(ids):
        with torch.no_grad():
            theirs = peer(input_ids=torch.tensor([each]))
        if kind == "QuestionAnswering":
            found = torch.from_numpy(np.stack([ours[0][number], ours[1][number]]))
            expected = torch.cat([theirs.start_logits, theirs.end_logits])
        else:
            found, expected = torch.from_numpy(ours[number]), theirs.logits[0]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_fine_tuning_learns_and_predicts(folder: Path, tune: Callable[..., Path], tmp_path: Path) -> None:
    rows = reviews(200, seed=1)
    tuned = tune("classify", rows, model=folder, test=reviews(40, seed=2), epochs=4)
    metrics, predictions = results(tuned)
    assert metrics["test"]["accuracy"] >= 0.9, metrics
    again = predicted(tuned, write_rows(tmp_path / "again.jsonl", reviews(40, seed=2)))
    assert [row["label"] for row in again] == [row["prediction"] for row in predictions]


@pytest.mark.parametrize(("task", "rows"), [("tag", tagged_sentences), ("answer", questions)], ids=["tag", "answer"])
def test_tags_and_answers_are_learned_and_predicted(
    task: str, rows: Callable[..., Any], folder: Path, tune: Callable[..., Path], tmp_path: Path
) -> None:
    tuned = tune(task, rows(80, seed=1), model=folder, test=rows(20, seed=2), epochs=5)
    metrics, predictions = results(tuned)
    assert metrics["test"]["f1"] >= 0.9, metrics
    key = "tags" if task == "tag" else "answer"
    again = predicted(tuned, write_rows(tmp_path / "again.jsonl", rows(20, seed=2)))
    assert [row[key] for row in again] == [row["prediction"] for row in predictions]
