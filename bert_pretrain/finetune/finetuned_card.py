"""The `README.md` of a fine-tuned folder: what it is, what it was made from, its figures, and how to load it."""

from collections.abc import Mapping
from typing import Any

from huggingface_hub import ModelCardData

from bert_pretrain.report.render import render

PIPELINES = {
    "classify": "text-classification",
    "tag": "token-classification",
    "answer": "question-answering",
}
"""The Hub's names of the tasks."""


def finetuned_card(
    task: str,
    model_class: str,
    base: str,
    rows: Mapping[str, int],
    scores: Mapping[str, Mapping[str, float]],
    settings: Mapping[str, Any],
    report: Mapping[str, Any],
) -> str:
    """Return the card.

    Args:
        task: of fine-tuning.
        model_class: the class of `transformers` that opens the folder.
        base: the name of the folder that was fine-tuned.
        rows: their number, by split.
        scores: the metrics, by split.
        settings: of fine-tuning.
        report: `best_epoch`, and `warning` if the model shows no sign of learning.
    """
    pipeline = PIPELINES[task]
    metrics = dict.fromkeys(name for figures in scores.values() for name in figures)
    body = render(
        "finetuned_card.md",
        task=task,
        kind="regression" if settings["regression"] else pipeline.replace("-", " "),
        model_class=model_class,
        base=base,
        rows=rows,
        splits=list(scores),
        scores=[
            (name, *(f"{figures[name]:.4f}" if name in figures else "" for figures in scores.values()))
            for name in metrics
        ],
        settings=settings,
        best_epoch=report["best_epoch"],
        warning=report["warning"],
    )
    data = ModelCardData(library_name="transformers", pipeline_tag=pipeline, tags=["bert", pipeline, "bert-pretrain"])
    return f"---\n{data}\n---\n\n{body}"
