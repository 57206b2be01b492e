"""Render the templates in `templates/`: HTML pages and Markdown cards.

Every value in `{{ }}` is escaped: by Jinja2 for `.html` and by `escaped` for `.md`. Templates have two more filters:
`number` is the built-in `format`, and `table` turns rows into a Markdown table.
"""

import functools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup


def render(template: str, /, **values: object) -> str:
    """Fill a template with values and return its text. Raise an error if the template needs another value."""
    return _environment(template.endswith(".html")).get_template(template).render(values)


@functools.cache
def _environment(is_html: bool) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=is_html,
        finalize=None if is_html else lambda value: value if isinstance(value, Markup) else escaped(value),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,  # an upgrade of the package during a run must not mix old code with new templates
    )
    environment.filters["number"] = lambda value, form=",": format(value, form)
    environment.filters["table"] = lambda rows, *header: Markup(table(header, rows))
    return environment


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table with every cell escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell if cell == '---' else escaped(cell) for cell in line)} |" for line in lines)


def escaped(value: object) -> str:
    """Return a value as one line of text that Markdown shows unchanged, even in a table."""
    return re.sub(r"([\\`*_\[\]<>|#~$&])", r"\\\1", " ".join(str(value).split()))
