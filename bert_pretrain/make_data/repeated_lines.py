"""Lines that recur, such as navigation and licences, left out but for the first.

They are counted in a pass over the text of its own, exactly and in bounded memory: each group of byte ranges writes the
hashes of its lines, sorted, and how often each occurs; these are merged range by range of hashes. The first occurrence
is known by its group, so that groups are filtered independently of one another.
"""

import hashlib
import itertools
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bert_pretrain.config import DataConfig
from bert_pretrain.make_data.parts import ensure_unpacked
from bert_pretrain.parallel.executor import Pool, run_all
from bert_pretrain.storage.checksums import damage_of_folder, seal_folder
from bert_pretrain.storage.files import atomic_folder
from bert_pretrain.text import documents
from bert_pretrain.text.text_files import ByteRange

MIN_BYTES = 20
"""Of a line without the blanks around it; shorter ones, such as "Yes, sir.", recur in any text."""
LINES_AT_ONCE = 1 << 22
_FOLDER = "repeated-lines"


@dataclass(frozen=True)
class _Task:
    """A group of byte ranges whose lines are counted."""

    parts: tuple[ByteRange, ...]
    folder: Path
    config: DataConfig


class LineFilter:
    """Leaves out the repeated lines of a group of byte ranges; its documents come in order."""

    def __init__(self, folder: Path, group: int) -> None:
        """Open what `find_repeated_lines` has written, for the group of this number."""
        self._hashes = np.load(folder / "hashes.npy", mmap_mode="r")
        first_groups = np.load(folder / "first_groups.npy", mmap_mode="r")
        self._to_keep = set(np.flatnonzero(first_groups == group).tolist())

    def filter(self, text: str, counts: Counter[str]) -> str:
        """Return the text without lines that were seen before, which are counted."""
        lines = text.split("\n")
        places, hashes = _hash_lines(lines)
        rows = np.searchsorted(self._hashes, hashes)
        is_found = rows < len(self._hashes)
        is_found[is_found] = self._hashes[rows[is_found]] == hashes[is_found]
        left_out = set()
        for place, row in zip(places[is_found].tolist(), rows[is_found].tolist(), strict=True):
            if row in self._to_keep:
                self._to_keep.remove(row)
            else:
                left_out.add(place)
        counts["repeated_lines_left_out"] += len(left_out)
        return "\n".join(line for place, line in enumerate(lines) if place not in left_out) if left_out else text


def find_repeated_lines(
    groups: Sequence[tuple[ByteRange, ...]], store: Path, config: DataConfig, pool: Pool
) -> Path | None:
    """Count all lines, unless that is done; returns a folder for `LineFilter`, None where no line is to be left out.

    Inputs that are held out for validation are neither counted nor changed.
    """
    if config.drop_repeated_lines is None:
        return None
    folder = store / _FOLDER
    if damage_of_folder(folder) is None:
        return folder
    tasks = [_Task(parts, store / f"lines-{number:05d}", config) for number, parts in enumerate(groups)]
    run_all(_count, tasks, workers=pool, description="count lines", **documents.progress_of(groups))
    hashes, first_groups = _merge([task.folder for task in tasks], config.drop_repeated_lines)
    with atomic_folder(folder) as temporary:
        np.save(temporary / "hashes.npy", hashes)
        np.save(temporary / "first_groups.npy", first_groups)
        seal_folder(temporary)
    for task in tasks:
        shutil.rmtree(task.folder)
    return folder


def _count(task: _Task) -> None:
    """Write the lines of a group: files of sorted hashes and their counts, (2, lines) uint64."""
    if damage_of_folder(task.folder) is None:
        return
    parts = [part for part in task.parts if not part.source.is_validation]
    with atomic_folder(task.folder) as temporary:
        found: list[np.ndarray] = []
        num_lines = num_files = 0
        for part in parts:
            ensure_unpacked(part)
            for document in documents.read(part, task.config, Counter()):
                found.append(_hash_lines(document.text.split("\n"))[1])
                num_lines += len(found[-1])
                if num_lines >= LINES_AT_ONCE:
                    _write_lines(temporary / f"{num_files:05d}.npy", found)
                    found, num_lines, num_files = [], 0, num_files + 1
        _write_lines(temporary / f"{num_files:05d}.npy", found)
        documents.check_unchanged(parts)
        seal_folder(temporary)


def _write_lines(file: Path, found: list[np.ndarray]) -> None:
    hashes, counts = np.unique(np.concatenate([np.zeros(0, dtype=np.uint64), *found]), return_counts=True)
    np.save(file, np.stack([hashes, counts.astype(np.uint64)]))


def _merge(folders: Sequence[Path], least: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of lines that occur at least so often, ascending, and the group in which each occurs first."""
    files = [(group, file) for group, folder in enumerate(folders) for file in sorted(folder.glob("*.npy"))]
    num_lines = sum(np.load(file, mmap_mode="r").shape[1] for _, file in files)
    num_ranges = -(-num_lines // LINES_AT_ONCE) or 1
    bounds = [(number << 64) // num_ranges for number in range(num_ranges)]
    merged = []
    for first, last in itertools.zip_longest(bounds, bounds[1:]):
        columns = []
        for group, file in files:  # one after the other, as each takes a descriptor while it is mapped
            lines = np.load(file, mmap_mode="r")
            begin = np.searchsorted(lines[0], np.uint64(first))
            end = lines.shape[1] if last is None else np.searchsorted(lines[0], np.uint64(last))
            hashes, counts = np.array(lines[:, begin:end])
            columns.append((hashes, counts.astype(np.int64), np.full(len(hashes), group)))
        hashes, counts, of_groups = (np.concatenate(column) for column in zip(*columns, strict=True))
        hashes, firsts, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        is_repeated = np.bincount(inverse, weights=counts, minlength=len(hashes)) >= least
        merged.append((hashes[is_repeated], of_groups[firsts[is_repeated]]))
    return np.concatenate([each for each, _ in merged]), np.concatenate([each for _, each in merged])


def _hash_lines(lines: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return which lines are long enough, by number, and their hashes, (lines,) uint64."""
    stripped = [line.strip().encode() for line in lines]
    places = [place for place, line in enumerate(stripped) if len(line) >= MIN_BYTES]
    digests = b"".join(hashlib.blake2b(stripped[place], digest_size=8).digest() for place in places)
    return np.array(places, dtype=np.int64), np.frombuffer(digests, dtype="<u8")
