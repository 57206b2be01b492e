"""Render the templates in `templates/`: HTML pages, Markdown cards and the plan of `run auto`.

Every value in `{{ }}` is escaped: by Jinja2 for `.html` and by `escaped` for `.md`. Templates have three more filters:
`number` is the built-in `format`, `table` turns rows into a Markdown table, and `yaml` writes a value as YAML.
"""

import functools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from bert_pretrain.config_keys import inline_yaml
from bert_pretrain.io.files import write_file


def render(template: str, /, **values: object) -> str:
    """Fill a template with values and return its text. Raise an error if the template needs another value."""
    return _environment(Path(template).suffix).get_template(template).render(values)


def write_page(path: Path, template: str, /, **values: object) -> None:
    """Fill a template and write it to a file."""
    write_file(path, render(template, **values).encode())


@functools.cache
def _environment(suffix: str) -> Environment:
    def for_markdown(value: object) -> object:
        return value if isinstance(value, Markup) else escaped(value)

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=suffix == ".html",
        finalize=for_markdown if suffix == ".md" else None,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        auto_reload=False,  # an upgrade of the package during a run must not mix old code with new templates
    )
    environment.filters["number"] = lambda value, form=",": format(value, form)
    environment.filters["table"] = lambda rows, *header: Markup(table(header, rows))
    environment.filters["yaml"] = inline_yaml
    return environment


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table with every cell escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell if cell == '---' else escaped(cell) for cell in line)} |" for line in lines)


def escaped(value: object) -> str:
    """Return a value as one line of text that Markdown shows unchanged, even in a table."""
    return re.sub(r"([\\`*_\[\]<>|#~$&])", r"\\\1", " ".join(str(value).split()))
