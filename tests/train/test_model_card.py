"""The model card: the Hub can read it, its metrics are those of the run, and names are escaped."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from bert_pretrain.errors import DataError
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.io.files import read_json
from bert_pretrain.model.huggingface import fine_tuning_rate, load_model
from bert_pretrain.text.sources import Source
from bert_pretrain.train import run as run_module
from bert_pretrain.train.distributed import SINGLE_PROCESS
from bert_pretrain.train.model_card import model_card
from bert_pretrain.train.resolved import ResolvedRun, resolve_run
from bert_pretrain.train.state import Progress
from tests.train.conftest import Fit, NewData, make_state, tiny

VALIDATION = {
    "step": 12, "validation_mlm_loss": 2.0, "validation_mlm_accuracy": 0.5, "validation_nsp_loss": None,
    "validation_nsp_accuracy": None,
}  # fmt: skip


@pytest.fixture
def resolved(data_folder: Path, tmp_path: Path) -> ResolvedRun:
    return resolve_run(tiny(), DataFolder.open(data_folder), tmp_path / "run", SINGLE_PROCESS)


def card_of(run: ResolvedRun, validation: dict[str, Any] | None) -> str:
    state = make_state(run.config)
    state.progress = Progress(step=12, examples=192, tokens=4000, elapsed_seconds=75.0)
    return model_card(run, state, validation, is_final=True)


def test_hub_reads_the_card_of_the_final_model(finished: Path) -> None:
    card = ModelCard.load(finished / "model" / "README.md", ignore_metadata_errors=False)
    data = card.data
    assert (data.library_name, data.pipeline_tag, data.language) == ("transformers", "fill-mask", "en")
    assert data.license is None
    manifest = read_json(finished / "manifest.json")
    validation = manifest["validation"]
    assert f"| MLM loss (nats per masked token) | {validation['validation_mlm_loss']:.4f} |" in card.text
    assert f"| NSP accuracy | {validation['validation_nsp_accuracy']:.2%} ± " in card.text
    assert f"{manifest['parameters']:,} parameters" in card.text
    rate = float(card.text.partition("learning_rate=")[2].partition(",")[0])
    assert rate == fine_tuning_rate(load_model(finished / "model").model.encoder, 32)
    assert "](curves.png)" in card.text
    assert (finished / "model" / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("is_damaged", [False, True])
def test_without_matplotlib_or_with_damaged_metrics_the_model_has_no_plot(
    fit: Fit, monkeypatch, is_damaged: bool
) -> None:
    def refuse(run: Path) -> None:
        raise DataError("line 1 is damaged", where=str(run), remedy="restore it")

    if is_damaged:
        monkeypatch.setattr(run_module, "read_metrics", refuse)
    model = fit(max_steps=1, save_every=1) / "model"
    assert (model / "model.safetensors").exists()
    assert not (model / "curves.png").exists()
    assert "bert-pretrain report" in (model / "README.md").read_text()


def test_names_are_escaped_and_hide_folders_and_secrets(resolved: ResolvedRun) -> None:
    names = (
        "a|b<script>.txt\n# head",
        "dataset:/home/me/secret/books",
        "dataset:user/corpus@train",
        "https://me:secret@h/x/c.txt?sig=secret#secret",
        "https://h/download?token=secret&file=/d.txt",
        "https://me:secret@h",
    )
    sources = [Source(name, "dataset" if name.startswith("dataset:") else "txt") for name in names]
    inputs = [{"location": each.location, **each.identity, "split": "train"} for each in sources]
    inputs.append({"name": "held.txt", "location": "held.txt", "split": "validation"})
    run = replace(
        resolved,
        output=resolved.output.with_name("x: [y]\n---"),
        init_from=Path("<b>"),
        data=replace(resolved.data, manifest={**resolved.data.manifest, "inputs": inputs}),
    )
    text = card_of(run, VALIDATION)
    body = ModelCard(text, ignore_metadata_errors=False).text
    assert r"Inputs: a\|b\<script\>.txt \# head, books, user/corpus@train, c.txt, download, h." in body
    assert r"\<b\>" in body
    assert "secret" not in text
    assert "held.txt" not in text
    assert body.lstrip().startswith("# x: \\[y\\] ---\n")


def test_card_only_has_metrics_that_were_measured(resolved: ResolvedRun, new_data_folder: NewData) -> None:
    text = card_of(resolved, VALIDATION)
    assert "NSP" not in text
    assert "On the 60 held-out examples" in text
    assert "On 5 of the 60 held-out examples" in card_of(resolved, {**VALIDATION, "validation_examples": 5})
    assert "7.39" in text  # e to the 2
    assert "positions from" not in text
    folder = DataFolder.open(new_data_folder(validation_rows=0, next_sentence="none"))
    long = tiny(model={"max_position_embeddings": 64})
    text = card_of(replace(resolved, data=folder, config=long), None)
    assert "there are no metrics" in text
    assert "This run has not trained the pooler and the next-sentence head" in text
    assert "positions from 32 to 63" in text
