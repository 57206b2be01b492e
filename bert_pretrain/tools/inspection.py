"""What a look into a data folder finds: some examples, figures counted again, promises kept or broken."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import ValidationError

from bert_pretrain import rng
from bert_pretrain.config import DataConfig
from bert_pretrain.errors import ConfigError, DataError
from bert_pretrain.manifest import MANIFEST
from bert_pretrain.shards import DataFolder
from bert_pretrain.tools.checks import Check, check_manifest, check_split
from bert_pretrain.tools.survey import Survey, promise, survey_split
from bert_pretrain.tools.view import ExampleView, read_views

_SHARDS_A_PROCESS = 16  # fewer are read before a second process has started


@dataclass(frozen=True)
class Inspection:
    """All that is shown of a data folder."""

    folder: DataFolder
    config: DataConfig
    surveys: dict[str, Survey]
    """Of each split; of all its shards, or of those in which the examples shown lie."""
    is_complete: bool
    """All shards of all splits were read."""
    checks: list[Check]
    examples: list[ExampleView]

    @property
    def violations(self) -> list[Check]:
        """The checks that the data fails."""
        return [check for check in self.checks if not check.is_kept]


def look_into(
    folder: DataFolder, split: str, rows: Sequence[int], *, everything: bool, workers: int | None = None
) -> Inspection:
    """Read the rows and the figures; of all shards, or of those in which the rows lie.

    Raises:
        DataError: when the tokenizer or the manifest cannot be used.
    """
    config = read_config(folder)
    tokenizer = folder.tokenizer()
    expected = promise(tokenizer, config)
    surveys, checks = {}, []
    for name in folder.manifest["splits"]:
        if not everything and name != split:
            continue
        records = folder.shards(name)
        first_rows = np.cumsum([0, *(record.rows for record in records)])
        holding = np.unique(np.searchsorted(first_rows, np.array(rows), side="right") - 1).tolist()
        chosen = range(len(records)) if everything else holding
        processes = workers or min(os.cpu_count() or 1, 1 + len(chosen) // _SHARDS_A_PROCESS)
        surveys[name] = survey_split(folder, name, config, shards=chosen, workers=processes)
        rule = expected.rule
        checks += check_split(name, surveys[name], config, rule.max_predictions, len(rule.replacement_ids))
        if everything and not surveys[name].damaged:
            checks.append(check_manifest(name, surveys[name], folder.manifest["splits"][name], config))
    damaged = {number for number, record in enumerate(folder.shards(split)) if record.path in surveys[split].damaged}
    first_rows = np.cumsum([0, *(record.rows for record in folder.shards(split))])
    readable = [row for row in rows if int(np.searchsorted(first_rows, row, side="right")) - 1 not in damaged]
    examples = read_views(folder, split, readable, tokenizer)
    return Inspection(folder, config, surveys, everything, checks, examples)


def choose_rows(folder: DataFolder, split: str, count: int, chosen: Sequence[int], seed: int) -> list[int]:
    """Return the rows to show: those chosen, or `count` different ones drawn by the seed, ascending.

    Raises:
        ConfigError: when the folder has no such split or row.
    """
    if split not in folder.manifest["splits"]:
        raise ConfigError(
            f"there is no split '{split}'",
            where="--split",
            remedy="name one of " + ", ".join(folder.manifest["splits"]),
        )
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


def read_config(folder: DataFolder) -> DataConfig:
    """Return the configuration that made the folder.

    Raises:
        DataError: when this version does not know it.
    """
    try:
        return DataConfig.model_validate(folder.manifest["config"]["data"])
    except (ValidationError, KeyError, TypeError) as error:
        raise DataError(
            f"the configuration in the manifest is not one that this version knows: {error}",
            where=str(folder.path / MANIFEST),
            remedy="inspect the folder with the version that made it, or make it again",
        ) from error
