"""`inspect`: show a data folder in the terminal and as an HTML page, and check it against its configuration.

Statistics are counted from the shards, not read from the manifest.
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

_STATISTICS = (  # title, name, format
    ("examples", "rows", ","),
    ("tokens", "tokens", ","),
    ("mean length in tokens", "mean_length_tokens", ".1f"),
    ("longest example", "longest", ","),
    ("is-next", "is_next_share", ".2%"),
    ("in order", "in_order_share", ".2%"),
    ("share of masked tokens", "masked_share", ".2%"),
    ("  shown as [MASK]", "masked_shown_as_mask_share", ".2%"),
    ("  shown as a random token", "masked_shown_as_random_share", ".2%"),
    ("  shown unchanged", "masked_shown_as_original_share", ".2%"),
    ("[UNK]", "unk_share", ".3%"),
)


@dataclass(frozen=True)
class Inspection:
    """Results of the inspection of a data folder."""

    folder: DataFolder
    reports: dict[str, list[ShardReport]]  # by split, of the checked shards
    examples: list[RenderedExample]

    @property
    def failures(self) -> dict[str, list[str]]:
        """For each check that was applied, the messages of the shards that failed it."""
        by_shard = [report.failures for reports in self.reports.values() for report in reports]
        applied = [name for name in CHECKS if any(name in failures for failures in by_shard)]
        return {name: [line for failures in by_shard if (line := failures.get(name))] for name in applied}

    @property
    def failed(self) -> list[str]:
        return [name for name, lines in self.failures.items() if lines]

    @property
    def scope(self) -> str:
        """Text such as 'all 8 shards read'."""
        total = sum(len(self.folder.shards(split)) for split in self.folder.manifest["splits"])
        read = sum(map(len, self.reports.values()))
        return f"all {total} shards read" if read == total else f"{read} of {total} shards read; --stats reads all"

    @property
    def corpus(self) -> str:
        """Text such as '10 documents, 200 sentences, 5,000 tokens'."""
        counts = self.folder.manifest["corpus"]
        return ", ".join(f"{counts[name]:,} {name}" for name in ("documents", "sentences", "tokens"))

    @property
    def statistics(self) -> list[list[str]]:
        """Table rows: a header, then the title, the value in each split and the configured value of each statistic."""
        config = self.folder.config
        columns = {split: self._count(reports) for split, reports in self.reports.items()}
        columns["configuration"] = {
            "longest": config.max_seq_length,
            "masked_share": config.masked_lm_prob,
            # The following are BERT's recipe (Devlin et al., 2018, section 3.1).
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
        """Combine the statistics of the shards of a split."""
        usable = [{"record": {}, "statistics": report.statistics} for report in reports if report.statistics]
        entry = summary.join_split(usable, self.folder.config)
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
    """Print examples or statistics of a data folder, write an optional page, and return whether all checks pass.

    Show the rows `chosen`, or `rows` random ones. By default, the page shows 24 rows, and the terminal 3 or, with
    `stats`, none. Raises ConfigError for a split or row that does not exist.
    """
    if html is not None and html.suffix.lower() not in (".html", ".htm"):  # protect other files from being overwritten
        raise ConfigError(f"'{html.name}' does not end in .html", where="--html", remedy="name it .html")
    folder = DataFolder(data, read_manifest(data, "data", "DATA_DIR"))
    if chosen and rows is not None:
        raise ConfigError("--rows has no effect with --row", where="--rows", remedy="leave out one of them")
    num_in_terminal = 0 if stats else 3  # unless `rows` or `chosen` are given
    num_rows = rows if rows is not None else 24 if html else num_in_terminal
    row_numbers = _choose_rows(folder, split, num_rows, chosen, seed)
    inspection = inspect_rows(folder, split, row_numbers, all_shards=stats or html is not None, workers=workers)
    if html is not None:
        from bert_pretrain.report.render import render  # imports Jinja2, which only the page needs

        name = folder.path.resolve().name
        write_file(html, render("inspect.html", name=name, inspection=inspection, checks=CHECKS).encode())
    limit = num_in_terminal if rows is None and not chosen else None
    terminal.show(inspection, examples=inspection.examples[:limit], with_statistics=stats)
    if html is not None:
        print(f"page: {html}")
    return not inspection.failed


def inspect_rows(
    folder: DataFolder, split: str, rows: Sequence[int], *, all_shards: bool, workers: int | None
) -> Inspection:
    """Check all shards or only those that contain `rows`, and render the rows of readable shards."""
    tokenizer = folder.tokenizer()
    shards, _ = locate_rows(folder, split, rows)
    reports: dict[str, list[ShardReport]] = {}
    for name in folder.manifest["splits"] if all_shards else [split]:
        records = folder.shards(name)
        first_rows = np.cumsum([0, *(record.rows for record in records)]).tolist()
        numbers = range(len(records)) if all_shards else np.unique(shards).tolist()
        tasks = [(records[number], first_rows[number]) for number in numbers]
        check = partial(check_shard, folder.path, name, tokenizer, folder.config)
        processes = workers or min(available_cores(), 1 + len(tasks) // 16)  # a start takes as long as 16 shards
        reports[name] = list(run_each(check, tasks, workers=processes, description=f"read {name}", unit="shard"))
        if name == split:
            usable = {number for number, report in zip(numbers, reports[name], strict=True) if report.statistics}
    readable = [row for row, shard in zip(rows, shards, strict=True) if shard in usable]
    return Inspection(folder, reports, render_rows(folder, split, readable, tokenizer))


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
