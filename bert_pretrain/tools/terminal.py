"""An inspection in the terminal: examples with their masks, figures as columns, histograms as bars, promises not kept.

Marks say all that colours do, so that it reads the same in a file, in a log and with NO_COLOR.
"""

import os
import shutil
import sys
from collections.abc import Iterable, Sequence

from bert_pretrain.tools import figures
from bert_pretrain.tools.checks import NO_TOLERANCE, Check
from bert_pretrain.tools.inspection import Inspection
from bert_pretrain.tools.view import ExampleView, Piece, width_of

_COLOURS = {"mask": "36", "random": "31", "kept": "33", "title": "1", "good": "32", "bad": "1;31"}
_BAR_COLUMNS = 28
_MOST_COLUMNS = 120


def show(inspection: Inspection, *, examples: Sequence[ExampleView], figures: bool) -> None:
    """Print examples, figures if asked, and what the checks found."""
    style = Style()
    if any(example.num_masked for example in examples):
        legend = " · ".join(
            f"{style.paint(_marked(piece), piece.kind)} {meaning}"
            for piece, meaning in (
                (Piece("[MASK]", "word", "mask", True), "hidden"),
                (Piece("other", "word", "random", True), "replaced"),
                (Piece("word", "word", "kept", True), "left as it is, predicted all the same"),
            )
        )
        style.say(legend + "\n")
    for example in examples:
        for line in example_lines(example, style):
            style.say(line)
        style.say("")
    if figures:
        for line in _figure_lines(inspection, style):
            style.say(line)
        style.say("")
    for line in _verdict_lines(inspection, style, everything=figures):
        style.say(line)


class Style:
    """What the terminal can show: colours, width, and characters beyond ASCII."""

    def __init__(self) -> None:
        self.has_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self.columns = min(shutil.get_terminal_size((100, 24)).columns, _MOST_COLUMNS)
        self.encoding = sys.stdout.encoding or "utf-8"
        is_unicode = self.encoding.lower().replace("-", "").startswith("utf")
        self.block, self.sliver = ("█", "▏") if is_unicode else ("#", ".")

    def paint(self, text: str, kind: str) -> str:
        """Return a text in the colour of its kind, where there are colours."""
        return f"\x1b[{_COLOURS[kind]}m{text}\x1b[0m" if self.has_colour and kind in _COLOURS else text

    def say(self, line: str) -> None:
        """Print a line, with `?` for what the terminal's encoding does not have."""
        print(line.rstrip().encode(self.encoding, "replace").decode(self.encoding))


def example_lines(example: ExampleView, style: Style) -> Iterable[str]:
    """Yield an example: what it is, then A and B, wrapped to the width of the terminal."""
    label = f" · {example.label}" if example.label else ""
    title = f"{example.split} row {example.row}: {example.num_tokens} tokens, {example.predictions}{label}"
    yield style.paint(title, "title")
    for segment in example.segments:
        for number, line in enumerate(_wrapped(segment.pieces, style.columns - 3, style)):
            yield (style.paint(segment.name, "title") if number == 0 else " ") + "  " + line


def _wrapped(pieces: Sequence[Piece], columns: int, style: Style) -> list[str]:
    lines, line, used = [], "", 0
    for unit in _units(pieces):
        text = "".join(map(_marked, unit))
        gap = 0 if not used or unit[0].is_glued else 1
        if used and used + gap + width_of(text) > columns:
            lines.append(line)
            line, used, gap = "", 0, 0
        line += " " * gap + "".join(style.paint(_marked(piece), piece.kind) for piece in unit)
        used += gap + width_of(text)
    return [*lines, line]


def _units(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Return runs of pieces that no line end should part: words; wide characters stand for themselves."""
    units: list[list[Piece]] = []
    for piece in pieces:
        is_wide = bool(piece.original) and width_of(piece.original[0]) == 2
        if units and piece.is_glued and not is_wide:
            units[-1].append(piece)
        else:
            units.append([piece])
    return units


def _marked(piece: Piece) -> str:
    if piece.kind == "plain":
        return piece.shown
    return f"⟨={piece.original}⟩" if piece.kind == "kept" else f"⟨{piece.shown}→{piece.original}⟩"


def _figure_lines(inspection: Inspection, style: Style) -> Iterable[str]:
    rows = figures.table(inspection)
    splits = list(inspection.surveys)
    yield style.paint(f"{inspection.folder.path}", "title")
    yield from (f"  {name:<28}{value}" for name, value in figures.origin(inspection))
    yield ""
    yield style.paint(f"{'':<30}" + "".join(f"{split:^28}" for split in splits), "title")
    yield f"{'':<30}" + f"{'manifest':>14}{'measured':>14}" * len(splits)
    for name, values in rows:
        yield f"{name:<30}" + "".join(f"{value:>14}" for pair in values for value in pair)
    for histogram in figures.histograms(inspection):
        yield ""
        yield style.paint(histogram.title, "title")
        yield f"{'':>12}" + "".join(f"{split:<{_BAR_COLUMNS + 10}}" for split in histogram.shares)
        for number, label in enumerate(histogram.labels):
            bars = [_bar(shares, number, style) for shares in histogram.shares.values()]
            yield f"{label:>10}  " + "".join(bars)


def _bar(shares: Sequence[float], number: int, style: Style) -> str:
    most = max(shares) or 1.0
    blocks = style.block * round(shares[number] / most * (_BAR_COLUMNS - 2)) or style.sliver * (shares[number] > 0)
    return f"{shares[number]:>7.2%} {blocks:<{_BAR_COLUMNS}}  "


def _verdict_lines(inspection: Inspection, style: Style, *, everything: bool) -> Iterable[str]:
    if everything:
        widths = [max(len(text) for text in column) for column in zip(*map(_cells, inspection.checks), strict=True)]
        yield style.paint("promises", "title")
        for check in inspection.checks:
            mark = style.paint("kept  ", "good") if check.is_kept else style.paint("BROKEN", "bad")
            cells = [f"{text:<{width}}" for text, width in zip(_cells(check), widths, strict=True)]
            bounds = "" if check.tolerance == NO_TOLERANCE else f", allowed: {check.tolerance}"
            yield f"{mark}  " + "  ".join(cells) + f"  {check.measured}{bounds}"
        yield ""
    violations = inspection.violations
    for check in violations:
        yield style.paint(f"broken promise: {check.split}, {check.name}", "bad")
        yield f"  measured:  {check.measured}"
        yield f"  expected:  {check.expected}"
        yield f"  tolerance: {check.tolerance}"
    scope = figures.scope(inspection)
    if violations:
        yield style.paint(f"{len(violations)} of {len(inspection.checks)} promises broken ({scope})", "bad")
    else:
        yield style.paint(f"all {len(inspection.checks)} promises kept ({scope})", "good")


def _cells(check: Check) -> tuple[str, str]:
    return check.split, check.name
