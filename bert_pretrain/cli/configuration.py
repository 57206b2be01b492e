"""The command that shows the configuration."""

from typing import Annotated

from bert_pretrain import __version__
from bert_pretrain.cli.loading import load_config
from bert_pretrain.cli.options import argument, presets


def config(
    preset: Annotated[
        str | None,
        argument("PRESET", "Presets or YAML files, joined by commas; without: defaults.", autocompletion=presets),
    ] = None,
) -> None:
    """Print every key of the configuration with value and meaning.

    The output is a YAML file that --config and run take.

    Example: bert-pretrain config base > mine.yaml
    """
    from bert_pretrain.config_keys import as_commented_yaml

    loaded = load_config(preset, None)
    print(
        f"# {preset or 'The defaults'}, as bert-pretrain {__version__} reads it.\n\n{as_commented_yaml(loaded)}", end=""
    )
