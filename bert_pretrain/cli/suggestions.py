"""Help by sections; an unknown flag is answered with the flag, or the key, that was probably meant."""

from difflib import get_close_matches
from typing import Any

from typer.core import TyperCommand

from bert_pretrain.cli.options import KEYS_OF_FLAGS


class SuggestingCommand(TyperCommand):
    """A command that knows what other programs call its flags."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the help of arguments and options, those of one task under its name."""
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
        """Parse the arguments; the error of an unknown option says which one was probably meant."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if hasattr(error, "possibilities"):  # NoSuchOption, which typer takes from click or from its own copy of it
                flags = [flag for parameter in self.params for flag in parameter.opts]
                if meant := _meant(error.option_name, flags):  # type: ignore[attr-defined]
                    error.message += f"; did you mean {meant}?"  # type: ignore[attr-defined]
                error.possibilities = None
            raise


def _meant(unknown: str, flags: list[str]) -> str | None:
    """Return the flag, or the `--set`, that stands for an unknown option."""
    from bert_pretrain.config_keys import suggest_key

    key = suggest_key(unknown.lstrip("-").replace("-", "_")) or ""
    candidates = [
        *get_close_matches(unknown, flags, n=1, cutoff=0.8),
        *(flag for flag, meant in KEYS_OF_FLAGS.items() if meant == key and flag in flags),
        *([f"--set {key}=VALUE"] if "." in key and "--set" in flags else []),
        *get_close_matches(unknown, flags, n=1),
    ]
    return candidates[0] if candidates else None
