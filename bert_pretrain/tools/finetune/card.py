"""The `README.md` of a fine-tuned folder: what it is, what it was made from, its figures, and how to load it."""

from collections.abc import Mapping
from typing import Any

import yaml

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
    """Return the card.

    Args:
        task: of `finetune`.
        model_class: of `transformers`, with the task's head.
        base: the name of the folder that was fine-tuned.
        rows: of each split.
        scores: of each split that has labels, by the name of the metric.
        settings: of the fine-tuning.
        best_epoch: the one whose weights these are.
    """
    tags = ["bert", PIPELINES[task], "bert-pretrain"]
    metadata = {"library_name": "transformers", "pipeline_tag": PIPELINES[task], "tags": tags}
    names = list(dict.fromkeys(name for figures in scores.values() for name in figures))
    table = [["metric", *scores], ["---"] * (1 + len(scores))]
    table += [
        [name, *(f"{figures[name]:.4f}" if name in figures else "" for figures in scores.values())] for name in names
    ]
    kind = "regression" if settings["regression"] else PIPELINES[task].replace("-", " ")
    given = {name: value for name, value in settings.items() if value not in (None, False)}
    return f"""---
{yaml.safe_dump(metadata, sort_keys=False)}---

# {base}, fine-tuned for {kind}

Made by `bert-pretrain finetune {task}` from the folder `{base}`; the weights of epoch {best_epoch}, the best of \
{settings["epochs"]} on the validation rows.

## Use

```python
from transformers import {model_class}, AutoTokenizer
model = {model_class}.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```

## Figures

Rows: {", ".join(f"{split} {count:,}" for split, count in rows.items())}.

{chr(10).join(f"| {' | '.join(line)} |" for line in table)}

All epochs stand in `metrics.json`, predictions in `predictions.jsonl`.

## Settings

{chr(10).join(f"* `{name}`: {value}" for name, value in given.items())}
"""
