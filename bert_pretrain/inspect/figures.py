"""The figures of an inspection, in the order in which both the terminal and the page give them."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bert_pretrain.config import DataConfig
from bert_pretrain.inspect.inspection import Inspection
from bert_pretrain.inspect.scan import NUM_SLICES

_MAX_BINS = 16


class Figure(NamedTuple):
    title: str
    name: str
    """In the manifest's statistics."""
    form: str


FIGURES = (
    Figure("mean length in tokens", "mean_length_tokens", ".1f"),
    Figure("padding at max_seq_length", "padding_share_at_max_seq_length", ".2%"),
    Figure("is-next", "is_next_share", ".2%"),
    Figure("in order", "in_order_share", ".2%"),
    Figure("masked, of the text", "masked_share", ".2%"),
    Figure("  shown as [MASK]", "masked_shown_as_mask_share", ".2%"),
    Figure("  shown as a random token", "masked_shown_as_random_share", ".2%"),
    Figure("  shown unchanged", "masked_shown_as_original_share", ".2%"),
    Figure("[UNK]", "unk_share", ".3%"),
    Figure("entropy of a token, nats", "unigram_entropy", ".3f"),
)


@dataclass(frozen=True)
class Histogram:
    """Shares by bin, for each split: of the whole, or of the bin."""

    title: str
    labels: list[str]
    shares: dict[str, list[float]]
    expected: dict[str, list[float]]
    """What chance would give, where that says something; otherwise empty."""

    @property
    def top(self) -> float:
        """A round upper end for an axis: 1, 2, 4, 6, 8 or 10 times a power of ten, not below any share."""
        largest = max(itertools.chain(*self.shares.values(), *self.expected.values()))
        if largest <= 0:
            return 1.0
        power = 10.0 ** math.floor(math.log10(largest))
        return next(power * step for step in (1, 2, 4, 6, 8, 10) if power * step >= largest * (1 - 1e-9))


def compare(inspection: Inspection) -> list[tuple[str, list[str]]]:
    """Return the figures: what each is, and for every split the one of the manifest and the one measured."""
    splits = inspection.folder.manifest["splits"]
    entries = [entry for name, scan in inspection.scans.items() for entry in (splits[name], scan.entry)]
    rows = [("examples", [f"{entry['rows']:,}" for entry in entries])]
    rows.append(("tokens", [f"{entry['tokens']:,}" for entry in entries]))
    for title, name, form in FIGURES:
        values = [entry["statistics"].get(name) for entry in entries]
        if any(value is not None for value in values):
            rows.append((title, ["–" if value is None else format(value, form) for value in values]))
    return rows


def histograms(inspection: Inspection) -> list[Histogram]:
    """Return lengths, numbers of masked tokens, and where in their examples these are."""
    last = inspection.config.max_seq_length
    lengths = {name: scan.entry["statistics"]["length_histogram"] for name, scan in inspection.scans.items()}
    edges = next(iter(lengths.values()))["bin_edges"]
    shares = {name: _shares(histogram["examples"]) for name, histogram in lengths.items()}
    found = [Histogram("tokens per example", _ranges(edges, last), shares, {})]
    masks = {name: scan.masks for name, scan in inspection.scans.items() if scan.masks is not None}
    if not masks:
        return found
    most = max(int(np.flatnonzero(counts.per_example)[-1]) for counts in masks.values())
    width = math.ceil((most + 1) / _MAX_BINS)
    bounds = np.arange(0, most + 1, width)  # of the bins, without the end of the last
    shares = {name: _shares(np.add.reduceat(counts.per_example[: most + 1], bounds)) for name, counts in masks.items()}
    labels = _ranges([*bounds.tolist(), int(bounds[-1]) + width], most)
    found.append(Histogram("masked tokens per example", labels, shares, {}))
    percents = np.linspace(0, 100, NUM_SLICES + 1).astype(int).tolist()
    found.append(
        Histogram(
            "share of the text that is masked, from the beginning of an example to its end",
            [f"{low}–{high} %" for low, high in itertools.pairwise(percents)],
            {name: _rates(counts.slices, counts.text_slices) for name, counts in masks.items()},
            {name: _rates(counts.expected_slices, counts.text_slices) for name, counts in masks.items()},
        )
    )
    return found


def origin(inspection: Inspection) -> list[tuple[str, str]]:
    """Return what the folder was made from, and with what."""
    manifest, config = inspection.folder.manifest, inspection.config
    corpus, inputs = manifest.get("corpus", {}), manifest.get("inputs", [])
    names = ", ".join(str(one["location"]) for one in inputs[:3]) + (f" and {len(inputs) - 3} more" * (len(inputs) > 3))
    counts = ", ".join(f"{corpus.get(name, 0):,} {name}" for name in ("documents", "sentences", "tokens"))
    rows = [
        ("inputs", names),
        ("corpus", counts),
        ("vocabulary", f"{manifest['tokenizer'].get('vocab_size', 0):,} tokens"),
        ("examples", f"at most {config.max_seq_length} tokens, {config.dupe_factor} copies, seed {config.seed}"),
        ("objective", f"next_sentence {config.next_sentence}, masking {config.masking}" + _words(config)),
        ("made by", ", ".join(f"{name} {version}" for name, version in manifest.get("versions", {}).items())),
    ]
    drops = dict(corpus.get("repairs_and_drops", {}))
    for split in manifest["splits"].values():
        for reason, count in split["statistics"].get("drops", {}).items():
            drops[reason] = drops.get(reason, 0) + count
    return rows + [("repaired or dropped", f"{count:,} {reason.replace('_', ' ')}") for reason, count in drops.items()]


def _words(config: DataConfig) -> str:
    by = f" by {config.word_segmenter}" if config.word_segmenter else ""
    return f", whole words{by}" if config.whole_word_mask else ""


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
