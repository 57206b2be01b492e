"""What several commands share: their options, models and configurations, and the form of their help."""

from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from bert_pretrain.flags import FLAGS

if TYPE_CHECKING:
    from bert_pretrain.config import Config

STARTED = monotonic()  # just after the interpreter started


def option(
    help: str,
    metavar: str | None = None,
    *flags: str,
    panel: str | None = None,
    **more: Any,
) -> Any:
    """Return an option; without `flags` it is named after its parameter."""
    return typer.Option(
        *flags,
        help=help,
        metavar=metavar,
        rich_help_panel=panel,
        **more,
    )


def switch(flag: str, help: str) -> Any:
    """Return a boolean option."""
    return option(help, None, flag)


def key(flag: str) -> Any:
    """Return the option that sets a key of the configuration; it is named after its parameter."""
    return option(FLAGS[flag].help, FLAGS[flag].metavar)


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
Lowercase = Annotated[bool | None, option("Whether the vocabulary is lowercase, if its folder does not say so.")]
Model = Annotated[Path, argument("MODEL", "A model folder, or org/name on the Hub.")]
BatchTokens = Annotated[int | None, option("Maximum number of tokens in a batch.", min=1)]
MaxLength = Annotated[int | None, option("Tokens to read; default: what the model is trained for.", "N", min=3)]
SkipEmpty = Annotated[bool, switch("--skip-empty", "Skip empty texts instead of stopping at them.")]
Device = Annotated[str, option("auto, cpu, cuda or cuda:N.", "DEVICE")]
Strict = Annotated[bool | None, switch("--strict", FLAGS["--strict"].help)]
# Strings, because the configuration parses values such as `1e5` and `24h`.
Encoding = Annotated[str | None, key("--encoding")]
TextField = Annotated[str | None, key("--text-field")]
Precision = Annotated[str, key("--precision")]
Steps = Annotated[str | None, key("--steps")]
LearningRate = Annotated[str | None, key("--learning-rate")]
BatchSize = Annotated[str | None, key("--batch-size")]
TrainingDevice = Annotated[str | None, key("--device")]


def key_flags(**values: object) -> dict[str, tuple[str, object]]:
    """Map the options that are given, named by their parameters, to keys, as `load_config` expects them."""
    flags: dict[str, tuple[str, object]] = {}
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        if value is not None:
            flags[FLAGS[flag].key] = (flag, value)
    return flags


def inference_config(**values: object) -> "Config":
    """Return the configuration of a command that uses a model. `values` are the same as in `key_flags`."""
    from bert_pretrain.config_file import load_config

    return load_config(flags=key_flags(**values))


def bert_folder(model: Path, flag: str = "MODEL") -> Path:
    """Return the local folder of a BERT model, after checks of its files that need no torch."""
    from bert_pretrain.model.folder import CONFIG, check_model, read_config
    from bert_pretrain.model.hub import model_folder

    folder = model_folder(model, flag)
    if (folder / CONFIG).exists() or not (folder / "modules.json").exists():  # sentence-transformers uses subfolders
        check_model(folder, flag, verify_hashes=False)
        read_config(folder, flag)
    return folder


class PanelCommand(TyperCommand):
    """A command whose help has a section for each panel of options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the help of arguments and options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            is_argument = parameter.param_type_name == "argument"
            name = "Arguments" if is_argument else getattr(parameter, "rich_help_panel", None) or "Options"
            if (record := parameter.get_help_record(ctx)) is not None:
                sections.setdefault(name, []).append(record)
        for name, records in sections.items():
            with formatter.section(name):
                formatter.write_dl(records)
