"""`inspect`: show a data folder in the terminal and as a page, and check it against its configuration.

Examples are read from their shards; statistics are counted again from all shards.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from bert_pretrain import rng
from bert_pretrain.errors import ConfigError
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.inspect import terminal
from bert_pretrain.inspect.checks import CHECKS, ShardReport, check_shard
from bert_pretrain.inspect.rendering import RenderedExample, locate_rows, render_rows
from bert_pretrain.io.cores import available_cores
from bert_pretrain.io.manifest import read_manifest
from bert_pretrain.io.pool import run_each
from bert_pretrain.make_data import summary
from bert_pretrain.report.curves import write_file
from bert_pretrain.text.tokenizer import Tokenizer

ROWS_IN_TERMINAL, ROWS_ON_PAGE = 3, 24
_SHARDS_PER_PROCESS = 16  # fewer are read before a second process has started
_STATISTICS = (
    ("examples", "rows", ","),
    ("tokens", "tokens", ","),
    ("mean length in tokens", "mean_length_tokens", ".1f"),
    ("longest example", "longest", ","),
    ("is-next", "is_next_share", ".2%"),
    ("in order", "in_order_share", ".2%"),
    ("masked, of the text", "masked_share", ".2%"),
    ("  shown as [MASK]", "masked_shown_as_mask_share", ".2%"),
    ("  shown as a random token", "masked_shown_as_random_share", ".2%"),
    ("  shown unchanged", "masked_shown_as_original_share", ".2%"),
    ("[UNK]", "unk_share", ".3%"),
)


@dataclass(frozen=True)
class Inspection:
    """The content of a page about a data folder."""

    folder: DataFolder
    tokenizer: Tokenizer
    reports: dict[str, list[ShardReport]]  # of each split; of all its shards, or of those that hold the examples shown
    examples: list[RenderedExample]

    @property
    def failures(self) -> dict[str, list[str]]:
        """The lines, one for each shard, of what breaks each check that applies."""
        found = [report.failures for reports in self.reports.values() for report in reports]
        applied = [name for name in CHECKS if any(name in failures for failures in found)]
        return {name: [line for failures in found if (line := failures.get(name))] for name in applied}

    @property
    def failed(self) -> list[str]:
        return [name for name, lines in self.failures.items() if lines]

    @property
    def scope(self) -> str:
        """How much of the folder was read, in words."""
        total = sum(len(self.folder.shards(split)) for split in self.folder.manifest["splits"])
        read = sum(map(len, self.reports.values()))
        return f"all {total} shards read" if read == total else f"{read} of {total} shards read; --stats reads all"

    @property
    def corpus(self) -> str:
        """The text that the examples were made from, in words."""
        counts = self.folder.manifest["corpus"]
        return ", ".join(f"{counts[name]:,} {name}" for name in ("documents", "sentences", "tokens"))

    @property
    def statistics(self) -> list[list[str]]:
        """A header, and of each statistic its name, its value in each split, and what is configured."""
        config = self.folder.config
        columns = {split: self._count(reports) for split, reports in self.reports.items()}
        columns["configuration"] = {
            "longest": config.max_seq_length,
            "masked_share": config.masked_lm_prob,
            # BERT's recipe (Devlin et al., 2018, section 3.1).
            summary.LABEL_SHARES.get(config.next_sentence, ""): 0.5,
            "masked_shown_as_mask_share": 0.8,
            "masked_shown_as_random_share": 0.1,
            "masked_shown_as_original_share": 0.1,
        }
        rows = [["", *columns]]
        for title, name, form in _STATISTICS:
            values = [format(column[name], form) if name in column else "" for column in columns.values()]
            if any(values[:-1]):
                rows.append([title, *values])
        return rows

    def _count(self, reports: Sequence[ShardReport]) -> dict[str, float]:
        """Join the statistics of the shards of a split."""
        counted = [{"record": {}, "statistics": report.statistics} for report in reports if report.statistics]
        entry = summary.join_split(counted, self.folder.config)
        longest = max((report.longest for report in reports), default=0)
        return {**entry["statistics"], "rows": entry["rows"], "tokens": entry["tokens"], "longest": longest}


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
    """Print examples or statistics of a data folder, and write the page if asked; returns whether all checks pass.

    Of `split`, the rows `chosen` are shown, or `rows` of them drawn by `seed`: a few when None, none with `stats`.
    """
    if html is not None and html.suffix.lower() not in (".html", ".htm"):  # nothing else may be overwritten
        raise ConfigError(f"'{html.name}' does not end in .html", where="--html", remedy="name it .html")
    folder = DataFolder(data, read_manifest(data, "data", "DATA_DIR"))
    in_terminal = 0 if stats else ROWS_IN_TERMINAL
    count = rows if rows is not None else ROWS_ON_PAGE if html else in_terminal
    numbers = _choose_rows(folder, split, count, chosen, seed)
    inspection = inspect_rows(folder, split, numbers, everything=stats or html is not None, workers=workers)
    if html is not None:
        from bert_pretrain.report.render import render  # Jinja2 only where a page is asked for

        name = folder.path.resolve().name
        write_file(html, render("inspect.html", name=name, inspection=inspection, demands=CHECKS).encode())
    limit = in_terminal if rows is None and not chosen else None
    terminal.show(inspection, examples=inspection.examples[:limit], with_statistics=stats)
    if html is not None:
        print(f"page: {html}")
    return not inspection.failed


def inspect_rows(
    folder: DataFolder, split: str, rows: Sequence[int], *, everything: bool, workers: int | None
) -> Inspection:
    """Check all shards, or those that hold the rows, and render the rows of shards that can be used."""
    tokenizer = folder.tokenizer()
    shards, _ = locate_rows(folder, split, rows)
    reports: dict[str, dict[int, ShardReport]] = {}
    for name in folder.manifest["splits"] if everything else [split]:
        records = folder.shards(name)
        first_rows = np.cumsum([0, *(record.rows for record in records)]).tolist()
        numbers = range(len(records)) if everything else np.unique(shards).tolist()
        tasks = [(records[number], first_rows[number]) for number in numbers]
        check = partial(check_shard, folder.path, name, tokenizer, folder.config)
        processes = workers or min(available_cores(), 1 + len(tasks) // _SHARDS_PER_PROCESS)
        done = run_each(check, tasks, workers=processes, description=f"read {name}", unit="shard")
        reports[name] = dict(zip(numbers, done, strict=True))
    usable = [number for number, report in reports[split].items() if report.statistics]
    readable = [row for row, shard in zip(rows, shards, strict=True) if shard in usable]
    found = {name: list(by_number.values()) for name, by_number in reports.items()}
    return Inspection(folder, tokenizer, found, render_rows(folder, split, readable, tokenizer))


def _choose_rows(folder: DataFolder, split: str, count: int, chosen: Sequence[int], seed: int) -> list[int]:
    """Return the rows to show: those chosen, or `count` different ones drawn by the seed, ascending."""
    if split not in folder.manifest["splits"]:
        names = ", ".join(folder.manifest["splits"])
        raise ConfigError(f"there is no split '{split}'", where="--split", remedy=f"name one of {names}")
    total = folder.rows(split)
    for row in chosen:
        if not 0 <= row < total:
            remedy = f"rows go from 0 to {total - 1}"
            raise ConfigError(f"there is no row {row} in {split}", where="--row", remedy=remedy)
    if chosen:
        return list(dict.fromkeys(chosen))
    draw = rng.stream(seed, "inspect", split=split).choice(total, min(count, total), replace=False, shuffle=False)
    return sorted(draw.tolist())
