"""Statistics of the text and of the examples: each shard reports sums, the manifest joins them into shares.

They are counted in the finished examples, not taken from the configuration, so they can be compared with it. All are
dictionaries as JSON has them: store shards, records and the manifest hold them as they are.
"""

import base64
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NotRequired, TypedDict

import numpy as np

from bert_pretrain.config import DataConfig
from bert_pretrain.examples.examples import FEW_EXAMPLES, UNSEEN_COUNT, Examples, with_error
from bert_pretrain.text.tokenizer import Tokenizer

LABEL_SHARES = {"nsp": "is_next_share", "sop": "in_order_share"}
"""What the share of the label 0 is called under each objective that has labels."""


class TextCounts(TypedDict):
    """What there is of an input, or of a byte range of one."""

    documents: int
    sentences: int
    tokens: int
    unk_tokens: int


class StoreShardSummary(TypedDict):
    """What a store shard holds."""

    parts: list[TextCounts]
    """Of each byte range, in order."""
    sentences_a_document: list[tuple[int, int]]
    """How many documents there are of each number of sentences."""
    repairs_and_drops: dict[str, int]


class CorpusStatistics(TypedDict):
    """What all inputs hold: the manifest's entry `corpus`."""

    documents: int
    sentences: int
    tokens: int
    unk_share: float
    median_sentences_per_document: float
    repairs_and_drops: dict[str, int]
    inputs: list[TextCounts]
    left_out: dict[str, int]
    """Documents that take part nowhere, by reason."""


class ShardStatistics(TypedDict):
    """Sums over a shard's examples; those of what it does without are absent."""

    examples: int
    tokens: int
    unk_tokens: int
    maskable_tokens: int
    label_0: NotRequired[int]
    masked_tokens: NotRequired[int]
    shown_as_mask: NotRequired[int]
    shown_as_original: NotRequired[int]
    shown_as_random: NotRequired[int]


class ShardResult(TypedDict):
    """What is known of a finished shard."""

    record: dict[str, Any]  # a `ShardRecord` as JSON
    statistics: ShardStatistics
    drops: dict[str, int]
    token_counts: NotRequired[str]
    """Of each token of the vocabulary in the text before masking: `pack_counts`."""


class SplitStatistics(TypedDict):
    """What a split holds: its entry in the manifest."""

    rows: int
    tokens: int
    shards: list[dict[str, Any]]  # each a `ShardRecord` as JSON
    statistics: dict[str, Any]  # shares by name, and drops by reason


def measure(examples: Examples, tokenizer: Tokenizer) -> ShardStatistics:
    """Return the statistics of a shard, which add up over shards."""
    sums: ShardStatistics = {
        "examples": len(examples),
        "tokens": len(examples.input_ids),
        "unk_tokens": int((examples.input_ids == tokenizer.unk_id).sum()),
        "maskable_tokens": int(
            ((examples.input_ids != tokenizer.cls_id) & (examples.input_ids != tokenizer.sep_id)).sum()
        ),
    }
    if examples.next_sentence_label is not None:
        sums["label_0"] = int((examples.next_sentence_label == 0).sum())
    if examples.masks is not None:
        originals, shown = examples.masks.original_ids, examples.input_ids[examples.masked_indices]
        is_mask, is_kept = shown == tokenizer.mask_id, shown == originals
        sums["masked_tokens"] = len(shown)
        sums["shown_as_mask"] = int(is_mask.sum())
        sums["shown_as_original"] = int((is_kept & ~is_mask).sum())
        sums["shown_as_random"] = int((~is_kept & ~is_mask).sum())
        # [UNK] is counted in the text, before masking.
        sums["unk_tokens"] += int((originals == tokenizer.unk_id).sum()) - int((shown == tokenizer.unk_id).sum())
    return sums


def pack_counts(examples: Examples, tokenizer: Tokenizer) -> str:
    """Return how often each token occurs before masking, as text for JSON."""
    counts = np.bincount(examples.original_ids, minlength=tokenizer.vocab_size)
    counts[[tokenizer.cls_id, tokenizer.sep_id]] = 0
    return base64.b64encode(zlib.compress(counts.astype("<u4").tobytes())).decode()


def unpack_counts(packed: str) -> np.ndarray:
    """Return the counts of `pack_counts`, (vocab_size,)."""
    return np.frombuffer(zlib.decompress(base64.b64decode(packed)), dtype="<u4").astype(np.int64)


def unigram_entropy(counts: np.ndarray, train_counts: np.ndarray) -> float:
    """Return the loss in nats per token of a model that knows only how frequent each token is in training.

    `counts` are those of the split that is predicted; for training itself this is the entropy of its tokens.
    """
    frequencies = (train_counts + UNSEEN_COUNT) / (train_counts + UNSEEN_COUNT).sum()
    return round(float(-(counts * np.log(frequencies)).sum()) / max(int(counts.sum()), 1), 6)


def join_split(results: Iterable[ShardResult], config: DataConfig) -> SplitStatistics:
    """Join the results of the shards of one split to its entry in the manifest."""
    results = list(results)
    sums: Counter[str] = Counter()
    drops: Counter[str] = Counter()
    for result in results:
        sums.update({name: value for name, value in result["statistics"].items() if isinstance(value, int)})
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
            "drops": _positive(drops),
        },
    }


def join_corpus(
    parts_of_inputs: Sequence[Sequence[TextCounts]], store_shards: Sequence[StoreShardSummary]
) -> CorpusStatistics:
    """Join the counts of the byte ranges of each input, and the summaries of the store shards."""
    inputs = [add_counts(parts) for parts in parts_of_inputs]
    sums = add_counts(inputs)
    sentences: Counter[int] = Counter()
    reasons: Counter[str] = Counter()
    for summary in store_shards:
        sentences.update(dict(summary["sentences_a_document"]))
        reasons.update(summary["repairs_and_drops"])
    return {
        "documents": sums["documents"],
        "sentences": sums["sentences"],
        "tokens": sums["tokens"],
        "unk_share": _share(sums["unk_tokens"], sums["tokens"]),
        "median_sentences_per_document": _median(sentences),
        "repairs_and_drops": _positive(reasons),
        "inputs": inputs,
        "left_out": {},
    }


def add_counts(counts: Sequence[TextCounts]) -> TextCounts:
    """Return the sums of counts."""
    return {
        "documents": sum(each["documents"] for each in counts),
        "sentences": sum(each["sentences"] for each in counts),
        "tokens": sum(each["tokens"] for each in counts),
        "unk_tokens": sum(each["unk_tokens"] for each in counts),
    }


def _positive(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted((+counts).items()))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _median(counts: Counter[int]) -> float:
    """Return the median of values that occur so often, 0 where there is none."""
    values = np.array(sorted(counts), dtype=np.int64)
    ranks = np.cumsum([counts[value] for value in values.tolist()])
    if not len(values):
        return 0.0
    middle = np.searchsorted(ranks, [(ranks[-1] - 1) // 2, ranks[-1] // 2], side="right")
    return float(values[middle].mean())


def describe(manifest: dict[str, Any]) -> str:
    """Return the statistics of a manifest as aligned lines for the terminal."""
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
            f"{figures['mean_length_tokens']:.1f} per example",
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
        if name == "train" and (times := figures.get("times_text_is_seen")):
            lines.append(f"{'':<11}{describe_times(times, manifest['config']['data']['dupe_factor'])}")
        if name == "validation" and split["rows"] < FEW_EXAMPLES:
            lines.append(f"{'':<11}few: chance on them is {with_error(0.5, split['rows'])}, its standard error")
        for reason, count in figures["drops"].items():
            what = f"{count:,} {reason.replace('_', ' ')}"
            if reason == "single_sentence_spans":
                what = f"{count:,} documents, or ends of documents, of one sentence, which give no pair"
                if name == "train":
                    all_copies = manifest["corpus"]["documents"] * manifest["config"]["data"]["dupe_factor"]
                    what += f": {count / max(1, all_copies):.1%} of the documents in all copies"
            lines.append(f"{'':<11}left out: {what}")
    corpus = manifest["corpus"]
    drops = {
        **corpus["repairs_and_drops"],
        **{f"{name}, left out": count for name, count in corpus["left_out"].items()},
    }
    lines += [f"{'corpus':<11}{count:,} {reason.replace('_', ' ')}" for reason, count in drops.items()]
    return "\n".join(lines)


def describe_times(times: float, copies: int) -> str:
    """Return how often an epoch sees the text, on average; a sentence that a window cuts begins the next one again."""
    return f"an epoch sees the text {times:.2f} times (data.dupe_factor is {copies}; windows overlap in cut sentences)"


def _describe_masks(figures: dict[str, Any]) -> str:
    if "masked_share" not in figures:
        return "masks drawn in training"
    return (
        f"masked {figures['masked_share']:.2%} (shown as [MASK] {figures['masked_shown_as_mask_share']:.1%}, random "
        f"{figures['masked_shown_as_random_share']:.1%}, original {figures['masked_shown_as_original_share']:.1%})"
    )
