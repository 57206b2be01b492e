"""`inspect`: show a data folder in the terminal and as an HTML page, and check it against its configuration."""

from collections.abc import Sequence
from pathlib import Path

from bert_pretrain import rng
from bert_pretrain.errors import ConfigError
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.inspect import terminal
from bert_pretrain.inspect.checks import CHECKS
from bert_pretrain.inspect.inspection import inspect_rows
from bert_pretrain.io.manifest import read_manifest


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
    """Print examples or statistics of a data folder, write an optional page, and return whether all checks pass.

    Show the rows `chosen`, or `rows` random ones. By default, the page shows 24 rows, and the terminal 3 or, with
    `stats`, none. Raises ConfigError for a split or row that does not exist.
    """
    if html is not None and html.suffix.lower() not in (".html", ".htm"):  # protect other files from being overwritten
        raise ConfigError(f"'{html.name}' does not end in .html", where="--html", remedy="name it .html")
    if chosen and rows is not None:
        raise ConfigError("--rows has no effect with --row", where="--rows", remedy="leave out one of them")
    folder = DataFolder(data, read_manifest(data, "data", "DATA_DIR"))
    num_in_terminal = len(chosen) or rows
    if num_in_terminal is None:
        num_in_terminal = 0 if stats else 3
        rows = 24 if html else num_in_terminal
    row_numbers = _choose_rows(folder, split, rows or 0, chosen, seed)
    inspection = inspect_rows(folder, split, row_numbers, all_shards=stats or html is not None, workers=workers)
    terminal.show(inspection, examples=inspection.examples[:num_in_terminal], with_statistics=stats)
    if html is not None:
        from bert_pretrain.report.render import write_page  # imports Jinja2, which only the page needs

        write_page(html, "inspect.html", name=folder.path.resolve().name, inspection=inspection, checks=CHECKS)
        print(f"page: {html}")
    return not inspection.failed


def _choose_rows(folder: DataFolder, split: str, num_rows: int, chosen: Sequence[int], seed: int) -> list[int]:
    """Return the chosen rows, or `num_rows` random ones in ascending order."""
    if split not in folder.manifest["splits"]:
        names = ", ".join(folder.manifest["splits"])
        raise ConfigError(f"there is no split '{split}'", where="--split", remedy=f"use one of {names}")
    total = folder.rows(split)
    for row in chosen:
        if not 0 <= row < total:
            remedy = f"rows go from 0 to {total - 1}"
            raise ConfigError(f"there is no row {row} in {split}", where="--row", remedy=remedy)
    if chosen:
        return list(dict.fromkeys(chosen))
    draw = rng.stream(seed, "inspect", split=split).choice(total, min(num_rows, total), replace=False, shuffle=False)
    return sorted(draw.tolist())
