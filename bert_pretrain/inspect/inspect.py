"""`inspect`: show a data folder in the terminal and as a page, and check it against its configuration.

Examples are read from their shards; figures are counted again from all shards.
"""

from collections.abc import Sequence
from pathlib import Path

from bert_pretrain.errors import ConfigError
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.inspect import terminal
from bert_pretrain.inspect.inspection import choose_rows, inspect_rows
from bert_pretrain.report.curves import write_file
from bert_pretrain.storage.manifest import read_manifest

ROWS_IN_TERMINAL, ROWS_ON_PAGE = 3, 24


def inspect(
    data: Path,
    *,
    split: str = "train",
    rows: int | None = None,
    chosen: Sequence[int] = (),
    seed: int = 0,
    stats: bool = False,
    html: Path | None = None,
    workers: int | None = None,
) -> bool:
    """Print examples or figures of a data folder, and write the page if asked; returns whether all checks pass.

    Of `split`, the rows `chosen` are shown, or `rows` of them drawn by `seed`: a few when None, none with `stats`.

    Raises:
        UserError: when there is no such folder, split or row, or the page cannot be written.
    """
    if html is not None and html.suffix.lower() not in (".html", ".htm"):  # nothing else may be overwritten
        raise ConfigError(f"'{html.name}' does not end in .html", where="--html", remedy="name it .html")
    folder = DataFolder(data, read_manifest(data, "data", "DATA_DIR"))
    is_default = rows is None and not chosen
    count = rows if rows is not None else ROWS_ON_PAGE if html else 0 if stats else ROWS_IN_TERMINAL
    numbers = choose_rows(folder, split, count, chosen, seed)
    inspection = inspect_rows(folder, split, numbers, everything=stats or html is not None, workers=workers)
    if html is not None:
        from bert_pretrain.inspect.page import render_page  # Jinja2 only where a page is asked for

        write_file(html, render_page(inspection).encode())
    limit = (0 if stats else ROWS_IN_TERMINAL) if is_default else None
    terminal.show(inspection, examples=inspection.examples[:limit], with_figures=stats)
    if html is not None:
        print(f"page: {html}")
    return not inspection.failed
