"""What an inspection of a data folder finds: figures counted again, checks, and some examples."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bert_pretrain import rng
from bert_pretrain.config import DataConfig
from bert_pretrain.errors import ConfigError
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.inspect.checks import Check, check_manifest, check_split
from bert_pretrain.inspect.rendering import RenderedExample, locate_rows, render_rows
from bert_pretrain.inspect.rules import make_spec
from bert_pretrain.inspect.scan import Scan, scan_split
from bert_pretrain.parallel.cores import available_cores

_SHARDS_PER_PROCESS = 16  # fewer are read before a second process has started


@dataclass(frozen=True)
class Inspection:
    """Everything that is shown of a data folder."""

    folder: DataFolder
    config: DataConfig
    scans: dict[str, Scan]
    """Of each split; of all its shards, or of those that hold the examples shown."""
    is_complete: bool
    """Whether all shards of all splits were read."""
    checks: list[Check]
    examples: list[RenderedExample]

    @property
    def failed(self) -> list[Check]:
        """The checks that the data fails."""
        return [check for check in self.checks if not check.passed]

    @property
    def scope(self) -> str:
        """How much of the folder was read, in words."""
        total = sum(len(self.folder.shards(name)) for name in self.folder.manifest["splits"])
        if self.is_complete:
            return f"all {total} shards read"
        return f"{sum(scan.shards for scan in self.scans.values())} of {total} shards read; --stats reads all"


def inspect_rows(
    folder: DataFolder, split: str, rows: Sequence[int], *, everything: bool, workers: int | None
) -> Inspection:
    """Render rows, and scan and check all shards, or those that hold the rows.

    Raises:
        DataError: when the tokenizer or the manifest cannot be used.
    """
    config, tokenizer = folder.config, folder.tokenizer()
    spec = make_spec(tokenizer, config)
    shards, _ = locate_rows(folder, split, rows)
    scans, checks = {}, []
    for name in folder.manifest["splits"] if everything else [split]:
        chosen = range(len(folder.shards(name))) if everything else np.unique(shards).tolist()
        processes = workers or min(available_cores(), 1 + len(chosen) // _SHARDS_PER_PROCESS)
        scans[name] = scan_split(folder, name, spec, shards=chosen, workers=processes)
        checks += check_split(name, scans[name], spec)
        if everything and not scans[name].damaged:
            checks.append(check_manifest(name, scans[name], folder.manifest["splits"][name]))
    records, damaged = folder.shards(split), scans[split].damaged
    readable = [row for row, shard in zip(rows, shards, strict=True) if records[shard].path not in damaged]
    return Inspection(folder, config, scans, everything, checks, render_rows(folder, split, readable, tokenizer))


def choose_rows(folder: DataFolder, split: str, count: int, chosen: Sequence[int], seed: int) -> list[int]:
    """Return the rows to show: those chosen, or `count` different ones drawn by the seed, ascending.

    Raises:
        ConfigError: when the folder has no such split or row.
    """
    if split not in folder.manifest["splits"]:
        names = ", ".join(folder.manifest["splits"])
        raise ConfigError(f"there is no split '{split}'", where="--split", remedy=f"name one of {names}")
    total = folder.rows(split)
    for row in chosen:
        if not 0 <= row < total:
            raise ConfigError(
                f"there is no row {row} in {split}", where="--row", remedy=f"rows go from 0 to {total - 1}"
            )
    if chosen:
        return list(dict.fromkeys(chosen))
    draw = rng.stream(seed, "inspect", split=split).choice(total, min(count, total), replace=False, shuffle=False)
    return sorted(draw.tolist())
