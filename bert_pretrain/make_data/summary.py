"""Statistics of the text and the examples, and the errors and warnings that follow from them.

Statistics of the text are counted by byte range, when it is tokenized. Statistics of the examples are counted in the
finished shards, so that they can be compared with the configuration. Each shard reports sums; the manifest has shares.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bert_pretrain.config import DataConfig, duration_text
from bert_pretrain.errors import InputError
from bert_pretrain.examples.examples import UNSEEN_COUNT, Examples
from bert_pretrain.make_data.assignment import MAX_HELD_OUT_SHARE, Assignment, held_out_share, min_documents
from bert_pretrain.text.corpus import Corpus, Sample
from bert_pretrain.text.reasons import describe_reasons, join_reasons
from bert_pretrain.text.sentences import SentenceSplitter
from bert_pretrain.text.sources import Source, few_documents, finer_boundary
from bert_pretrain.text.tokenizer import MAX_UNK_SHARE, Tokenizer

LABEL_SHARES = {"nsp": "is_next_share", "sop": "in_order_share"}  # names of the share of label 0, by objective
TEXT_COUNTS = ("documents", "sentences", "tokens", "unk_tokens")  # counts of each input and each byte range
FREQUENT = 10  # a sentence that occurs more often in a sample counts as repeated
SINGLE_SENTENCES_REMEDY = (
    "--set data.next_sentence=none, if each document is one sentence or sequence; or "
    "--set data.document_boundary=file (for records --set data.sentence_splitter=lines), if lines or blank lines "
    "separate the sentences of one document (with few files also --set data.next_sentence=sop)"
)


def token_counts(examples: Examples, tokenizer: Tokenizer) -> np.ndarray:
    """Return how often each token occurs before masking, (vocab_size,). [CLS] and [SEP] are not counted."""
    counts = np.bincount(examples.original_ids, minlength=tokenizer.vocab_size)
    counts[[tokenizer.cls_id, tokenizer.sep_id]] = 0
    return counts


def measure(examples: Examples, tokenizer: Tokenizer) -> dict[str, int]:
    """Return sums over the examples of a shard. Sums of labels or masks are absent if the examples have none."""
    counts = token_counts(examples, tokenizer)
    sums = {
        "examples": len(examples),
        "tokens": len(examples.input_ids),
        "unk_tokens": int(counts[tokenizer.unk_id]),
        "maskable_tokens": int(counts.sum()),
    }
    if examples.next_sentence_label is not None:
        sums["label_0"] = int((examples.next_sentence_label == 0).sum())
    if examples.masks is not None:
        shown = examples.input_ids[examples.masked_indices]
        is_mask = shown == tokenizer.mask_id
        is_original = ~is_mask & (shown == examples.masks.original_ids)
        sums["masked_tokens"] = len(shown)
        sums["shown_as_mask"] = int(is_mask.sum())
        sums["shown_as_original"] = int(is_original.sum())
        sums["shown_as_random"] = int((~is_mask & ~is_original).sum())
    return sums


def unigram_entropy(counts: np.ndarray, train_counts: np.ndarray) -> float:
    """Return the loss in nats per token of a model that predicts the token frequencies of the training split.

    `counts` are the token counts of the split that is predicted.
    """
    frequencies = (train_counts + UNSEEN_COUNT) / (train_counts + UNSEEN_COUNT).sum()
    return round(float(-(counts * np.log(frequencies)).sum()) / max(int(counts.sum()), 1), 6)


def join_split(shards: Sequence[Mapping[str, Any]], config: DataConfig) -> dict[str, Any]:
    """Return the manifest entry of a split, from the results of its shards."""
    sums: Counter[str] = Counter()
    for shard in shards:
        sums.update(shard["statistics"])
    examples, tokens = sums["examples"], sums["tokens"]
    statistics: dict[str, Any] = {
        "mean_length_tokens": _share(tokens, examples),
        "padding_share_at_max_seq_length": 1 - _share(tokens, examples * config.max_seq_length),
    }
    if "label_0" in sums:
        statistics[LABEL_SHARES[config.next_sentence]] = _share(sums["label_0"], examples)
    if "masked_tokens" in sums:
        masked = sums["masked_tokens"]
        statistics["masked_share"] = _share(masked, sums["maskable_tokens"])
        for shown in ("mask", "random", "original"):
            statistics[f"masked_shown_as_{shown}_share"] = _share(sums[f"shown_as_{shown}"], masked)
    statistics["unk_share"] = _share(sums["unk_tokens"], tokens)
    single = sums["single_sentence_spans"]
    statistics["drops"] = {"single_sentence_spans": single} if single else {}
    return {
        "rows": examples,
        "tokens": tokens,
        "shards": [shard["record"] for shard in shards],
        "statistics": statistics,
    }


def join_corpus(inputs: Sequence[Mapping[str, int]], store_shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the manifest entry `corpus`, from the counts of each input and the summaries of the store shards."""
    sums: Counter[str] = Counter()
    for counts in inputs:
        sums.update(counts)
    sentences: Counter[int] = Counter()
    reasons: Counter[str] = Counter()
    for shard in store_shards:
        sentences.update(dict(shard["sentences_a_document"]))
        reasons.update(shard["repairs_and_drops"])
    median = 0.0
    if sentences:
        median = float(np.quantile(list(sentences), 0.5, weights=list(sentences.values()), method="inverted_cdf"))
    return {
        "documents": sums["documents"],
        "sentences": sums["sentences"],
        "tokens": sums["tokens"],
        "unk_share": _share(sums["unk_tokens"], sums["tokens"]),
        "median_sentences_per_document": median,
        "repairs_and_drops": join_reasons(reasons),
        "inputs": inputs,
    }


def _share(part: float, total: float) -> float:
    return part / total if total else 0.0


def describe(manifest: Mapping[str, Any]) -> str:
    """Return the statistics of a manifest as aligned lines for the terminal."""
    corpus = manifest["corpus"]
    copies = manifest["config"]["data"]["dupe_factor"]
    lines: list[str] = []
    for name, split in manifest["splits"].items():
        statistics = split["statistics"]
        lines.append(
            f"{name:<11}{split['rows']:>12,} examples in {len(split['shards'])} shards, {split['tokens']:,} tokens, "
            f"{statistics['mean_length_tokens']:.1f} per example"
        )
        shares = [_describe_masks(statistics), f"[UNK] {statistics['unk_share']:.3%}"]
        for share in LABEL_SHARES.values():
            if share in statistics:
                shares.insert(0, f"{share.removesuffix('_share').replace('_', '-')} {statistics[share]:.2%}")
        shares.append(f"padding saved {statistics['padding_share_at_max_seq_length']:.1%}")
        lines.append(f"{'':<11}{' · '.join(shares)}")
        if name == "train":
            lines.append(f"{'':<11}{describe_times(statistics['times_text_is_seen'], copies)}")
        if single := statistics["drops"].get("single_sentence_spans"):
            lines.append(
                f"{'':<11}left out: {single:,} documents or ends of documents with one sentence, which give no pair"
            )
    left_out = {f"{name}, left out": count for name, count in corpus["left_out"].items()}
    lines += [f"{'corpus':<11}{line}" for line in describe_reasons(corpus["repairs_and_drops"] | left_out)]
    return "\n".join(lines)


def store_bytes(folder: Path) -> int:
    """Return the size of the token stores below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*.npy"))


def describe_corpus(corpus: Mapping[str, Any], sources: Sequence[Source], store: Path) -> str:
    """Return the numbers of documents, sentences and tokens, the layouts, and the place and size of the store."""
    layouts: dict[str, list[str]] = {}
    for source in sources:
        layout = f"document boundary: {source.boundary}, sentence splitter: {source.splitter}"
        layouts.setdefault(layout, []).append(source.location)
    described = sorted(layouts)
    if len(layouts) > 1:
        described = [f"{each} ({len(layouts[each]):,} of the inputs, such as {layouts[each][0]})" for each in described]
    return (
        f"{corpus['documents']:,} documents, {corpus['sentences']:,} sentences "
        f"(median {corpus['median_sentences_per_document']:g} per document), {corpus['tokens']:,} tokens, "
        f"[UNK] {corpus['unk_share']:.3%}\n{'; '.join(described)}\ntoken store: {store} ({_bytes(store_bytes(store))})"
    )


def describe_estimate(
    sample: Sample,
    contents: Mapping[str, Any],
    documents: int | None,
    store_bytes: int,
    seconds: float,
    workers: int,
) -> str:
    """Return the expected output of a run as aligned lines, from the output for a sample of the text.

    `contents` are the manifest entries of the sample. `seconds` is its CPU time. `documents` is the number of all
    documents, if it is known.
    """
    config = sample.corpus.config
    corpus = contents["corpus"]
    train = contents["splits"]["train"]
    totals = {"documents": 0.0, "tokens": 0.0}
    for source, counts in zip(sample.corpus.sources, corpus["inputs"], strict=True):
        for name in totals:
            totals[name] += counts[name] * (sample.validation_scale if source.is_validation else sample.scale)
    held_out = contents["splits"].get("validation", {"rows": 0})["rows"] * sample.validation_scale
    if config.validation_fraction and not any(source.is_validation for source in sample.corpus.sources):
        held_out *= held_out_share(config, totals["tokens"]) / held_out_share(config, corpus["tokens"])
    num_examples = sample.scale * train["rows"]
    shard_bytes = sample.scale * sum(shard["bytes"] for shard in train["shards"])
    shard_tokens = min(config.examples_per_shard, num_examples) * train["statistics"]["mean_length_tokens"]
    worker_bytes = max(230 << 20, (150 << 20) + 37 * shard_tokens)  # measured: tokenizing, building a shard
    core_seconds = sample.scale * seconds
    duration = duration_text(float(math.ceil(2.0 + core_seconds / workers)))  # 2 seconds to start
    return (
        "dry run: estimated from a sample, nothing is written\n"
        f"corpus     {documents or totals['documents']:,.0f} documents, {totals['tokens']:,.0f} tokens\n"
        f"training   {num_examples:,.0f} examples; {held_out:,.0f} for validation\n"
        f"           {describe_times(train['statistics']['times_text_is_seen'], config.dupe_factor)}\n"
        f"memory     {_bytes(worker_bytes)} per worker\n"
        f"disk       {_bytes(shard_bytes)} of shards, {_bytes(sample.scale * store_bytes)} of token store\n"
        f"time       {duration} on {workers} cores like this one ({core_seconds / 3600:.2f} core hours)"
    )


def _bytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def describe_times(times: float, copies: int) -> str:
    """Format the mean number of occurrences of a token of the text in an epoch.

    `copies` is `data.dupe_factor`. Input weights and overlapping next-sentence windows also change the number.
    """
    return f"an epoch contains each token of the text {times:.2f} times on average (data.dupe_factor is {copies})"


def _describe_masks(metrics: Mapping[str, Any]) -> str:
    if "masked_share" not in metrics:
        return "masks drawn in training"
    return (
        f"masked {metrics['masked_share']:.2%} (shown as [MASK] {metrics['masked_shown_as_mask_share']:.1%}, random "
        f"{metrics['masked_shown_as_random_share']:.1%}, original {metrics['masked_shown_as_original_share']:.1%})"
    )


def warn_of_repeated_sentences(text: Corpus) -> None:
    """Warn if many sentences of a sample are repetitions, such as the menus of web pages, which dominate training."""
    splitter = SentenceSplitter(text.sources[0].splitter, text.config.language)
    counts = Counter(splitter.split("\n".join(text.texts)))
    repeated = sum(count for count in counts.values() if count > FREQUENT)
    if repeated > 0.05 * counts.total():
        print(
            f"warning: {repeated / counts.total():.0%} of the sentences of a sample occur over {FREQUENT} times, most "
            f"often {counts.most_common(1)[0][0][:200]!r}\n  hint: remove them first (docs/cleaning.md)"
        )


def warn_of_unknown_tokens(
    corpus: Mapping[str, Any],
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    config: DataConfig,
) -> None:
    """If inputs have a large share of [UNK], warn of the one with the largest share, and count the other ones."""
    shares = [_share(counts["unk_tokens"], counts["tokens"]) for counts in corpus["inputs"]]
    share = max(shares)
    if share > MAX_UNK_SHARE:
        others = sum(each > MAX_UNK_SHARE for each in shares) - 1
        more = f" (and more than {MAX_UNK_SHARE:.0%} in {others:,} more inputs)" if others else ""
        worst = sources[shares.index(share)]
        hint = tokenizer.long_word_hint(Corpus((replace(worst, is_validation=False),), config).texts[:1])
        print(
            f"warning: {share:.0%} of the tokens of {worst.location} are [UNK]{more}\n"
            f"  hint: {hint or 'check that the vocabulary is for this language and casing'}"
        )


def check_documents(assignment: Assignment, sources: Sequence[Source]) -> None:
    """Raise InputError if too few documents remain without duplicates, for training or for validation."""
    config = assignment.config
    num_documents = assignment.store.num_documents
    needed = min_documents(config)
    for is_validation, first, end in (
        (False, 0, assignment.num_training),
        (True, assignment.num_training, num_documents),
    ):
        chosen = [source for source in sources if source.is_validation is is_validation]
        holds_out = needed > 1 and config.validation_fraction > 0 and len(chosen) == len(sources)
        minimum = needed
        if not is_validation and (holds_out or assignment.num_held_out):
            minimum = 2 * needed
        num_left_out = int(np.diff(np.searchsorted(assignment.left_out, (first, end)))[0])
        if not chosen or end - first - num_left_out >= minimum:
            continue
        name = "validation inputs" if is_validation else "inputs"
        where = ", ".join(source.location for source in chosen[:3]) + (" …" if len(chosen) > 3 else "")
        if end == first:
            raise InputError(f"the {name} contain no text", where=where, remedy="give files that contain text")
        remedies = ["give more documents"]
        if needed > 1:
            remedies += [finer_boundary(chosen), "--set data.next_sentence=sop, which needs no second document"]
        if num_left_out:
            remedies.append("keep duplicates with --set data.drop_duplicates=no")
        raise InputError(
            f"the {name} have {end - first} document(s), {num_left_out} of them duplicates, but the objective "
            f"{config.next_sentence} needs at least {minimum}",
            where=where,
            remedy="; or ".join(filter(None, remedies)),
        )


def warn_of_large_documents(assignment: Assignment, sources: Sequence[Source]) -> None:
    """Warn if there are few documents, or if they are so large that too much or nothing is held out."""
    fraction = assignment.config.validation_fraction
    inputs = [source for source in sources if not source.is_validation]
    problems = [few_documents(assignment.num_training)]
    hints = [finer_boundary(inputs)]
    if fraction and len(inputs) == len(sources):
        share = _share(assignment.tokens["validation"], sum(assignment.tokens.values()))
        if share > max(MAX_HELD_OUT_SHARE, 2 * fraction):
            problems.append(f"{share:.0%} of the text is held out for validation")
            hints.append("--set data.validation_fraction=0 holds out nothing")
        elif share == 0:
            problems.append("nothing is held out for validation")
        if len(problems) > 1:
            hints.append("--set 'data.validation=[FILE]' holds out another file")
    if any(problems):
        print(f"warning: {'; '.join(filter(None, problems))}\n  hint: {'; or '.join(filter(None, hints))}")


def check_splits(splits: Mapping[str, Mapping[str, Any]], corpus: Mapping[str, Any], assignment: Assignment) -> None:
    """Raise InputError for a split without examples, and warn if much of the text cannot be paired."""
    for name, split in splits.items():
        if split["rows"] == 0:
            raise InputError(
                f"the {name} split has no document of two sentences, so it gives no pair",
                where=f"{corpus['documents']:,} documents, {corpus['sentences']:,} sentences",
                remedy=SINGLE_SENTENCES_REMEDY,
            )
    if assignment.config.next_sentence == "none":
        return
    num_single = splits["train"]["statistics"]["drops"].get("single_sentence_spans", 0)
    num_documents = sum(
        counts["documents"] * copies for counts, copies in zip(corpus["inputs"], assignment.copies, strict=True)
    )
    median = corpus["median_sentences_per_document"]
    if median < 2 or num_single > 0.2 * num_documents:
        print(
            f"warning: many documents are a single sentence (median {median:g} sentences per document) and give no "
            f"pairs; {SINGLE_SENTENCES_REMEDY}"
        )
