"""Is what `run auto` plans as good as the best of a grid of configurations made by hand?

`run auto` makes its plan and trains by it. Every configuration of the grid is that plan with another network and
another vocabulary (`--networks` x `--vocab-sizes`), or with one other setting (`--settings`), given the same time for
all stages; no time is spent on its calibration. All are scored on the documents that `bench_learning.py` holds out for
choices (its split dev), so that vocabularies compare.

    python scripts/bench_plan.py CORPUS --work OUT --time 2m [--networks 2x128 2x256 4x256] [--vocab-sizes 4096 8192]
        [--settings data.masked_lm_prob=0.3 train.peak_lr=0.002] [--seeds 1 2 3]
"""

import argparse
import itertools
import os
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from bench_learning import call, score_of, split_corpus


def main() -> None:
    options = parse_arguments()
    name = options.corpus.name.split(".")[0]
    texts = split_corpus(options.corpus, options.work / name)
    scores: dict[str, list[float]] = defaultdict(list)
    for seed in options.seeds:
        folder = options.work / f"{name}-{options.time}-s{seed}"
        command = ["run", "auto", str(texts["train"]), "--time", options.time]
        planned = trained(folder / "auto", command, {"train.seed": str(seed)})
        plan = yaml.safe_load((planned / "plan.yaml").read_text(encoding="utf-8"))
        scores["the plan"].append(score(planned, texts["dev"], options))
        for label, settings in configurations(plan, options):
            run = trained(folder / label, ["run", str(planned / "plan.yaml")], {**settings, "train.seed": str(seed)})
            scores[label].append(score(run, texts["dev"], options))
    print_table(scores)


def configurations(plan: dict[str, Any], options: argparse.Namespace) -> list[tuple[str, dict[str, str]]]:
    """The configurations that differ from the plan, each with the name of its folder."""
    planned = f"{plan['model']['num_hidden_layers']}x{plan['model']['hidden_size']}-v{plan['vocab']['size']}"
    found = []
    for network, size in itertools.product(options.networks, options.vocab_sizes):
        if f"{network}-v{size}" != planned:
            found.append((f"{network}-v{size}", {**network_settings(network), "vocab.size": str(size)}))
    for setting in options.settings:
        key, _, value = setting.partition("=")
        found.append((f"{key.rpartition('.')[2]}-{value}", {key: value}))
    return found


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("corpus", type=Path, help="sentence lines, plain or .xz")
    parser.add_argument("--work", type=Path, required=True, help="where everything is written; the same again goes on")
    parser.add_argument("--time", default="2m", help="of each run, all stages included")
    parser.add_argument("--networks", nargs="*", default=[], help="layers x hidden size")
    parser.add_argument("--vocab-sizes", nargs="*", type=int, default=[])
    parser.add_argument("--settings", nargs="*", default=[], metavar="KEY=VALUE", help="a configuration each")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--contexts", type=int, default=1500, help="contexts that are scored")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of the scorer")
    return parser.parse_args()


def network_settings(network: str) -> dict[str, str]:
    layers, hidden = map(int, network.split("x"))
    return {
        "model.num_hidden_layers": str(layers),
        "model.hidden_size": str(hidden),
        "model.num_attention_heads": str(max(1, hidden // 64)),
        "model.intermediate_size": str(4 * hidden),
    }


def trained(run: Path, command: list[str], settings: dict[str, str]) -> Path:
    """Run a command into a folder, unless that was done; a run that was cut short is repeated, as its time is over."""
    if not (run / "train" / "manifest.json").exists():
        shutil.rmtree(run, ignore_errors=True)
        call([*command, "--output", str(run)], settings, run.with_suffix(".log"))
    return run


def score(run: Path, text: Path, options: argparse.Namespace) -> float:
    found = score_of(run / "train" / "model", text, options)
    print(f"{run.parent.name}/{run.name}: {found:.4f} nats per byte of masked words", flush=True)
    return found


def print_table(scores: dict[str, list[float]]) -> None:
    means = {name: float(np.mean(values)) for name, values in scores.items()}
    print("| configuration | nats per byte | range |\n|---|---:|---:|")
    for name, value in sorted(means.items(), key=lambda item: item[1]):
        print(f"| {name} | {value:.4f} | {min(scores[name]):.4f}–{max(scores[name]):.4f} |")
    best = min(value for name, value in means.items() if name != "the plan")
    print(f"the plan has {means['the plan'] / best - 1:+.1%} against the best of {len(means) - 1} configurations")


if __name__ == "__main__":
    main()
