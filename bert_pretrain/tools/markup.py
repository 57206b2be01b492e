"""HTML and SVG built so that no text can become markup: whatever is not made by `tag` is escaped.

Bar charts are plain SVG in the colours of the page around them, with the figures as tooltips.
"""

import html
import math
from collections.abc import Iterable, Mapping, Sequence

_WIDTH, _HEIGHT = 460, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 8, 10, 26


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, *content: object, **attributes: object) -> Markup:
    """Return an element; content that is no `Markup` is escaped, `class_` and `stroke_width` become attributes."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"' for key, value in attributes.items()
    )
    return Markup(f"<{name}{written}>{joined(content)}</{name}>")


def joined(content: Iterable[object]) -> Markup:
    """Return several pieces of content as one."""
    return Markup("".join(part if isinstance(part, Markup) else html.escape(str(part)) for part in content))


def table(header: Sequence[object], rows: Iterable[Sequence[object]], **attributes: object) -> Markup:
    """Return a table with a header row."""
    head = tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in header)))
    body = tag("tbody", *(tag("tr", *(tag("td", cell) for cell in row)) for row in rows))
    return tag("div", tag("table", head, body, **attributes), class_="scroll")


def bar_chart(
    title: str, labels: Sequence[str], shares: Mapping[str, Sequence[float]], expected: Mapping[str, Sequence[float]]
) -> Markup:
    """Draw shares by bin as bars, one colour a series, with what was expected as a line across each bar.

    Args:
        title: what a screen reader says of it.
        labels: of the bins.
        shares: a series of bars each.
        expected: the same shape; empty where nothing was.
    """
    top = _ceiling(max(max(values) for values in [*shares.values(), *expected.values()]))
    inner_width, inner_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    slot = inner_width / len(labels)
    bar = slot * 0.8 / len(shares)
    parts: list[Markup] = []
    for step in range(5):
        y = _TOP + inner_height * (1 - step / 4)
        parts.append(tag("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid"))
        parts.append(tag("text", _percent(top * step / 4), x=_LEFT - 6, y=f"{y + 3.5:.1f}", class_="tick end"))
    for series, (name, values) in enumerate(shares.items()):
        for number, (label, value) in enumerate(zip(labels, values, strict=True)):
            x = _LEFT + slot * (number + 0.1) + bar * series
            height = value / top * inner_height
            mark = {"x": f"{x:.1f}", "width": f"{max(bar - 1, 1):.1f}"}
            y = _TOP + inner_height - height
            says = tag("title", f"{name}, {label}: {value:.3%}")
            parts.append(tag("rect", says, **mark, y=f"{y:.1f}", height=f"{height:.1f}", rx=1.5, class_=f"bar {name}"))
            if name in expected:
                level = f"{_TOP + inner_height * (1 - expected[name][number] / top):.1f}"
                parts.append(tag("line", x1=mark["x"], x2=f"{x + bar:.1f}", y1=level, y2=level, class_="expected"))
    every = math.ceil(len(labels) * max(map(len, labels)) * 6.5 / inner_width)
    for number in range((len(labels) - 1) % every, len(labels), every):  # the last one is named
        x = _LEFT + slot * (number + 0.5)
        parts.append(tag("text", labels[number], x=f"{x:.1f}", y=_HEIGHT - 8, class_="tick middle"))
    return tag("svg", *parts, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=title)


def stacked_bar(title: str, parts: Sequence[tuple[str, float]]) -> Markup:
    """Draw shares of a whole as one bar; each part is (class, share)."""
    drawn, begin = [], 0.0
    for name, share in parts:
        says = tag("title", f"{name}: {share:.2%}")
        drawn.append(
            tag("rect", says, x=f"{100 * begin:.3f}", y=0, width=f"{100 * share:.3f}", height=8, class_=f"bar {name}")
        )
        begin += share
    return tag(
        "svg", *drawn, viewBox="0 0 100 8", preserveAspectRatio="none", class_="stack", role="img", aria_label=title
    )


def _ceiling(value: float) -> float:
    """Return the next round number, of 1, 2, 4, 6, 8 or 10 times a power of ten, not below a value."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * step for step in (1, 2, 4, 6, 8, 10) if power * step >= value * (1 - 1e-9))


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
