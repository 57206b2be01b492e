"""Does a student learn more with its teacher, in equal time? Trains both ways from several seeds.

The time is a time budget by the processor's clock, so that other programs on the machine do not count; give one
thread (OMP_NUM_THREADS=1). The score is the loss of masked tokens on the held-out split, once, after the time. Runs
that are in `results.jsonl` are not repeated.

    OMP_NUM_THREADS=1 python scripts/bench_teacher.py --data DATA --teacher TEACHER/model --work OUT --seconds 120
"""

import argparse
import json
import shutil
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from bert_pretrain.config import Config
from bert_pretrain.config_file import load_config
from bert_pretrain.train import clock
from bert_pretrain.train import run as train_run
from bert_pretrain.train.evaluation import Evaluator, evaluate

VARIANTS = {
    "alone": "no teacher",
    "weights": "first weights from the teacher, `relation_weight: 0`",
    "relations": "relations, and no first weights",
    "teacher": "first weights and relations, `relation_weight: 1`",
}


def main() -> None:
    options = parse_arguments()
    options.work.mkdir(parents=True, exist_ok=True)
    path = options.work / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(row["variant"], row["size"], row["seed"], row["budget"]) for row in rows}
    missing = [
        (seed, variant)
        for seed in options.seeds
        for variant in options.variants
        if (variant, options.size, seed, options.seconds) not in done
    ]
    for seed, variant in missing:
        row = train(variant, seed, options)
        rows.append(row)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
    print("\n".join(table([row for row in rows if row["budget"] == options.seconds and row["size"] == options.size])))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="a data folder with the teacher's vocabulary")
    parser.add_argument("--teacher", type=Path, required=True, help="a BERT folder")
    parser.add_argument("--work", type=Path, required=True, help="where everything is written; the same again goes on")
    parser.add_argument("--size", default="2x128", help="layers x hidden size of the student")
    parser.add_argument("--seconds", type=float, default=120.0, help="processor time of each training")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--set", nargs="+", default=[], dest="settings", help="SECTION.KEY=VALUE, for all runs")
    return parser.parse_args()


def config_of(variant: str, seed: int, options: argparse.Namespace) -> Config:
    layers, hidden = map(int, options.size.split("x"))
    settings = {
        "model.num_hidden_layers": layers,
        "model.hidden_size": hidden,
        "model.num_attention_heads": max(1, hidden // 64),
        "model.intermediate_size": 4 * hidden,
        "model.max_position_embeddings": 64,
        "train.global_batch_size": 32,
        "train.peak_lr": 4e-3,
        "train.time_budget": options.seconds,
        "train.seed": seed,
        "train.save_every": 10**9,
        "train.log_every": 50,
    }
    if variant != "alone":
        settings |= {"train.teacher": options.teacher, "train.relation_weight": int(variant != "weights")}
    given = [f"{key}={value}" for key, value in settings.items()]
    return load_config("short", settings=[*given, *options.settings])


def train(variant: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train a student and return its row of the results."""
    folder = options.work / f"{variant}-{options.size}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    config = config_of(variant, seed, options)
    drawn_weights = mock.patch.object(train_run, "start_from_teacher", return_value="nothing")
    # The clock of a run, and nothing else of it, counts the seconds of the processor.
    by_processor = mock.patch.object(clock, "time", SimpleNamespace(perf_counter=time.process_time))
    with (
        drawn_weights if variant == "relations" else nullcontext(),
        by_processor,
        mock.patch.object(Evaluator, "evaluate", return_value=None),
    ):
        model = train_run.train(config, options.data, folder)
    figures = evaluate(model, options.data, config=config.train)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = lines[-1]
    shutil.rmtree(folder)
    return {
        "variant": variant,
        "size": options.size,
        "seed": seed,
        "budget": options.seconds,
        "seconds": round(trained["elapsed_seconds"], 2),
        "steps": trained["step"],
        "tokens": trained["tokens"],
        "relation_loss": trained.get("relation_loss"),
        **{name: figures[name] for name in ("mlm_loss", "mlm_accuracy", "nsp_accuracy")},
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return a Markdown table of means, with least and most, over seeds."""
    lines = [
        "| student | seeds | held-out MLM, nats | NSP | tokens | seconds in steps |",
        "|---|---:|---|---|---:|---:|",
    ]
    for variant, says in VARIANTS.items():
        group = [row for row in rows if row["variant"] == variant]
        if group:
            cells = [f"{says} | {len(group)}"]
            for name, form in (("mlm_loss", ".3f"), ("nsp_accuracy", ".1%")):
                values = [row[name] for row in group]
                cells.append(f"{statistics.mean(values):{form}} ({min(values):{form}}–{max(values):{form}})")
            cells += [f"{statistics.mean(row[name] for row in group):,.0f}" for name in ("tokens", "seconds")]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
