"""Render the templates in `templates/`: HTML pages and Markdown cards.

Every value in `{{ }}` is escaped, by Jinja2 for `.html` and by `escaped` for `.md`. Templates get two more filters:
`number` formats as `format` does, and `table` turns rows into a Markdown table.
"""

import functools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup


def render(template: str, /, **values: object) -> str:
    """Return a file of `templates/` filled with values; a value that it names must be given."""
    return _environment(template.endswith(".html")).get_template(template).render(values)


@functools.cache
def _environment(is_html: bool) -> Environment:
    """Return what reads templates, which keeps them compiled."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=is_html,
        finalize=None if is_html else lambda value: value if isinstance(value, Markup) else escaped(value),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,  # a package that is upgraded while a run works is not mixed with what is in memory
    )
    environment.filters["number"] = lambda value, form=",": format(value, form)
    environment.filters["table"] = lambda rows, *header: Markup(table(header, rows))
    return environment


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table with every cell escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell if cell == '---' else escaped(cell) for cell in line)} |" for line in lines)


def escaped(value: object) -> str:
    """Return a value as one line of text that Markdown shows unchanged, in a table too."""
    return re.sub(r"([\\`*_\[\]<>|#~$&])", r"\\\1", " ".join(str(value).split()))
