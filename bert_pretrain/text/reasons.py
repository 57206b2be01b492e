"""Counts of dropped, repaired and skipped text by reason, each with the position where it first occurred."""

from collections import Counter
from collections.abc import Mapping

FIRST = " (first: "  # separates the reason of a count from its first position


def count_reason(counts: Counter[str], reason: str, where: str) -> None:
    """Count a reason. The key has the position of the first record with this reason."""
    known = (key for key in counts if key.startswith(f"{reason}{FIRST}"))
    counts[next(known, f"{reason}{FIRST}{where})")] += 1


def join_reasons(counts: Mapping[str, int]) -> dict[str, int]:
    """Sum the counts of reasons that differ only in the position of the first record, and keep the first reason."""
    first_reasons: dict[str, str] = {}
    joined: Counter[str] = Counter()
    for reason, count in counts.items():
        joined[first_reasons.setdefault(reason.partition(FIRST)[0], reason)] += count
    return dict(sorted((+joined).items()))


def describe_reasons(counts: Mapping[str, int]) -> list[str]:
    """Format the counts of each reason as text."""
    lines = []
    for reason, count in counts.items():
        what, mark, place = reason.partition(FIRST)
        if " " not in what:  # a key of a manifest, rather than a text with names of columns
            what = what.replace("_", " ")
        lines.append(f"{count:,} {what}{mark}{place}")
    return lines
