"""The `README.md` of a fine-tuned folder: what it is, what it was made from, its figures, and how to load it."""

from collections.abc import Mapping
from typing import Any

from bert_pretrain.report.markdown import card
from bert_pretrain.report.render import render

PIPELINES = {"classify": "text-classification", "tag": "token-classification", "answer": "question-answering"}
"""The Hub's names of the tasks."""


def finetuned_card(
    task: str,
    model_class: str,
    base: str,
    rows: Mapping[str, int],
    scores: Mapping[str, Mapping[str, float]],
    settings: Mapping[str, Any],
    best_epoch: int,
) -> str:
    """Return the card; `base` is the name of the folder that was fine-tuned, `rows` and `scores` are by split."""
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
        best_epoch=best_epoch,
    )
    return card(
        {"library_name": "transformers", "pipeline_tag": pipeline, "tags": ["bert", pipeline, "bert-pretrain"]}, body
    )
