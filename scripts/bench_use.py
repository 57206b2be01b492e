"""What models are worth in use: fine-tuned with a user's settings, beside the same networks untrained and word counts.

    python scripts/bench_use.py ROWS_FOLDER MODEL... [--tasks en_subj en_trec] [--seeds 3] [--rates 3e-4,1e-3]

ROWS_FOLDER holds TASK.train.jsonl and TASK.test.jsonl, rows with `text` and `label`. Choices are made with
`--split validation`, a tenth of the training rows; `--split test` reads the test rows, once, at the end. Models that
differ only in the seed of pretraining are given together: one line of a table is their mean, least and most. With
`--rates`, plain AdamW with these rates is fine-tuned too, as by a Trainer without our settings.
"""

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

from bert_pretrain.finetune.run import METRICS, finetune
from bert_pretrain.finetune.settings import Settings


def scores_of(
    model: Path, rows: Path, task: str, settings: Settings, *, with_test: bool
) -> tuple[dict[str, float], float]:
    """Return the accuracies of a fine-tuned model and of what it is compared with, in percent, and the seconds."""
    with tempfile.TemporaryDirectory() as folder:
        output = finetune(
            "classify",
            model,
            train=str(rows / f"{task}.train.jsonl"),
            test=str(rows / f"{task}.test.jsonl") if with_test else None,
            output=Path(folder) / "out",
            settings=settings,
        )
        report = json.loads((output / METRICS).read_text(encoding="utf-8"))
    own = report["test" if with_test else "validation"]["accuracy"]
    return {name: 100 * score for name, score in {"pretrained": own, **report["baselines"]}.items()}, report["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--tasks", nargs="+", default=["en_subj", "en_trec"])
    parser.add_argument("--seeds", type=int, default=1, help="of fine-tuning, for each model")
    parser.add_argument("--rates", default="", help="of plain AdamW, joined by commas")
    parser.add_argument("--split", choices=("validation", "test"), default="validation")
    args = parser.parse_args()
    ways = {"": Settings(baselines=True)}
    for rate in filter(None, args.rates.split(",")):
        ways[f" by AdamW at {rate}"] = Settings(learning_rate=(float(rate),), optimizer="adamw", dropout=0.1)
    lines = []
    for task in args.tasks:
        found: defaultdict[str, list[float]] = defaultdict(list)
        seconds = []
        for model in args.models:
            for seed in range(args.seeds):
                for way, settings in ways.items():
                    chosen = Settings(**{**vars(settings), "seed": seed})
                    scores, took = scores_of(model, args.rows, task, chosen, with_test=args.split == "test")
                    seconds.append(took)
                    for name, score in scores.items():
                        if not way or name == "pretrained":
                            found[name + way].append(score)
        for name, values in found.items():
            mean, low, high = statistics.mean(values), min(values), max(values)
            lines.append(f"| {task} | {name} | {mean:.1f} | {low:.1f}–{high:.1f} | {len(values)} |")
        lines.append(f"| {task} | seconds of one fine-tuning | {statistics.median(seconds):.0f} | | |")
    print(f"\n| task | {args.split} rows | accuracy, % | least–most | runs |\n|---|---|--:|---|--:|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
