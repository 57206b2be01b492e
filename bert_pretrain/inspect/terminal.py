"""An inspection in the terminal: examples with their masks, figures as columns, histograms as bars, failed checks.

Marks say everything that colours do, so that the output reads the same in a file, in a log and with NO_COLOR.
"""

import os
import shutil
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from bert_pretrain.inspect import figures
from bert_pretrain.inspect.checks import NO_TOLERANCE
from bert_pretrain.inspect.inspection import Inspection
from bert_pretrain.inspect.rendering import RenderedExample, Token, is_wide

STYLES = {"plain": "", "mask": "cyan", "random": "red", "kept": "yellow"}
TITLE, GOOD, BAD = "bold", "green", "bold red"
_BAR_COLUMNS = 28
_MAX_COLUMNS = 120
_LEGEND = (
    (Token("[MASK]", "word", "mask", False), "masked"),
    (Token("other", "word", "random", False), "replaced by a random token"),
    (Token("word", "word", "kept", False), "unchanged, but predicted"),
)


def show(inspection: Inspection, *, examples: Sequence[RenderedExample], with_figures: bool) -> None:
    """Print examples, figures if asked, and the outcome of the checks."""
    if sys.stdout is None:  # its descriptor was closed at the start
        return
    console = Console(
        width=min(shutil.get_terminal_size((100, 24)).columns, _MAX_COLUMNS),
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
        if with_figures:
            _print_figures(console, inspection)
            _print_checks(console, inspection)
        _print_outcome(console, inspection)
    encoding = sys.stdout.encoding or "utf-8"  # which may lack a character
    lines = (line.rstrip() for line in output.get().split("\n"))
    print("\n".join(lines).encode(encoding, "replace").decode(encoding), end="")


def _print_example(console: Console, example: RenderedExample) -> None:
    """Print an example: what it is, then A and B, wrapped to the width of the terminal."""
    label = f" · {example.label}" if example.label else ""
    title = f"{example.split} row {example.row}: {example.num_tokens} tokens, {example.predictions}{label}"
    console.print(title, style=TITLE)
    for segment in example.segments:
        for number, line in enumerate(_wrapped(segment.tokens, console.width - 3)):
            console.print(Text(" ") if number else Text(segment.name, TITLE), line, sep="  ")
    console.print()


def _wrapped(tokens: Sequence[Token], columns: int) -> list[Text]:
    """Return lines that break between words, and between wide characters."""
    lines: list[Text] = [Text()]
    words: list[list[Token]] = []
    for token in tokens:
        if words and not token.has_space and not (token.original and is_wide(token.original[0])):
            words[-1].append(token)
        else:
            words.append([token])
    for word in words:
        text = Text().join(map(_marked, word))
        space = " " if word[0].has_space and lines[-1] else ""
        if lines[-1] and lines[-1].cell_len + len(space) + text.cell_len > columns:
            lines.append(Text())
            space = ""
        lines[-1].append(space).append_text(text)
    return lines


def _marked(token: Token) -> Text:
    if token.kind == "plain":
        return Text(token.shown)
    change = f"⟨={token.original}⟩" if token.kind == "kept" else f"⟨{token.shown}→{token.original}⟩"
    return Text(change, STYLES[token.kind])


def _print_figures(console: Console, inspection: Inspection) -> None:
    splits = list(inspection.scans)
    console.print(str(inspection.folder.path), style=TITLE)
    for name, value in figures.origin(inspection):
        console.print(f"  {name:<28}{value}")
    console.print()
    console.print(f"{'':<30}" + "".join(f"{split:^28}" for split in splits), style=TITLE)
    console.print(f"{'':<30}" + f"{'manifest':>14}{'measured':>14}" * len(splits))
    for title, values in figures.compare(inspection):
        console.print(f"{title:<30}" + "".join(f"{value:>14}" for value in values))
    block, sliver = ("#", ".") if console.options.ascii_only else ("█", "▏")
    for histogram in figures.histograms(inspection):
        console.print(f"\n{histogram.title}", style=TITLE)
        console.print(f"{'':>12}" + "".join(f"{split:<{_BAR_COLUMNS + 10}}" for split in histogram.shares))
        for label, *shares in zip(histogram.labels, *histogram.shares.values(), strict=True):
            line = f"{label:>10}  "
            for share, all_shares in zip(shares, histogram.shares.values(), strict=True):
                blocks = round(share / (max(all_shares) or 1.0) * (_BAR_COLUMNS - 2))
                line += f"{share:>7.2%} {block * blocks or sliver * (share > 0):<{_BAR_COLUMNS}}  "
            console.print(line)
    console.print()


def _print_checks(console: Console, inspection: Inspection) -> None:
    """Print all checks, one per line."""
    console.print("checks", style=TITLE)
    checks = inspection.checks
    split_width, name_width = max(len(check.split) for check in checks), max(len(check.name) for check in checks)
    for check in checks:
        bounds = "" if check.tolerance == NO_TOLERANCE else f", allowed: {check.tolerance}"
        mark = Text("passed", GOOD) if check.passed else Text("FAILED", BAD)
        text = f"{check.split:<{split_width}}  {check.name:<{name_width}}  {check.measured}{bounds}"
        console.print(mark, text, sep="  ")
    console.print()


def _print_outcome(console: Console, inspection: Inspection) -> None:
    failed, number = inspection.failed, len(inspection.checks)
    for check in failed:
        console.print(f"failed check: {check.split}, {check.name}", style=BAD)
        console.print(f"  measured:  {check.measured}\n  expected:  {check.expected}\n  tolerance: {check.tolerance}")
    if failed:
        console.print(f"{len(failed)} of {number} checks failed ({inspection.scope})", style=BAD)
    else:
        console.print(f"all {number} checks passed ({inspection.scope})", style=GOOD)
