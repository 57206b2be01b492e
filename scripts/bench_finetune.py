"""Does pretraining pay? A pretrained model against the same network from random weights, fine-tuned alike.

`bench_finetune_tasks.py` makes the tasks from the corpus itself: training and validation rows from documents whose text
pretraining may have read (it saw no labels), test rows from documents that it held out. Each start, seed and learning
rate is one fine-tuning; of the rates the one that is best on validation rows counts, for either start. Prints a
Markdown table with mean and range over the seeds. The same command again continues where it stopped.

    python scripts/bench_finetune.py CORPUS --language en --output OUT [--model MODEL --data DATA] [--seeds 1 2 3]

Without --model it pretrains first, by the YAML below: an hour on one slow core.
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from bench_finetune_tasks import Recipe, Row, held_out_documents, make_rows, read_documents, recipes

from bert_pretrain.config_file import load_config
from bert_pretrain.finetune.questions import squad_scores
from bert_pretrain.finetune.run import finetune
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.tag import entity_scores
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.folder import read_config
from bert_pretrain.model.huggingface import save_model
from bert_pretrain.pipeline import run_pipeline
from bert_pretrain.text.tokenizer import Tokenizer

PRETRAINING = """
inputs: [{corpus}]
vocab: {{size: 8192}}
data: {{max_seq_length: 64, dupe_factor: 2, document_boundary: blank_line, language: {language}}}
model:
  hidden_size: 256
  num_hidden_layers: 2
  num_attention_heads: 4
  intermediate_size: 1024
  max_position_embeddings: 192
  hidden_dropout_prob: 0.0
  attention_probs_dropout_prob: 0.0
train: {{global_batch_size: 64, optimizer: muon, peak_lr: 4e-3, warmup_ratio: 0.05, eval_every: 2000, save_every: 500}}
phases:
  - {{name: "64", train: {{max_steps: {steps}}}}}
  - {{name: "192", data: {{max_seq_length: 192, dupe_factor: 1}}, train: {{max_steps: {longer_steps}}}}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, help="one sentence a line, blank lines between documents")
    parser.add_argument("--language", choices=("en", "zh"), required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="a pretrained folder")
    parser.add_argument("--data", type=Path, help="the data folder of the model; its held-out documents test")
    parser.add_argument("--steps", type=int, default=6500, help="of the pretraining, where it is done here")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rows", type=int, default=3000, help="for training; a sixth validates, half tests")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-4, 3e-4])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="tasks with one of these in the title")
    options = parser.parse_args()
    model, data = pretrained(options)
    documents = read_documents(options.corpus)
    held_out = held_out_documents(documents, data)
    tasks = recipes(options.language, documents)
    lines = []
    chosen = {title: recipe for title, recipe in tasks.items() if any(word in title for word in options.only)}
    for title, recipe in chosen.items():
        folder = options.output / "tasks" / title.replace(" ", "-").replace("(", "").replace(")", "").replace("'", "")
        splits = write_rows(recipe, documents, held_out, folder, options.rows)
        figures = {
            kind: [score(recipe, folder, options, model, kind, seed) for seed in options.seeds]
            for kind in ("pretrained", "random")
        }
        lines.append(table_line(title, recipe, figures, splits))
    rates = " or ".join(f"{rate:g}" for rate in options.learning_rates)
    print(f"\n{len(documents):,} documents, of which pretraining held {len(held_out)} out, which test; ", end="")
    print(f"{len(options.seeds)} seeds, {options.epochs} epochs, batches of 32, learning rate {rates}\n")
    print("| task | rows (training, test) | metric | pretrained | random weights | baseline |")
    print("|---|---|---|---|---|---|")
    print("\n".join(lines))


def pretrained(options: argparse.Namespace) -> tuple[Path, Path]:
    """Return the model and its data folder, pretrained here if none is given."""
    if options.model:
        return options.model, options.data or options.model.parent.parent / "data"
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / "pretraining.yaml"
    text = PRETRAINING.format(
        corpus=options.corpus.absolute(),
        language=options.language,
        steps=options.steps,
        longer_steps=max(1, options.steps // 16),
    )
    file.write_text(text)
    model = run_pipeline(load_config(str(file)), options.output / "pretraining")
    return model, options.output / "pretraining" / "data" / "64"


def write_rows(
    recipe: Recipe, documents: list[list[str]], held_out: list[int], folder: Path, count: int
) -> dict[str, list[Row]]:
    """Write the rows of the three splits, each from documents of its own, and return them."""
    others = sorted(set(range(len(documents))) - set(held_out))
    sources = {"train": others[::2], "validation": others[1::2], "test": held_out}
    counts = {"train": count, "validation": count // 6, "test": count // 2}
    folder.mkdir(parents=True, exist_ok=True)
    splits = {}
    for split, numbers in sources.items():
        splits[split] = make_rows(recipe, documents, numbers, counts[split], 0, split)
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in splits[split])
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    return splits


def score(recipe: Recipe, folder: Path, options: argparse.Namespace, model: Path, kind: str, seed: int) -> float:
    """Fine-tune at every learning rate and return the test metric of the one that is best on validation rows."""
    start = model if kind == "pretrained" else random_model(model, options.output / "random" / str(seed), seed)
    found = []
    for rate in options.learning_rates:
        result = folder / f"{kind}-{seed}-{rate:g}"
        finetune(
            recipe.task,
            start,
            train=str(folder / "train.jsonl"),
            validation=str(folder / "validation.jsonl"),
            test=str(folder / "test.jsonl"),
            output=result,
            settings=Settings(learning_rate=rate, epochs=options.epochs, seed=seed, **recipe.columns),
        )
        report = json.loads((result / "metrics.json").read_text())
        found.append((report["validation"][recipe.metric], report["test"][recipe.metric]))
    return float(max(found)[1])


def random_model(model: Path, folder: Path, seed: int) -> Path:
    """Write the same network with random weights, drawn by a seed as pretraining draws them."""
    if not folder.exists():
        config, vocab_size = read_config(model, "--model")
        network = BertForPreTraining(config, vocab_size)
        network.initialize(seed)
        folder.mkdir(parents=True)
        save_model(network, folder, Tokenizer.load(model))
    return folder


def table_line(title: str, recipe: Recipe, figures: dict[str, list[float]], splits: dict[str, list[Row]]) -> str:
    shown = [f"{np.mean(each):.3f} ({min(each):.3f}–{max(each):.3f})" for each in figures.values()]
    rows = f"{len(splits['train']):,}, {len(splits['test']):,}"
    simple = f"{baseline(recipe, splits['train'], splits['test']):.3f} ({recipe.baseline})"
    return f"| {title} | {rows} | {recipe.metric} | {shown[0]} | {shown[1]} | {simple} |"


def baseline(recipe: Recipe, train: list[Row], test: list[Row]) -> float:
    """Return the metric of an answer that needs no network."""
    if recipe.task == "classify":
        common = Counter(row["label"] for row in train).most_common(1)[0][0]
        return float(np.mean([row["label"] == common for row in test]))
    if recipe.task == "tag":
        tags = Counter(tag for row in train for tag in row["tags"])
        truth = [row["tags"] for row in test]
        return entity_scores(truth, [[tags.most_common(1)[0][0]] * len(each) for each in truth])[recipe.metric]
    return squad_scores([row["answers"]["text"] for row in test], [last_name(row) for row in test])[recipe.metric]


def last_name(row: dict[str, Any]) -> str:
    words = [word.strip(".,;:!?\"'") for word in row["context"].split()]
    return next((word for word in reversed(words[1:]) if word[:1].isupper() and word[1:].islower()), "")


if __name__ == "__main__":
    main()
