"""Options that several commands share, each with its help."""

from typing import Annotated

import typer

Inputs = Annotated[list[str], typer.Argument(help="Files, globs, folders, URLs, or dataset:NAME[:config][@split].")]
Output = Annotated[str, typer.Option("--output", metavar="FOLDER", help="The folder to write.")]
RemoteOutput = Annotated[str, typer.Option("--output", metavar="FOLDER|URL", help="The folder to write.")]


def presets(incomplete: str) -> list[str]:
    """Return the shipped presets whose names begin with a prefix, for shell completion."""
    from bert_pretrain.config_file import preset_paths

    return [name for name in preset_paths() if name.startswith(incomplete)]


ConfigSource = Annotated[
    str | None,
    typer.Option("--config", help="A YAML file, or a shipped preset such as base or tiny.", autocompletion=presets),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set one key of the configuration.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Move another output aside instead of refusing it.")]
Workers = Annotated[int | None, typer.Option("--workers", min=1, help="Processes; all cores by default.")]
Scheduler = Annotated[
    str | None,
    typer.Option("--scheduler", metavar="tcp://HOST:PORT", help="Use the Dask cluster of this scheduler."),
]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse text that is not UTF-8 instead of repairing it.")]
Lowercase = Annotated[
    bool | None,
    typer.Option("--lowercase/--no-lowercase", help="Whether the vocabulary is lowercase, if its folder does not say."),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
