"""Print an inspection to the terminal: examples with their masks, statistics and checks.

Marks carry the same information as colors, for files, logs and NO_COLOR.
"""

import os
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bert_pretrain.inspect.checks import CHECKS
from bert_pretrain.inspect.inspection import Inspection
from bert_pretrain.inspect.rendering import RenderedExample, Token

STYLES = {"plain": "", "mask": "cyan", "random": "red", "kept": "yellow"}
TITLE = "bold"
GOOD = "green"
BAD = "bold red"
MAX_FAILURES = 5  # messages shown of each check
_LEGEND = (
    (Token("[MASK]", "word", "mask", False), "masked"),
    (Token("other", "word", "random", False), "replaced by a random token"),
    (Token("word", "word", "kept", False), "unchanged, but predicted"),
)


def show(inspection: Inspection, *, examples: Sequence[RenderedExample], with_statistics: bool) -> None:
    """Print examples, optional statistics, and the result of the checks."""
    console = Console(
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
    print(output.get(), end="")


def _print_example(console: Console, example: RenderedExample) -> None:
    """Print a title, then the segments wrapped to the width of the terminal."""
    title = f"{example.split} row {example.row}: {example.num_tokens} tokens, {example.predictions}"
    if example.label:
        title += f" · {example.label}"
    console.print(title, style=TITLE)
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name, tokens in example.segments:
        words = Text()
        for token in tokens:
            words.append(" " * token.has_space)
            words.append_text(_marked(token))
        grid.add_row(Text(name, TITLE), words)
    console.print(grid, soft_wrap=False)
    console.print()


def _marked(token: Token) -> Text:
    if token.kind == "plain":
        return Text(token.shown)
    change = f"⟨={token.original}⟩" if token.kind == "kept" else f"⟨{token.shown}→{token.original}⟩"
    return Text(change, STYLES[token.kind])


def _print_statistics(console: Console, inspection: Inspection) -> None:
    """Print the counted statistics next to the configured values, and all checks."""
    console.print(f"{inspection.folder.path}: {inspection.corpus}", style=TITLE)
    header, *rows = inspection.statistics
    table = Table(box=box.SIMPLE_HEAD)
    for name in header:
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print("checks", style=TITLE)
    for name, messages in inspection.failures.items():
        outcome = Text("FAILED", BAD) if messages else Text("passed", GOOD)
        console.print(outcome, f"{name:<18}{CHECKS[name]}")
    console.print()


def _print_outcome(console: Console, inspection: Inspection) -> None:
    failures = inspection.failures
    for name in inspection.failed:
        console.print(f"failed check: {name} ({CHECKS[name]})", style=BAD)
        for message in failures[name][:MAX_FAILURES]:
            console.print(f"  {message}")
        num_more = len(failures[name]) - MAX_FAILURES
        if num_more > 0:
            console.print(f"  and {num_more:,} more shards")
    num_failed = len(inspection.failed)
    if num_failed:
        console.print(f"{num_failed} of {len(failures)} checks failed ({inspection.scope})", style=BAD)
    else:
        console.print(f"all {len(failures)} checks passed ({inspection.scope})", style=GOOD)
