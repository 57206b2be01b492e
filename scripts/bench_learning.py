"""Which recipe learns most? Trains variants from several seeds, and scores all of them by one independent scorer.

The corpus (a sentence a line, blank lines between documents) is split by document: 1 % to choose by (`dev`), 2 % for
the final figures (`test`), which is scored only with `--split test`, 0.3 % for the evaluations of a run (`validation`),
the rest to train on. Vocabulary and data are made once for each setting. A run is `bert-pretrain train` in a process of
its own. Scores are those of `word_scores.py`: nats per byte of masked words, `transformers` loading the folder. Runs
that are in `results.jsonl` are not repeated.

    python scripts/bench_learning.py CORPUS --language en --work OUT --variants base mask-30 --seeds 1 2 3 --steps 1200

Variants are those of `learning_variants.py`; `a+b` takes both changes.
"""

import argparse
import contextlib
import hashlib
import json
import lzma
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from learning_variants import BASE, VARIANTS

from bert_pretrain.report.measured import METRICS

SPLITS = {"dev": 0.01, "test": 0.02, "validation": 0.003}
SHARED_SETTINGS = ("data.", "vocab.")
POINTS = 10
"""Of the curve of a run."""


@dataclass(frozen=True)
class Run:
    """One training: a variant at a size, for so many steps, from a seed."""

    corpus: str
    variant: str
    size: str
    vocab_size: int
    batch: int
    steps: int
    seed: int

    @property
    def settings(self) -> dict[str, str]:
        layers, hidden = map(int, self.size.split("x"))
        settings = {**BASE, "train.global_batch_size": str(self.batch)}
        for part in self.variant.split("+"):
            settings |= VARIANTS[part].settings
        return settings | {
            "vocab.size": str(self.vocab_size),
            "model.num_hidden_layers": str(layers),
            "model.hidden_size": str(hidden),
            "model.num_attention_heads": str(max(1, hidden // 64)),
            "model.intermediate_size": str(4 * hidden),
            "train.max_steps": str(self.steps),
            "train.seed": str(self.seed),
        }


def main() -> None:
    options = parse_arguments()
    options.work.mkdir(parents=True, exist_ok=True)
    name = options.corpus.name.split(".")[0]
    texts = split_corpus(options.corpus, options.work / name)
    if options.train_bytes is not None:
        name = f"{name}-{options.train_bytes / 1e6:g}MB"
        texts["train"] = first_documents(texts["train"], options.train_bytes, options.work / name)
    wanted = [
        Run(name, variant, size, vocab_size, batch, steps, seed)
        for size in options.sizes
        for vocab_size in options.vocab_sizes
        for batch in options.batch
        for steps in options.steps
        for variant in options.variants
        for seed in options.seeds
    ]
    results = options.work / "results.jsonl"
    done = read_results(results)
    missing = [run for run in wanted if key_of(run) not in done]
    with ThreadPoolExecutor(options.jobs) as pool:
        data = {run: make_data(run, options, texts) for run in missing}
        for run, row in zip(missing, pool.map(lambda run: train(run, data[run], options, texts), missing), strict=True):
            done[key_of(run)] = row
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    if options.split == "test":
        score_finally(wanted, options, texts)
    else:
        print("\n".join(table([done[key_of(run)] for run in wanted])))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("corpus", type=Path, help="sentence lines, plain or .xz")
    parser.add_argument("--work", type=Path, required=True, help="where everything is written; the same again goes on")
    parser.add_argument("--language", default="en")
    parser.add_argument("--variants", nargs="+", default=["base"], help=f"of {', '.join(VARIANTS)}; a+b takes both")
    parser.add_argument("--sizes", nargs="+", default=["2x128"], help="layers x hidden size")
    parser.add_argument("--vocab-sizes", nargs="+", type=int, default=[8192])
    parser.add_argument("--batch", nargs="+", type=int, default=[32], help="examples a step")
    parser.add_argument("--train-bytes", type=float, help="of text to train on, instead of all: many epochs of little")
    parser.add_argument("--steps", nargs="+", type=int, default=[1200])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each")
    parser.add_argument("--contexts", type=int, default=1500, help="contexts that are scored")
    parser.add_argument("--split", choices=["dev", "test"], default="dev", help="which held-out documents score")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--keep", action="store_true", help="keep the models, which --split test needs")
    return parser.parse_args()


def split_corpus(corpus: Path, folder: Path) -> dict[str, Path]:
    """Write the documents of each split to a file of its own, and return the files."""
    paths = {name: folder / f"{name}.txt" for name in ("train", *SPLITS)}
    if all(path.exists() for path in paths.values()):
        return paths
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        files = {
            name: held.enter_context(path.with_suffix(".part").open("w", encoding="utf-8"))
            for name, path in paths.items()
        }
        for document in read_documents(corpus):
            files[split_of(document)].write(document + "\n\n")
    for path in paths.values():
        path.with_suffix(".part").rename(path)
    return paths


def first_documents(text: Path, num_bytes: float, folder: Path) -> Path:
    """Write the first documents of a split to a file of about so many bytes, and return it."""
    path = folder / "train.txt"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".part").open("w", encoding="utf-8") as file:
            for document in read_documents(text):
                if file.tell() >= num_bytes:
                    break
                file.write(document + "\n\n")
        path.with_suffix(".part").rename(path)
    return path


def read_documents(corpus: Path) -> Iterator[str]:
    opened = lzma.open if corpus.suffix == ".xz" else open
    with opened(corpus, "rt", encoding="utf-8") as file:
        lines: list[str] = []
        for line in file:
            if line.strip():
                lines.append(line.rstrip("\n"))
            elif lines:
                yield "\n".join(lines)
                lines = []
        if lines:
            yield "\n".join(lines)


def split_of(document: str) -> str:
    """Return the split of a document, a function of its text."""
    drawn = int.from_bytes(hashlib.sha256(document.encode()).digest()[:8], "big") / 2**64
    for name, share in SPLITS.items():
        if drawn < share:
            return name
        drawn -= share
    return "train"


def make_data(run: Run, options: argparse.Namespace, texts: Mapping[str, Path]) -> Path:
    """Make vocabulary and data of a run, unless another run with the same settings had them made."""
    shared = {key: value for key, value in run.settings.items() if key.startswith(SHARED_SETTINGS)}
    shared["data.language"] = options.language
    name = hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:10]
    folder = texts["train"].parent
    vocab, data = folder / f"vocab-{run.vocab_size}", folder / f"data-{name}"
    vocab_settings = {key: value for key, value in shared.items() if key != "data.max_seq_length"}
    log = folder / f"data-{name}.log"
    if not (vocab / "manifest.json").exists():
        call(["vocab", str(texts["train"]), "--output", str(vocab)], vocab_settings, log)
    if not (data / "manifest.json").exists():
        held_out = ["--validation", str(texts["validation"])]
        call(["make-data", str(texts["train"]), "--vocab", str(vocab), "--output", str(data), *held_out], shared, log)
    return data


def train(run: Run, data: Path, options: argparse.Namespace, texts: Mapping[str, Path]) -> dict[str, Any]:
    """Train and score; returns the row of the results."""
    folder = options.work / "runs" / key_of(run)
    settings = {key: value for key, value in run.settings.items() if not key.startswith(SHARED_SETTINGS)}
    settings |= {"train.eval_every": str(max(1, run.steps // POINTS)), "train.save_every": str(run.steps)}
    settings["train.log_every"] = "50"
    settings["train.device"] = options.device
    begin = time.perf_counter()
    program = [sys.executable, str(Path(__file__).with_name("learning_variants.py")), run.variant]
    call(
        ["train", "--data", str(data), "--output", str(folder)], settings, folder.with_suffix(".log"), program, options
    )
    seconds = time.perf_counter() - begin
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if "validation_mlm_loss" not in line]
    evaluations = [line for line in lines if "validation_mlm_loss" in line]
    validation, tokens_per_step = evaluations[-1], trained[-1]["tokens"] / trained[-1]["step"]
    score = score_of(folder / "model", texts["dev"], options)
    if not options.keep:
        shutil.rmtree(folder)
    return {
        **asdict(run),
        "language": options.language,
        "nats_per_byte": score,
        "mlm_loss": validation["validation_mlm_loss"],
        "mlm_accuracy": validation["validation_mlm_accuracy"],
        "nsp_accuracy": validation["validation_nsp_accuracy"],
        "train_mlm_loss": trained[-1]["mlm_loss"],
        "tokens": trained[-1]["tokens"],
        "epochs": trained[-1]["epoch"],
        "seconds": trained[-1]["elapsed_seconds"],
        "wall_seconds": seconds,
        "curve": {
            "tokens": [round(line["step"] * tokens_per_step) for line in evaluations],
            **{name: [line[name] for line in evaluations] for name in METRICS},
        },
    }


def score_finally(wanted: list[Run], options: argparse.Namespace, texts: Mapping[str, Path]) -> None:
    """Print the score of kept models on the test split."""
    for run in wanted:
        model = options.work / "runs" / key_of(run) / "model"
        if not model.exists():
            raise SystemExit(f"{model} is not there: train with --keep")
        score = score_of(model, texts["test"], options)
        print(f"{key_of(run)}: {score:.4f} nats per byte of masked words (test)")


def score_of(model: Path, text: Path, options: argparse.Namespace) -> float:
    """Score a folder in a process of its own: `transformers` loads one model at a time."""
    program = [sys.executable, str(Path(__file__).with_name("word_scores.py")), str(text), str(model)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    done = subprocess.run(
        [*program, "--contexts", str(options.contexts)], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout.splitlines()[-1].split()[0])


def call(
    arguments: list[str],
    settings: Mapping[str, str],
    log: Path,
    program: list[str] | None = None,
    options: argparse.Namespace | None = None,
) -> None:
    """Run a command of the package."""
    command = [*(program or [sys.executable, "-m", "bert_pretrain"]), *arguments]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    environment = dict(os.environ)
    if options is not None:
        environment["OMP_NUM_THREADS"] = str(options.threads)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        if subprocess.run(command, env=environment, stdout=file, stderr=file).returncode:
            raise SystemExit(f"failed: {' '.join(command)}\nsee {log}")


def key_of(run: Run) -> str:
    return f"{run.corpus}_{run.variant}_{run.size}_v{run.vocab_size}_b{run.batch}_n{run.steps}_s{run.seed}"


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {key_of(Run(**{name: row[name] for name in Run.__dataclass_fields__})): row for row in rows}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return a Markdown table of means, with least and most, over seeds."""
    lines = [
        "| run | seeds | nats per byte | held-out MLM, nats | NSP | tokens | seconds |",
        "|---|---:|---|---|---|---:|---:|",
    ]
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        name = f"{row['corpus']} {row['variant']}, L{row['size'].replace('x', '-H')}, {row['vocab_size']:,} tokens"
        groups.setdefault(f"{name}, batch {row['batch']}, {row['steps']:,} steps", []).append(row)
    for name, group in groups.items():
        cells = [f"{name} | {len(group)}"]
        for figure, form in (("nats_per_byte", ".4f"), ("mlm_loss", ".3f"), ("nsp_accuracy", ".1%")):
            values = [row[figure] for row in group if row[figure] is not None]
            if not values:
                cells.append("–")
                continue
            spread = f"{min(values):{form}}–{max(values):{form}}"
            cells.append(f"{statistics.mean(values):{form}} ({spread})")
        means = (statistics.mean(row[figure] for row in group) for figure in ("tokens", "seconds"))
        cells += [f"{value:,.0f}" for value in means]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
