"""Options shared by several commands, the layout of the help, and suggestions for unknown options."""

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand


def option(help: str, metavar: str | None = None, *flags: str, panel: str | None = None, **more: Any) -> Any:
    """Return an option; without `flags` it is named after its parameter."""
    return typer.Option(*flags, help=help, metavar=metavar, rich_help_panel=panel, **more)


def switch(flag: str, help: str, panel: str | None = None) -> Any:
    """Return a boolean option."""
    return option(help, None, flag, panel=panel)


def argument(metavar: str, help: str, **more: Any) -> Any:
    """Return a positional argument."""
    return typer.Argument(metavar=metavar, help=help, **more)


def presets(incomplete: str) -> list[str]:
    """Return the completions of a preset name, which may follow other names and a comma."""
    from bert_pretrain.config_file import preset_paths

    before, comma, prefix = incomplete.rpartition(",")
    return [before + comma + name for name in preset_paths() if name.startswith(prefix)]


_INPUTS = "Files, globs, folders, URLs, or dataset:NAME"
Inputs = Annotated[list[str], argument("INPUT", f"{_INPUTS}[:config][@split].")]
Texts = Annotated[list[str], argument("INPUT", f"{_INPUTS}; each line of .txt is a text.")]
Output = Annotated[str, option("The folder to write.", "FOLDER")]
_PRESETS = "YAML files or presets such as base, joined by commas"
ConfigSource = Annotated[str | None, option(f"{_PRESETS}.", "PRESET|FILE", "--config", autocompletion=presets)]
RunConfig = Annotated[str, argument("CONFIG", f"{_PRESETS}, or auto.", autocompletion=presets)]
Settings = Annotated[list[str] | None, option("Set one key of the configuration.", "SECTION.KEY=VALUE", "--set")]
Overwrite = Annotated[bool, switch("--overwrite", "Move an existing output aside and start from the beginning.")]
Workers = Annotated[int | None, option("Number of processes; default: at most one per core.", "N", min=1)]
Scheduler = Annotated[str | None, option("Use the Dask cluster of this scheduler.", "tcp://HOST:PORT")]
Strict = Annotated[bool, switch("--strict", "Stop at text that cannot be decoded and at records without text.")]
Encoding = Annotated[str | None, option("Encoding of text files, if not UTF-8; auto detects it per file.", "NAME")]
_LOWERCASE = "Lowercase the text; default: in English and Chinese. With --extend: casing of its vocabulary, if unknown."
VocabLowercase = Annotated[bool | None, option(_LOWERCASE)]
Lowercase = Annotated[bool | None, option("Whether the vocabulary is lowercase, if its folder does not say so.")]
Model = Annotated[Path, argument("MODEL", "A model folder, or org/name on the Hub.")]
BatchTokens = Annotated[int | None, option("Maximum number of tokens in a batch.", min=1)]
MaxLength = Annotated[int | None, option("Tokens to read; default: what the model is trained for.", "N", min=3)]
TextField = Annotated[str | None, option("Name of the text field in records; text by default.")]
SkipEmpty = Annotated[bool, switch("--skip-empty", "Skip empty texts instead of stopping at them.")]
Precision = Annotated[str, option("Precision of matrix products: fp32, bf16, fp16 or auto.")]
Device = Annotated[str, option("auto, cpu, cuda or cuda:N.", "DEVICE")]
# Strings, because the configuration parses values such as `1e5` and `24h`.
Steps = Annotated[str | None, option("Length of the run in steps.", "N")]
Time = Annotated[str | None, option("Length of the run, such as 24h or 1h30m.", "TIME")]
LearningRate = Annotated[str | None, option("Peak learning rate, after the warm-up.", "RATE")]
BatchSize = Annotated[str | None, option("Examples per step.", "N")]
TrainingDevice = Annotated[str | None, option("auto (default), cpu, cuda or cuda:N.", "DEVICE")]

FLAG_KEYS = {  # configuration keys that have a flag
    "--steps": "train.max_steps",
    "--time": "train.time_budget",
    "--learning-rate": "train.peak_lr",
    "--batch-size": "train.global_batch_size",
    "--device": "train.device",
    "--vocab-size": "vocab.size",
}


def training_flags(**values: str | None) -> dict[str, tuple[str, str | None]]:
    """Map the values of flags, named by their parameters, to configuration keys as `load_config` expects them."""
    flags = {f"--{name.replace('_', '-')}": value for name, value in values.items()}
    return {FLAG_KEYS[flag]: (flag, value) for flag, value in flags.items()}


class SuggestingCommand(TyperCommand):
    """A command that suggests an existing option for an unknown one, such as `--learning-rate` for `--lr`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the help of arguments and options; each panel is a section."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            is_argument = parameter.param_type_name == "argument"
            name = "Arguments" if is_argument else getattr(parameter, "rich_help_panel", None) or "Options"
            if (record := parameter.get_help_record(ctx)) is not None:
                sections.setdefault(name, []).append(record)
        for name, records in sections.items():
            with formatter.section(name):
                formatter.write_dl(records)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; the error for an unknown option suggests a known one."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if hasattr(error, "possibilities"):  # NoSuchOption, from click or from the copy inside typer
                flags = [flag for parameter in self.params for flag in parameter.opts]
                if suggestion := _suggest(error.option_name, flags):  # type: ignore[attr-defined]
                    error.message += f"; did you mean {suggestion}?"  # type: ignore[attr-defined]
                error.possibilities = None
            raise


def _suggest(unknown: str, flags: list[str]) -> str | None:
    """Return the flag or the `--set` that an unknown option probably means."""
    from bert_pretrain.config_keys import suggest_key

    key = suggest_key(unknown.lstrip("-").replace("-", "_")) or ""
    candidates = [
        *get_close_matches(unknown, flags, n=1, cutoff=0.8),
        *(flag for flag, flag_key in FLAG_KEYS.items() if flag_key == key and flag in flags),
        *([f"--set {key}=VALUE"] if "." in key and "--set" in flags else []),
        *get_close_matches(unknown, flags, n=1),
    ]
    return candidates[0] if candidates else None
