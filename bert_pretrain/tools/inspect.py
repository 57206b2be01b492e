"""`inspect`: a data folder to look at, in the terminal and as a page, and whether it keeps what it promises.

Examples are shown from the shards they lie in; figures are counted again from all shards.
"""

from collections.abc import Sequence
from pathlib import Path

from bert_pretrain.errors import ConfigError, OutputError
from bert_pretrain.files import write_text
from bert_pretrain.manifest import read_manifest
from bert_pretrain.shards import DataFolder
from bert_pretrain.tools import page, terminal
from bert_pretrain.tools.inspection import choose_rows, look_into

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
    """Print examples or figures of a data folder, write the page if asked; returns whether every promise is kept.

    Args:
        data: a finished data folder.
        split: where the examples come from.
        rows: how many to show, drawn by `seed`; a few when None, none beside `stats`.
        chosen: rows to show instead.
        seed: draws the rows.
        stats: print the figures.
        html: the page to write.
        workers: processes that read the shards; all cores, where there are many shards, when None.

    Raises:
        UserError: when there is no such folder, split or row, or the page cannot be written.
    """
    check_page_name(html)
    folder = DataFolder(data, read_manifest(data, "data", "DATA_DIR"))
    count = rows if rows is not None else ROWS_ON_PAGE if html else 0 if stats and not chosen else ROWS_IN_TERMINAL
    numbers = choose_rows(folder, split, count, chosen, seed)
    seen = look_into(folder, split, numbers, everything=stats or html is not None, workers=workers)
    if html is not None:
        try:
            write_text(html, page.draw(seen))
        except OSError as error:
            raise OutputError(
                f"cannot write the page: {error.strerror}", where=str(html), remedy="name a file that you may write"
            ) from error
    shown = seen.examples[:ROWS_IN_TERMINAL] if html and rows is None and not chosen else seen.examples
    terminal.show(seen, examples=[] if stats and rows is None and not chosen else shown, figures=stats)
    if html is not None:
        print(f"page: {html}")
    return not seen.violations


def check_page_name(html: Path | None) -> None:
    """Refuse a name that is no page's, before anything is read, so that nothing else is written over.

    Raises:
        ConfigError: when the ending is not .html or .htm.
    """
    if html is not None and html.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"'{html.name}' has no ending of a page", where="--html", remedy="name it .html")
