"""Is what `run auto` plans as good as the best of a grid of configurations made by hand?

`run auto` makes its plan and trains by it. Every configuration of the grid is that plan with another network and
another vocabulary, given the same time for all stages; no time is spent on its calibration. All are scored on the
documents that `bench_learning.py` holds out for choices (its split dev), so that vocabularies compare.

    python scripts/bench_plan.py CORPUS --work OUT --time 2m [--networks 2x128 2x256 4x256] [--vocab-sizes 4096 8192]
"""

import argparse
import itertools
import os
import shutil
from pathlib import Path

import yaml
from bench_learning import call, score_of, split_corpus


def main() -> None:
    options = parse_arguments()
    name = options.corpus.name.split(".")[0]
    texts = split_corpus(options.corpus, options.work / name)
    folder = options.work / f"{name}-{options.time}-s{options.seed}"
    planned = trained(folder / "auto", ["run", "auto", str(texts["train"]), "--time", options.time], {}, options)
    plan = yaml.safe_load((planned / "plan.yaml").read_text(encoding="utf-8"))
    scores = {describe(plan["model"], plan["vocab"]["size"]) + ", planned": score(planned, texts["dev"], options)}
    for network, size in itertools.product(options.networks, options.vocab_sizes):
        settings = {**network_settings(network), "vocab.size": str(size)}
        run = folder / f"{network}-v{size}"
        trained(run, ["run", str(planned / "plan.yaml")], settings, options)
        layers, hidden = map(int, network.split("x"))
        name = describe({"num_hidden_layers": layers, "hidden_size": hidden}, size)
        scores[name] = score(run, texts["dev"], options)
    print_table(scores)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("corpus", type=Path, help="sentence lines, plain or .xz")
    parser.add_argument("--work", type=Path, required=True, help="where everything is written; the same again goes on")
    parser.add_argument("--time", default="2m", help="of each run, all stages included")
    parser.add_argument("--networks", nargs="+", default=["2x128", "2x256", "4x256"], help="layers x hidden size")
    parser.add_argument("--vocab-sizes", nargs="+", type=int, default=[4096, 8192, 16384])
    parser.add_argument("--seed", type=int, default=1)
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


def trained(run: Path, command: list[str], settings: dict[str, str], options: argparse.Namespace) -> Path:
    """Run a command into a folder, unless that was done; a run that was cut short is repeated, as its time is over."""
    if not (run / "train" / "manifest.json").exists():
        shutil.rmtree(run, ignore_errors=True)
        call([*command, "--output", str(run)], {**settings, "train.seed": str(options.seed)}, run.with_suffix(".log"))
    return run


def score(run: Path, text: Path, options: argparse.Namespace) -> float:
    found = score_of(run / "train" / "model", text, options)
    print(f"{run.name}: {found:.4f} nats per byte of masked words", flush=True)
    return found


def describe(model: dict[str, int], vocab_size: int) -> str:
    return f"L{model['num_hidden_layers']}-H{model['hidden_size']}, {vocab_size:,} tokens"


def print_table(scores: dict[str, float]) -> None:
    planned, *others = scores.values()
    print("| configuration | nats per byte |\n|---|---:|")
    for name, value in sorted(scores.items(), key=lambda item: item[1]):
        print(f"| {name} | {value:.4f} |")
    print(f"the plan has {planned / min(others) - 1:+.1%} against the best of {len(others)} configurations")


if __name__ == "__main__":
    main()
