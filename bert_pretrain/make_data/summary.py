"""What a data folder holds, measured: each shard reports sums, the manifest joins them into shares.

The figures are counted in the finished examples, not taken from the configuration, so they can be held against it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bert_pretrain.config import DataConfig
from bert_pretrain.examples import Examples
from bert_pretrain.tokenizer import Tokenizer

HISTOGRAM_BINS = 16
LABEL_SHARES = {"nsp": "is_next_share", "sop": "in_order_share"}
"""What the share of the label 0 is called under each objective that has labels."""


def measure(examples: Examples, tokenizer: Tokenizer, max_seq_length: int) -> dict[str, Any]:
    """Return sums over a shard's examples, which add up over shards; those of what it does without are absent."""
    bins, _ = np.histogram(examples.lengths, bins=HISTOGRAM_BINS, range=(0, max_seq_length))
    sums: dict[str, Any] = {
        "examples": len(examples),
        "tokens": len(examples.input_ids),
        "unk_tokens": int((examples.input_ids == tokenizer.unk_id).sum()),
        "length_histogram": bins.tolist(),
    }
    if examples.next_sentence_label is not None:
        sums["label_0"] = int((examples.next_sentence_label == 0).sum())
    masks = examples.masks
    if masks is not None:
        shown = examples.input_ids[masks.positions + np.repeat(examples.offsets[:-1], np.diff(masks.offsets))]
        is_mask = shown == tokenizer.mask_id
        is_kept = shown == masks.original_ids
        special = (examples.input_ids == tokenizer.cls_id).sum() + (examples.input_ids == tokenizer.sep_id).sum()
        sums["maskable_tokens"] = len(examples.input_ids) - int(special)
        sums["masked_tokens"] = len(shown)
        sums["shown_as_mask"] = int(is_mask.sum())
        sums["shown_as_original"] = int((is_kept & ~is_mask).sum())
        sums["shown_as_random"] = int((~is_kept & ~is_mask).sum())
        # What stands there now is a mask or a word piece; what stood there counts.
        sums["unk_tokens"] += int((masks.original_ids == tokenizer.unk_id).sum()) - int(
            (shown == tokenizer.unk_id).sum()
        )
    return sums


def join_split(results: Iterable[dict[str, Any]], config: DataConfig) -> dict[str, Any]:
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
    examples, tokens = sums["examples"], sums["tokens"]
    shares = {
        "mean_length_tokens": _share(tokens, examples),
        "padding_share_at_max_seq_length": 1 - _share(tokens, examples * config.max_seq_length),
    }
    if "label_0" in sums:
        shares[LABEL_SHARES[config.next_sentence]] = _share(sums["label_0"], examples)
    if "masked_tokens" in sums:
        masked = sums["masked_tokens"]
        shares["masked_share"] = _share(masked, sums["maskable_tokens"])
        for shown in ("mask", "random", "original"):
            shares[f"masked_shown_as_{shown}_share"] = _share(sums[f"shown_as_{shown}"], masked)
    return {
        "rows": examples,
        "tokens": tokens,
        "shards": [result["record"] for result in results],
        "statistics": {
            **shares,
            "unk_share": _share(sums["unk_tokens"], tokens),
            "length_histogram": {"bin_edges": _edges(config.max_seq_length), "examples": histogram.tolist()},
            "drops": {reason: count for reason, count in sorted(drops.items()) if count},
        },
    }


def join_corpus(
    parts_of_inputs: Sequence[Sequence[dict[str, Any]]], pieces: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Join the figures of the parts of each input, and the summaries of the store's pieces, to those of the corpus."""
    names = ("documents", "sentences", "tokens", "unk_tokens")
    of_inputs = [{name: sum(part[name] for part in parts) for name in names} for parts in parts_of_inputs]
    sums = {name: sum(figures[name] for figures in of_inputs) for name in names}
    sentences: Counter[int] = Counter()
    reasons: Counter[str] = Counter()
    for piece in pieces:
        sentences.update({int(number): documents for number, documents in piece["sentences_a_document"]})
        reasons.update(piece["repairs_and_drops"])
    return {
        "documents": sums["documents"],
        "sentences": sums["sentences"],
        "tokens": sums["tokens"],
        "unk_share": _share(sums["unk_tokens"], sums["tokens"]),
        "median_sentences_per_document": _median(sentences),
        "repairs_and_drops": {reason: count for reason, count in sorted(reasons.items()) if count},
        "inputs": of_inputs,
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
        labels = [
            f"{share.removesuffix('_share').replace('_', '-')} {figures[share]:.2%}"
            for share in LABEL_SHARES.values()
            if share in figures
        ]
        lines += [
            f"{name:<11}{split['rows']:>12,} examples in {len(split['shards'])} shards, {split['tokens']:,} tokens, "
            f"{figures['mean_length_tokens']:.1f} an example",
            f"{'':<11}"
            + " · ".join(
                [
                    *labels,
                    _describe_masks(figures),
                    f"[UNK] {figures['unk_share']:.3%}",
                    f"padding saved {figures['padding_share_at_max_seq_length']:.1%}",
                ]
            ),
        ]
        lines += [f"{'':<11}dropped: {count:,} {reason}" for reason, count in figures["drops"].items()]
    corpus = manifest["corpus"]
    drops = {
        **corpus["repairs_and_drops"],
        **{f"{name}, left out": count for name, count in corpus["left_out"].items()},
    }
    lines += [f"{'corpus':<11}{count:,} {reason.replace('_', ' ')}" for reason, count in drops.items()]
    return "\n".join(lines)


def _describe_masks(figures: dict[str, Any]) -> str:
    if "masked_share" not in figures:
        return "masks drawn in training"
    return (
        f"masked {figures['masked_share']:.2%} (shown as [MASK] {figures['masked_shown_as_mask_share']:.1%}, random "
        f"{figures['masked_shown_as_random_share']:.1%}, original {figures['masked_shown_as_original_share']:.1%})"
    )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _edges(max_seq_length: int) -> list[float]:
    return np.linspace(0, max_seq_length, HISTOGRAM_BINS + 1).tolist()
