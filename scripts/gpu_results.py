"""Results of `gpu_check.py`: rows as lines of JSON, and the Markdown of RESULTS.md made from them.

A row says its `part` and its `kind`: `machine` (first, once), `part` (how a part ended) or `result`.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]


class Results:
    """`results.jsonl` and `results.md` of a folder, both as complete as the rows so far."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.rows: list[Row] = []
        self.folder, self.work = folder, work
        (folder / "results.jsonl").write_text("", encoding="utf-8")

    def add(self, part: str, kind: str, row: Row) -> None:
        """Note a row, on disk at once."""
        row = _plain({"part": part, "kind": kind, **row})
        self.rows.append(row)
        with (self.folder / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n")
        (self.folder / "results.md").write_text(markdown(self.rows), encoding="utf-8")


def _plain(value: Any) -> Any:
    """Return a JSON value without numbers that JSON lacks: they become null."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_rows(path: Path) -> list[Row]:
    """Return the whole lines of a file of JSON lines; one that a kill has torn is left out, as is a missing file."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """Return all tables for which there are rows."""
    machine = next((row for row in rows if row["kind"] == "machine"), None)
    blocks = [] if machine is None else [_machine_line(machine)]
    endings = [row for row in rows if row["kind"] == "part"]
    if endings:
        blocks.append(_table(PARTS, endings))
    for title, parts, columns in SECTIONS:
        chosen = [row for row in rows if row["kind"] == "result" and row["part"] in parts and _fits(row, columns)]
        if chosen:
            blocks.append(f"**{title}**\n\n{_table(columns, chosen)}")
    return "\n\n".join(blocks) + "\n"


def _machine_line(row: Row) -> str:
    known = {
        "device": row.get("device"),
        "driver": row.get("driver") and f"driver {row['driver']}",
        "torch": row.get("torch") and f"torch {row['torch']}",
        "transformers": f"transformers {row['transformers']}" if row.get("transformers") else "no transformers",
        "python": row.get("python") and f"Python {row['python']}",
        "cores": row.get("cores") and f"{row['cores']} cores",
        "commit": row.get("commit") and f"commit {row['commit']}",
    }
    return ", ".join(str(text) for text in known.values() if text) + f"; `{row.get('command', '')}`"


def _table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    lines = ["| " + " | ".join(title for title, _ in columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(_shown(cell, row) for _, cell in columns) + " |" for row in rows]
    return "\n".join(lines)


def _shown(cell: Callable[[Row], str], row: Row) -> str:
    """Return a cell's text; one that cannot be shown must not cost the others, and the row is in the JSON lines."""
    try:
        return cell(row)
    except (KeyError, TypeError, ValueError):
        return "?"


def _fits(row: Row, columns: Sequence[Column]) -> bool:
    """Whether a row is one of this table: it has what the first column shows."""
    return _shown(columns[0][1], row) != "–"


def text(key: str) -> Callable[[Row], str]:
    """Return a cell that shows a text."""
    return lambda row: "–" if row.get(key) is None else str(row[key]).replace("|", "\\|")


def number(key: str, form: str, factor: float = 1.0, unit: str = "") -> Callable[[Row], str]:
    """Return a cell that shows a number, multiplied and formatted."""
    return lambda row: "–" if row.get(key) is None else f"{format(factor * row[key], form)}{unit}"


def _spread(row: Row, key: str, form: str, factor: float = 1.0, unit: str = "") -> str:
    """Return a median with its quartiles."""
    if row.get(key) is None:
        return "–"
    low, high = (format(factor * value, form) for value in row[f"{key}_quartiles"])
    return f"{format(factor * row[key], form)}{unit} ({low}–{high})"


def _memory_against_ours(row: Row) -> str:
    shown = number("peak_memory_bytes", ".2f", 2**-30, " GiB")(row)
    return shown if row.get("memory_over_it") is None else f"{shown} (ours {row['memory_over_it']:.2f} of it)"


def _variant_time(row: Row) -> str:
    return _spread(row, "step_seconds", ".2f", 1e3) if row.get("outcome") == "done" else str(row.get("outcome"))


def _loss_difference(row: Row) -> str:
    if row.get("outcome") != "done":
        return "–"
    if "largest_loss_difference" not in row:
        return "other batches"
    difference = row["largest_loss_difference"]
    return "a loss is not finite" if difference is None else f"{difference:.1e}"


def _last_loss(row: Row) -> str:
    losses = row.get("losses") or [None]
    return "–" if losses[-1] is None else f"{losses[-1]:.4f}"


def _held_out(row: Row) -> str:
    before, after = row.get("mlm_loss_before"), row.get("mlm_loss_after")
    return "–" if before is None or after is None else f"{before:.3f} → {after:.3f} nats"


def _accuracy(name: str) -> Callable[[Row], str]:
    before, after = number(f"{name}_before", ".1%"), number(f"{name}_after", ".1%")
    return lambda row: f"{before(row)} → {after(row)}"


PARTS: tuple[Column, ...] = (
    ("part", text("title")),
    ("outcome", text("outcome")),
    ("time", number("seconds", ".0f", unit=" s")),
)
SECTIONS: tuple[tuple[str, tuple[str, ...], tuple[Column, ...]], ...] = (
    (
        "The training step against `BertForPreTraining`",
        ("bench-base", "bench-large", "bench-base-512"),
        (
            ("size, length", lambda row: f"{row['size']}, {row['max_seq_length']}" if "size" in row else "–"),
            ("step", text("step")),
            ("examples", text("examples")),
            ("step, ms", number("step_seconds", ".2f", 1e3)),
            ("examples/s", number("examples_per_second", ",.0f")),
            ("real tokens/s", number("tokens_per_second", ",.0f")),
            ("MFU of the data sheet", number("mfu", ".1%")),
            ("MFU of the largest product", number("mfu_of_product", ".1%")),
            ("peak memory", _memory_against_ours),
            ("ours over it (quartiles)", lambda row: _spread(row, "ours_over_it", ".2f", unit=" ×")),
        ),
    ),
    (
        "Where the time of a step goes",
        ("profile",),
        (
            ("step, ms", number("step_seconds", ".2f", 1e3)),
            ("under the profiler, ms", number("profiled_step_seconds", ".2f", 1e3)),
            ("gaps", number("gap_share", ".1%")),
            ("launches a step", number("launches_per_step", ",.0f")),
        ),
    ),
    (
        "By kind",
        ("profile",),
        (
            ("kind", text("kind_of_kernel")),
            ("ms a step", number("seconds", ".3f", 1e3)),
            ("share", number("share", ".1%")),
        ),
    ),
    (
        "Variants",
        ("variants",),
        (
            ("variant", text("variant")),
            ("what", text("says")),
            ("step, ms (quartiles)", _variant_time),
            ("time over base", number("time_over_base", ".3f")),
            ("examples/s", number("examples_per_second", ",.0f")),
            ("peak memory", number("peak_memory_bytes", ".2f", 2**-30, " GiB")),
            ("last of the first losses", _last_loss),
            ("largest difference of losses", _loss_difference),
        ),
    ),
    (
        "Runs",
        ("demo", "pretraining"),
        (
            ("run", text("run")),
            ("time of training", number("wall_seconds", ",.0f", unit=" s")),
            ("steps", number("steps", ",.0f")),
            ("examples/s", number("examples_per_second", ",.0f")),
            ("MFU", number("mfu", ".1%")),
            ("waiting for data", number("data_wait_share", ".2%")),
            ("held-out MLM loss", _held_out),
            ("MLM accuracy", _accuracy("mlm_accuracy")),
            ("NSP accuracy", _accuracy("nsp_accuracy")),
        ),
    ),
)
