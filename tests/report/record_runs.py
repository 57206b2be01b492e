"""Record healthy runs for `test_diagnosis.py`: `python -m tests.report.record_runs [RUN_FOLDER...]`.

Trains tiny models of several configurations on the synthetic language of the tests, seconds each, and keeps of these
and of the given run folders what hints look at.
"""

import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from bert_pretrain.config import Config
from bert_pretrain.io import manifest
from bert_pretrain.report.curves import read_metrics
from bert_pretrain.train.run import train
from tests.train.conftest import make_data_folder

RECORDED = Path(__file__).with_name("healthy_runs.json")
MODEL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
TRAIN = {
    "global_batch_size": 64, "micro_batch_tokens": 2048, "max_steps": 400, "peak_lr": 5e-3, "optimizer": "muon",
    "precision": "fp32", "device": "cpu", "log_every": 8, "eval_every": 50, "save_every": 10_000, "warmup_ratio": 0.1,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "muon": {},
    "muon, wsd": {"schedule": "wsd", "warmup_ratio": 0.05},
    "adamw, unigram bias": {"mlm_bias": "unigram", "optimizer": "adamw"},
    "masked tokens alone, unigram bias": {"next_sentence": "none", "mlm_bias": "unigram", "optimizer": "adamw"},
    "masked tokens alone": {"next_sentence": "none"},
    "dynamic masks": {"masking": "dynamic"},
    "dropout": {"hidden_dropout_prob": 0.1},
    "cosine": {"schedule": "cosine", "warmup_ratio": 0.05},
    "higher rate": {"peak_lr": 1e-2, "schedule": "wsd"},
    "small batch": {"global_batch_size": 48},
    "rare lines": {"log_every": 20},
    "another seed": {"seed": 7},
}
LINE = ("step", "elapsed_seconds", "mlm_loss", "nsp_accuracy", "grad_norm")
NAMES = (*LINE, "validation_mlm_loss")


def record(folder: Path) -> dict[str, Any]:
    """Return what hints look at of a run folder, its lines as arrays in the order of `NAMES`."""
    known = manifest.read_record(folder)
    statistics = known["data"]["statistics"]
    names = ("warmup_ratio", "warmup_steps", "schedule_steps", "max_grad_norm")
    return {
        "length": known["length"],
        "config": {"train": {name: known["config"]["train"][name] for name in names}},
        "data": {"statistics": {name: statistics[name] for name in ("next_sentence", "unigram_entropy")}},
        "lines": [[_short(line.get(name)) for name in NAMES] for line in read_metrics(folder)],
    }


def lines_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the lines of a recorded run as `metrics.jsonl` has them."""
    found = []
    for values in run["lines"]:
        line = dict(zip(NAMES, values, strict=True))
        is_evaluation = line["validation_mlm_loss"] is not None
        kept = ("step", "validation_mlm_loss") if is_evaluation else LINE
        found.append({name: line[name] for name in kept})
    return found


def _short(value: float | None) -> float | None:
    return value if value is None or value == 0 else round(value, max(0, 4 - math.floor(math.log10(abs(value)))))


def train_variant(folder: Path, settings: dict[str, Any]) -> Path:
    """Train a tiny model, and return its run folder."""
    data = {name: settings[name] for name in ("next_sentence", "masking") if name in settings}
    make_data_folder(folder / "data", shard_rows=(1500, 1500), validation_rows=200, **data)
    model = {**MODEL, **{name: value for name, value in settings.items() if name in MODEL}}
    rest = {name: value for name, value in settings.items() if name not in MODEL and name not in data}
    config = Config.model_validate({"model": model, "train": {**TRAIN, **rest}})
    train(config, folder / "data", folder / "run")
    return folder / "run"


def main(folders: list[str]) -> None:
    """Write the file of recorded runs."""
    found = {Path(folder).name: record(Path(folder)) for folder in folders}
    with tempfile.TemporaryDirectory() as place:
        for number, (name, settings) in enumerate(VARIANTS.items()):
            print(name)
            found[name] = record(train_variant(Path(place) / str(number), settings))
            runs = (f"{json.dumps(each)}: {json.dumps(run, separators=(',', ':'))}" for each, run in found.items())
            RECORDED.write_text("{\n" + ",\n".join(runs) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
