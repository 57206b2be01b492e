"""Print an inspection to the terminal: examples with their masks, statistics and checks.

Marks carry the same information as colors, for files, logs and NO_COLOR.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bert_pretrain.inspect.checks import CHECKS
from bert_pretrain.inspect.rendering import RenderedExample, Token

if TYPE_CHECKING:
    from bert_pretrain.inspect.inspect import Inspection

STYLES = {"plain": "", "mask": "cyan", "random": "red", "kept": "yellow"}
TITLE, GOOD, BAD = "bold", "green", "bold red"
_LEGEND = (
    (Token("[MASK]", "word", "mask", False), "masked"),
    (Token("other", "word", "random", False), "replaced by a random token"),
    (Token("word", "word", "kept", False), "unchanged, but predicted"),
)


def show(inspection: "Inspection", *, examples: Sequence[RenderedExample], with_statistics: bool) -> None:
    """Print examples, optional statistics, and the result of the checks."""
    if sys.stdout is None:  # the descriptor was closed at the start
        return
    console = Console(
        width=min(shutil.get_terminal_size((100, 24)).columns, 120),
        force_terminal=sys.stdout.isatty(),
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=True,
    )
    with console.capture() as output:
        if any(example.num_masked for example in examples):
            meanings = [_marked(token).append(f" {meaning}", "") for token, meaning in _LEGEND]
            console.print(Text(" · ").join(meanings), end="\n\n")
        for example in examples:
            _print_example(console, example)
        if with_statistics:
            _print_statistics(console, inspection)
        _print_outcome(console, inspection)
    encoding = sys.stdout.encoding or "utf-8"  # may lack some characters
    lines = (line.rstrip() for line in output.get().split("\n"))
    print("\n".join(lines).encode(encoding, "replace").decode(encoding), end="")


def _print_example(console: Console, example: RenderedExample) -> None:
    """Print a title, then the segments wrapped to the width of the terminal."""
    label = f" · {example.label}" if example.label else ""
    title = f"{example.split} row {example.row}: {example.num_tokens} tokens, {example.predictions}{label}"
    console.print(title, style=TITLE)
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name, tokens in example.segments:
        words = (Text(" " if token.has_space else "").append_text(_marked(token)) for token in tokens)
        grid.add_row(Text(name, TITLE), Text().join(words))
    console.print(grid, soft_wrap=False)
    console.print()


def _marked(token: Token) -> Text:
    if token.kind == "plain":
        return Text(token.shown)
    change = f"⟨={token.original}⟩" if token.kind == "kept" else f"⟨{token.shown}→{token.original}⟩"
    return Text(change, STYLES[token.kind])


def _print_statistics(console: Console, inspection: "Inspection") -> None:
    """Print the counted statistics next to the configured values, and all checks."""
    header, *rows = inspection.statistics
    console.print(f"{inspection.folder.path}: {inspection.corpus}", style=TITLE)
    table = Table(box=box.SIMPLE_HEAD)
    for name in header:
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print("checks", style=TITLE)
    for name, lines in inspection.failures.items():
        console.print(Text("FAILED", BAD) if lines else Text("passed", GOOD), f"{name:<18}{CHECKS[name]}")
    console.print()


def _print_outcome(console: Console, inspection: "Inspection") -> None:
    failed, num_checks = inspection.failed, len(inspection.failures)
    max_lines = 5
    for name in failed:
        console.print(f"failed check: {name} ({CHECKS[name]})", style=BAD)
        lines = inspection.failures[name]
        more = [f"and {len(lines) - max_lines:,} more shards"] if len(lines) > max_lines else []
        for line in lines[:max_lines] + more:
            console.print(f"  {line}")
    outcome = f"{len(failed)} of {num_checks} checks failed" if failed else f"all {num_checks} checks passed"
    console.print(f"{outcome} ({inspection.scope})", style=BAD if failed else GOOD)
