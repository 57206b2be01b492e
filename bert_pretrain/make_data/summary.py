"""What a data folder holds, measured: each shard reports sums, the manifest joins them into shares.

The figures are counted in the finished examples, not taken from the configuration, so they can be held against it.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from bert_pretrain.examples import Examples
from bert_pretrain.tokenizer import Tokenizer

HISTOGRAM_BINS = 16


def measure(examples: Examples, tokenizer: Tokenizer, max_seq_length: int) -> dict[str, Any]:
    """Return sums over a shard's examples, which add up over shards."""
    counts = np.diff(examples.masked_offsets)
    places = examples.masked_lm_positions + np.repeat(examples.offsets[:-1], counts)
    shown = examples.input_ids[places]
    is_mask = shown == tokenizer.mask_id
    is_kept = shown == examples.masked_lm_ids
    bins, _ = np.histogram(examples.lengths, bins=HISTOGRAM_BINS, range=(0, max_seq_length))
    return {
        "examples": len(examples),
        "tokens": len(examples.input_ids),
        "maskable_tokens": len(examples.input_ids) - 3 * len(examples),
        "masked_tokens": len(places),
        "shown_as_mask": int(is_mask.sum()),
        "shown_as_original": int((is_kept & ~is_mask).sum()),
        "shown_as_random": int((~is_kept & ~is_mask).sum()),
        "unk_tokens": int((_originals(examples, places) == tokenizer.unk_id).sum()),
        "is_next": int((examples.next_sentence_label == 0).sum()),
        "length_histogram": bins.tolist(),
    }


def _originals(examples: Examples, places: np.ndarray) -> np.ndarray:
    originals = examples.input_ids.copy()
    originals[places] = examples.masked_lm_ids
    return originals


def join_split(results: Iterable[dict[str, Any]], max_seq_length: int) -> dict[str, Any]:
    """Join what the shards of one split report to its entry in the manifest."""
    results = list(results)
    sums: Counter[str] = Counter()
    histogram = np.zeros(HISTOGRAM_BINS, dtype=np.int64)
    drops: Counter[str] = Counter()
    for result in results:
        statistics = dict(result["statistics"])
        histogram += np.array(statistics.pop("length_histogram"))
        sums.update(statistics)
        drops.update(result["drops"])
    masked, examples, tokens = sums["masked_tokens"], sums["examples"], sums["tokens"]
    return {
        "rows": examples,
        "tokens": tokens,
        "shards": [result["record"] for result in results],
        "statistics": {
            "mean_length_tokens": _share(tokens, examples),
            "padding_share_at_max_seq_length": 1 - _share(tokens, examples * max_seq_length),
            "is_next_share": _share(sums["is_next"], examples),
            "masked_share": _share(masked, sums["maskable_tokens"]),
            "masked_shown_as_mask_share": _share(sums["shown_as_mask"], masked),
            "masked_shown_as_random_share": _share(sums["shown_as_random"], masked),
            "masked_shown_as_original_share": _share(sums["shown_as_original"], masked),
            "unk_share": _share(sums["unk_tokens"], tokens),
            "length_histogram": {"bin_edges": _edges(max_seq_length), "examples": histogram.tolist()},
            "drops": {reason: count for reason, count in sorted(drops.items()) if count},
        },
    }


def join_corpus(pieces: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Join the summaries of the token store's pieces to the manifest's entry on the corpus."""
    pieces = list(pieces)
    sums: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for piece in pieces:
        sums.update({key: piece[key] for key in ("documents", "sentences", "tokens", "unk_tokens")})
        reasons.update(piece["repairs_and_drops"])
    sentences: Counter[int] = Counter()
    for piece in pieces:
        sentences.update({int(number): documents for number, documents in piece["sentences_a_document"]})
    return {
        "documents": sums["documents"],
        "sentences": sums["sentences"],
        "tokens": sums["tokens"],
        "unk_share": _share(sums["unk_tokens"], sums["tokens"]),
        "median_sentences_per_document": _median(sentences),
        "repairs_and_drops": {reason: count for reason, count in sorted(reasons.items()) if count},
    }


def _median(counts: Counter[int]) -> float:
    """Return the median of values that occur so often, 0 where there is none."""
    values = np.array(sorted(counts), dtype=np.int64)
    ranks = np.cumsum([counts[value] for value in values.tolist()])
    if not len(values):
        return 0.0
    middle = np.searchsorted(ranks, [(ranks[-1] - 1) // 2, ranks[-1] // 2], side="right")
    return float(values[middle].mean())


def describe(manifest: dict[str, Any]) -> str:
    """Return the figures of a manifest as aligned lines for the terminal."""
    lines = []
    for name, split in manifest["splits"].items():
        figures = split["statistics"]
        lines += [
            f"{name:<11}{split['rows']:>12,} examples in {len(split['shards'])} shards, {split['tokens']:,} tokens, "
            f"{figures['mean_length_tokens']:.1f} an example",
            f"{'':<11}is-next {figures['is_next_share']:.2%} · masked {figures['masked_share']:.2%} "
            f"(shown as [MASK] {figures['masked_shown_as_mask_share']:.1%}, random "
            f"{figures['masked_shown_as_random_share']:.1%}, original {figures['masked_shown_as_original_share']:.1%})"
            f" · [UNK] {figures['unk_share']:.3%} · padding saved {figures['padding_share_at_max_seq_length']:.1%}",
        ]
        lines += [f"{'':<11}dropped: {count:,} {reason}" for reason, count in figures["drops"].items()]
    corpus = manifest["corpus"]["repairs_and_drops"]
    lines += [f"{'corpus':<11}{count:,} {reason.replace('_', ' ')}" for reason, count in corpus.items()]
    return "\n".join(lines)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _edges(max_seq_length: int) -> list[float]:
    return np.linspace(0, max_seq_length, HISTOGRAM_BINS + 1).tolist()
