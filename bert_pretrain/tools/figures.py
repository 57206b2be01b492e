"""The figures of an inspection in the order in which both the terminal and the page give them."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bert_pretrain.config import DataConfig
from bert_pretrain.make_data import summary
from bert_pretrain.tools.inspection import Inspection
from bert_pretrain.tools.survey import NUM_SLICES, Survey

_MOST_BINS = 16

# (what it says, its name in the manifest's statistics, how it is written)
FIGURES = (
    ("mean length in tokens", "mean_length_tokens", "{:.1f}"),
    ("padding at max_seq_length", "padding_share_at_max_seq_length", "{:.2%}"),
    ("is-next", "is_next_share", "{:.2%}"),
    ("in order", "in_order_share", "{:.2%}"),
    ("masked, of the text", "masked_share", "{:.2%}"),
    ("  shown as [MASK]", "masked_shown_as_mask_share", "{:.2%}"),
    ("  shown as a random piece", "masked_shown_as_random_share", "{:.2%}"),
    ("  shown as it is", "masked_shown_as_original_share", "{:.2%}"),
    ("[UNK]", "unk_share", "{:.3%}"),
)


@dataclass(frozen=True)
class Histogram:
    """Shares by bin, for each split: of the whole, or of the bin."""

    title: str
    labels: list[str]
    shares: dict[str, list[float]]
    expected: dict[str, list[float]]
    """What chance would give, where that says something; otherwise empty."""


def measured(survey: Survey, config: DataConfig) -> dict[str, Any]:
    """Return a split's figures as counted again, in the manifest's form."""
    return summary.join_split(survey.results, config)


def table(inspection: Inspection) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the figures: what each is, and for every split the manifest's and the measured one."""
    rows: list[tuple[str, list[tuple[str, str]]]] = []
    splits = [
        (inspection.folder.manifest["splits"][name], measured(survey, inspection.config))
        for name, survey in inspection.surveys.items()
    ]
    for title, name in (("examples", "rows"), ("tokens", "tokens")):
        rows.append((title, [(f"{old[name]:,}", f"{new[name]:,}") for old, new in splits]))
    for title, name, form in FIGURES:
        pairs = [(old["statistics"].get(name), new["statistics"].get(name)) for old, new in splits]
        if any(value is not None for pair in pairs for value in pair):
            rows.append((title, [(_written(old, form), _written(new, form)) for old, new in pairs]))
    return rows


def _written(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def histograms(inspection: Inspection) -> list[Histogram]:
    """Return lengths, numbers of masked tokens, and where in their examples these lie."""
    surveys, config = inspection.surveys, inspection.config
    splits = {name: measured(survey, config)["statistics"]["length_histogram"] for name, survey in surveys.items()}
    edges = next(iter(splits.values()))["bin_edges"]
    lengths = {name: _shares(histogram["examples"]) for name, histogram in splits.items()}
    found = [Histogram("tokens of an example", _ranges(edges, config.max_seq_length), lengths, {})]
    masked = {name: survey for name, survey in surveys.items() if "predictions" in survey.faults}
    if masked:
        most = max(len(survey.predictions) for survey in masked.values()) - 1
        width = math.ceil((most + 1) / _MOST_BINS)
        size = -(-(most + 1) // width) * width
        shares = {name: _shares(_binned(survey.predictions, size, width)) for name, survey in masked.items()}
        bounds = list(range(0, size + 1, width))
        found.append(Histogram("masked tokens of an example", _ranges(bounds, most), shares, {}))
        percents = np.linspace(0, 100, NUM_SLICES + 1).astype(int).tolist()
        labels = [f"{low}–{high} %" for low, high in itertools.pairwise(percents)]
        found.append(
            Histogram(
                "share of the text that is masked, from an example's beginning to its end",
                labels,
                {name: _rates(survey.slices, survey.text_slices) for name, survey in masked.items()},
                {name: _rates(survey.expected_slices, survey.text_slices) for name, survey in masked.items()},
            )
        )
    return found


def origin(inspection: Inspection) -> list[tuple[str, str]]:
    """Return what made the folder, and from what."""
    manifest = inspection.folder.manifest
    config, corpus, inputs = inspection.config, manifest["corpus"], manifest["inputs"]
    names = ", ".join(str(one["location"]) for one in inputs[:3]) + (f" and {len(inputs) - 3} more" * (len(inputs) > 3))
    rows = [
        ("inputs", names),
        (
            "corpus",
            f"{corpus['documents']:,} documents, {corpus['sentences']:,} sentences, {corpus['tokens']:,} tokens",
        ),
        ("vocabulary", f"{manifest['tokenizer']['vocab_size']:,} tokens"),
        ("examples", f"at most {config.max_seq_length} tokens, {config.dupe_factor} copies, seed {config.seed}"),
        ("objective", f"next_sentence {config.next_sentence}, masking {config.masking}" + _words(config)),
        ("made by", ", ".join(f"{name} {version}" for name, version in manifest["versions"].items())),
    ]
    drops = dict(corpus["repairs_and_drops"])
    for split in manifest["splits"].values():
        for reason, count in split["statistics"]["drops"].items():
            drops[reason] = drops.get(reason, 0) + count
    rows += [("repaired or dropped", f"{count:,} {reason.replace('_', ' ')}") for reason, count in drops.items()]
    return rows


def _words(config: DataConfig) -> str:
    by = f" by {config.word_segmenter}" if config.word_segmenter else ""
    return f", whole words{by}" if config.whole_word_mask else ""


def scope(inspection: Inspection) -> str:
    """Return in words how much of the folder was read."""
    read = sum(survey.shards for survey in inspection.surveys.values())
    total = sum(len(inspection.folder.shards(name)) for name in inspection.folder.manifest["splits"])
    if inspection.is_complete:
        return f"all {total} shards read"
    return f"{read} of {total} shards read; --stats reads all"


def _binned(counts: np.ndarray, size: int, width: int) -> np.ndarray:
    return np.pad(counts, (0, size - len(counts))).reshape(-1, width).sum(axis=1)


def _shares(counts: Sequence[float] | np.ndarray) -> list[float]:
    values = np.asarray(counts, dtype=np.float64)
    return (values / max(values.sum(), 1.0)).tolist()


def _rates(counts: np.ndarray, totals: np.ndarray) -> list[float]:
    return (counts / np.maximum(totals, 1)).tolist()


def _ranges(edges: Sequence[float], last: int) -> list[str]:
    """Name the whole numbers between edges; the last bin includes its upper one."""
    names = []
    for low, high in itertools.pairwise(edges):
        first, end = math.ceil(low), min(math.ceil(high) - 1, last)
        end = last if high == edges[-1] else end
        names.append(f"{first}–{end}" if end > first else f"{first}")
    return names
