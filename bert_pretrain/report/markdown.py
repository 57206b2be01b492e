"""Cards (`README.md` files) in Markdown: metadata in YAML, tables, and text that cannot become markup."""

import re
from collections.abc import Iterable, Mapping, Sequence

import yaml


def card(metadata: Mapping[str, object], body: str) -> str:
    """Return a card: the metadata that the Hugging Face Hub and `datasets` read, then the body."""
    return f"---\n{yaml.safe_dump(dict(metadata), sort_keys=False, allow_unicode=True)}---\n\n{body}"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table with every cell escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell if cell == '---' else escaped(cell) for cell in line)} |" for line in lines)


def escaped(value: object) -> str:
    """Return a value as one line of text that Markdown shows unchanged, in a table too."""
    return re.sub(r"([\\`*_\[\]<>|#~$&])", r"\\\1", " ".join(str(value).split()))
