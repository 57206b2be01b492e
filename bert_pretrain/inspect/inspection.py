"""The inspection of a data folder: its shards are checked and counted, and some of its examples rendered.

Statistics are counted from the shards, not read from the manifest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.inspect.checks import CHECKS, ShardReport, check_shard
from bert_pretrain.inspect.rendering import RenderedExample, locate_rows, render_rows
from bert_pretrain.io.cores import available_cores
from bert_pretrain.io.pool import run_each
from bert_pretrain.make_data import summary

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
_RECIPE = {  # Devlin et al., 2018, section 3.1
    "masked_shown_as_mask_share": 0.8,
    "masked_shown_as_random_share": 0.1,
    "masked_shown_as_original_share": 0.1,
}


@dataclass(frozen=True)
class Inspection:
    """Results of the inspection of a data folder."""

    folder: DataFolder
    reports: dict[str, list[ShardReport]]  # by split, of the checked shards
    examples: list[RenderedExample]

    @property
    def failures(self) -> dict[str, list[str]]:
        """For each check that was applied, the messages of the shards that failed it."""
        failures: dict[str, list[str]] = {}
        for name in CHECKS:
            for reports in self.reports.values():
                messages = [report.failures[name] for report in reports if name in report.failures]
                if messages:
                    failures.setdefault(name, []).extend(filter(None, messages))
        return failures

    @property
    def failed(self) -> list[str]:
        return [name for name, messages in self.failures.items() if messages]

    @property
    def statistics(self) -> list[list[str]]:
        """Table rows: a header, then the title, the value in each split and the configured value of each statistic."""
        config = self.folder.config
        columns = {split: self._count(reports) for split, reports in self.reports.items()}
        columns["configuration"] = {
            "longest": config.max_seq_length,
            "masked_share": config.masked_lm_prob,
            summary.LABEL_SHARES.get(config.next_sentence, ""): 0.5,
            **_RECIPE,
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
        split = summary.join_split(usable, self.folder.config)
        return {
            **split["statistics"],
            "rows": split["rows"],
            "tokens": split["tokens"],
            "longest": max((report.longest for report in reports), default=0),
        }


def inspect_rows(
    folder: DataFolder,
    split: str,
    rows: Sequence[int],
    *,
    all_shards: bool,
    workers: int | None,
) -> Inspection:
    """Check all shards or only those that contain `rows`, and render the rows."""
    tokenizer = folder.tokenizer()
    reports: dict[str, list[ShardReport]] = {}
    for name in folder.manifest["splits"] if all_shards else [split]:
        records = folder.shards(name)
        first_rows = np.cumsum([0, *(record.rows for record in records)]).tolist()
        shards = list(zip(records, first_rows, strict=False))
        if not all_shards:
            shards = [shards[number] for number in np.unique(locate_rows(folder, split, rows)[0])]
        reports[name] = list(
            run_each(
                partial(
                    check_shard,
                    folder.path,
                    name,
                    tokenizer,
                    folder.config,
                ),
                shards,
                workers=workers or min(available_cores(), 1 + len(shards) // 16),  # a start takes as long as 16 shards
                description=f"read {name}",
                unit="shard",
            )
        )
    return Inspection(folder, reports, render_rows(folder, split, rows, tokenizer))
