"""Options that several commands share, each with its help."""

from pathlib import Path
from typing import Annotated, Any

import typer


def option(help: str, metavar: str | None = None, *flags: str, panel: str | None = None, **more: Any) -> Any:
    """Return an option that has the name of its parameter, unless flags are given."""
    return typer.Option(*flags, help=help, metavar=metavar, rich_help_panel=panel, **more)


def switch(flag: str, help: str, panel: str | None = None) -> Any:
    """Return an option without a value."""
    return option(help, None, flag, panel=panel)


def argument(metavar: str, help: str, **more: Any) -> Any:
    """Return a positional argument."""
    return typer.Argument(metavar=metavar, help=help, **more)


def presets(incomplete: str) -> list[str]:
    """Return the shipped presets that complete a prefix, the last of several joined by commas."""
    from bert_pretrain.config_file import preset_paths

    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in preset_paths() if name.startswith(last)]


_INPUTS = "Files, globs, folders, URLs, or dataset:NAME"
Inputs = Annotated[list[str], argument("INPUT", f"{_INPUTS}[:config][@split].")]
Texts = Annotated[list[str], argument("INPUT", f"{_INPUTS}; each line of .txt is a text.")]
Output = Annotated[str, option("The folder to write.", "FOLDER")]
_PRESETS = "YAML files or presets such as base, joined by commas"
ConfigSource = Annotated[str | None, option(f"{_PRESETS}.", "PRESET|FILE", "--config", autocompletion=presets)]
RunConfig = Annotated[str, argument("CONFIG", f"{_PRESETS}; auto plans.", autocompletion=presets)]
Settings = Annotated[list[str] | None, option("Set one key of the configuration.", "SECTION.KEY=VALUE", "--set")]
Overwrite = Annotated[bool, switch("--overwrite", "Move another output aside instead of refusing it.")]
Workers = Annotated[int | None, option("Processes; all cores by default.", "N", min=1)]
Scheduler = Annotated[str | None, option("Use the Dask cluster of this scheduler.", "tcp://HOST:PORT")]
Strict = Annotated[bool, switch("--strict", "Refuse text that is not UTF-8 instead of repairing it.")]
Encoding = Annotated[str | None, option("Of text files, if not UTF-8; auto: each file has its own.", "NAME")]
Lowercase = Annotated[bool | None, option("Whether the vocabulary is lowercase, if its folder does not say.")]
Model = Annotated[Path, argument("MODEL", "A model folder, or org/name on the Hub.")]
BatchTokens = Annotated[int | None, option("Tokens that run at once.", min=1)]
TextField = Annotated[str | None, option("Field of the text in records; text by default.")]
SkipEmpty = Annotated[bool, switch("--skip-empty", "Skip empty texts instead of refusing them.")]
Precision = Annotated[str, option("Of the matrix products: fp32, bf16, fp16 or auto.")]
Device = Annotated[str, option("auto, cpu, cuda, cuda:N or mps.", "DEVICE")]
# As texts: the configuration says what they mean, `1e5` and `24h` too.
Steps = Annotated[str | None, option("Length of the run in steps.", "N")]
Time = Annotated[str | None, option("Length of the run, such as 24h or 1h30m.", "TIME")]
LearningRate = Annotated[str | None, option("At the end of the warm-up.", "RATE")]
BatchSize = Annotated[str | None, option("Examples per step.", "N")]
TrainingDevice = Annotated[str | None, option("auto (default), cpu, cuda, cuda:N or mps.", "DEVICE")]

KEYS_OF_FLAGS = {
    "--steps": "train.max_steps",
    "--time": "train.time_budget",
    "--learning-rate": "train.peak_lr",
    "--batch-size": "train.global_batch_size",
    "--device": "train.device",
    "--vocab-size": "vocab.size",
}
"""Common keys of the configuration that have a flag."""


def training_flags(**values: str | None) -> dict[str, tuple[str, str | None]]:
    """Return the keys that flags set, by the names of their parameters, as `load_config` takes them."""
    flags = {f"--{name.replace('_', '-')}": value for name, value in values.items()}
    return {KEYS_OF_FLAGS[flag]: (flag, value) for flag, value in flags.items()}
