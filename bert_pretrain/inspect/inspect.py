"""`inspect`: show a data folder in the terminal and as an HTML page, and check it against its configuration.

Both are templates (`report/templates`), filled from one `Inspection`.
"""

import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from bert_pretrain import rng
from bert_pretrain.errors import ConfigError
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.inspect.checks import CHECKS
from bert_pretrain.inspect.inspection import Inspection, inspect_rows
from bert_pretrain.inspect.rendering import RenderedExample
from bert_pretrain.io.manifest import read_manifest
from bert_pretrain.report.render import render, write_page

MARK_COLORS = {"=": 33, "[MASK]→": 36, "": 31}  # yellow, cyan, red: by the start of a mark


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
    row_numbers = _choose_rows(
        folder,
        split,
        rows or 0,
        chosen,
        seed,
    )
    inspection = inspect_rows(
        folder,
        split,
        row_numbers,
        all_shards=stats or html is not None,
        workers=workers,
    )
    _show(inspection, inspection.examples[:num_in_terminal], with_statistics=stats)
    if html is not None:
        write_page(
            html,
            "inspect.html",
            name=folder.path.resolve().name,
            inspection=inspection,
            checks=CHECKS,
        )
        print(f"page: {html}")
    return not inspection.failed


def _choose_rows(
    folder: DataFolder,
    split: str,
    num_rows: int,
    chosen: Sequence[int],
    seed: int,
) -> list[int]:
    """Return the chosen rows, or `num_rows` random ones in ascending order."""
    if split not in folder.manifest["splits"]:
        names = ", ".join(folder.manifest["splits"])
        raise ConfigError(f"there is no split '{split}'", where="--split", remedy=f"use one of {names}")
    total = folder.rows(split)
    for row in chosen:
        if not 0 <= row < total:
            raise ConfigError(
                f"there is no row {row} in {split}",
                where="--row",
                remedy=f"rows go from 0 to {total - 1}",
            )
    if chosen:
        return list(dict.fromkeys(chosen))
    draw = rng.stream(seed, "inspect", split=split).choice(total, min(num_rows, total), replace=False, shuffle=False)
    return sorted(draw.tolist())


def _show(inspection: Inspection, examples: Sequence[RenderedExample], *, with_statistics: bool) -> None:
    """Print examples, optional statistics, and the result of the checks, in colors if the terminal has them."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    has_colors = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def painted(text: str, color: int) -> str:
        return f"\x1b[{color}m{text}\x1b[0m" if has_colors else text

    text = render(
        "inspect.txt",
        inspection=inspection,
        examples=examples,
        with_statistics=with_statistics,
        checks=CHECKS,
        width=shutil.get_terminal_size().columns,
        bold=lambda text: painted(text, 1),
        good=lambda text: painted(text, 32),
        bad=lambda text: painted(text, 31),
    )
    print(re.sub(r"⟨(=|\[MASK\]→|)\S+?⟩", lambda mark: painted(mark[0], MARK_COLORS[mark[1]]), text), end="")
