"""Options that several commands share, each with its help."""

from pathlib import Path
from typing import Annotated

import typer

Inputs = Annotated[
    list[str],
    typer.Argument(metavar="INPUT", help="Files, globs, folders, URLs, or dataset:NAME[:config][@split]."),
]
Output = Annotated[str, typer.Option("--output", metavar="FOLDER", help="The folder to write.")]


def presets(incomplete: str) -> list[str]:
    """Return the shipped presets that complete a prefix, the last of several joined by commas."""
    from bert_pretrain.config_file import preset_paths

    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in preset_paths() if name.startswith(last)]


ConfigSource = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="PRESET|FILE",
        help="YAML files or presets such as base, joined by commas.",
        autocompletion=presets,
    ),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set one key of the configuration.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Move another output aside instead of refusing it.")]
Workers = Annotated[int | None, typer.Option("--workers", metavar="N", min=1, help="Processes; all cores by default.")]
Scheduler = Annotated[
    str | None,
    typer.Option("--scheduler", metavar="tcp://HOST:PORT", help="Use the Dask cluster of this scheduler."),
]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse text that is not UTF-8 instead of repairing it.")]
Encoding = Annotated[
    str | None,
    typer.Option("--encoding", metavar="NAME", help="Of text files, if not UTF-8; auto: each file has its own."),
]
Lowercase = Annotated[
    bool | None,
    typer.Option("--lowercase/--no-lowercase", help="Whether the vocabulary is lowercase, if its folder does not say."),
]
Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder, or org/name on the Hub.")]
BatchTokens = Annotated[int | None, typer.Option("--batch-tokens", min=1, help="Tokens that run at once.")]
TextField = Annotated[str | None, typer.Option("--text-field", help="Field of the text in records; text by default.")]
SkipEmpty = Annotated[bool, typer.Option("--skip-empty", help="Skip empty texts instead of refusing them.")]
Precision = Annotated[str, typer.Option("--precision", help="Of the matrix products: fp32, bf16, fp16 or auto.")]
Device = Annotated[str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda, cuda:N or mps.")]
# As texts: the configuration says what they mean, `1e5` and `24h` too.
Steps = Annotated[str | None, typer.Option("--steps", metavar="N", help="Length of the run in steps.")]
Time = Annotated[str | None, typer.Option("--time", metavar="TIME", help="Length of the run, such as 24h or 1h30m.")]
LearningRate = Annotated[str | None, typer.Option("--learning-rate", metavar="RATE", help="At the end of the warm-up.")]
BatchSize = Annotated[str | None, typer.Option("--batch-size", metavar="N", help="Examples per step.")]
TrainingDevice = Annotated[
    str | None, typer.Option("--device", metavar="DEVICE", help="auto (default), cpu, cuda, cuda:N or mps.")
]


KEYS_OF_FLAGS = {
    "--steps": "train.max_steps",
    "--time": "train.time_budget",
    "--learning-rate": "train.peak_lr",
    "--batch-size": "train.global_batch_size",
    "--device": "train.device",
    "--vocab-size": "vocab.size",
}
"""Common keys of the configuration that have a flag."""


def training_flags(
    steps: str | None, learning_rate: str | None, batch_size: str | None, device: str | None, time: str | None = None
) -> dict[str, tuple[str, str | None]]:
    """Return the keys that these flags set, as `load_config` takes them."""
    values = {
        "--steps": steps,
        "--time": time,
        "--learning-rate": learning_rate,
        "--batch-size": batch_size,
        "--device": device,
    }
    return {KEYS_OF_FLAGS[flag]: (flag, value) for flag, value in values.items()}
