"""Statistics of the text and the examples, and the errors and warnings that follow from them.

Statistics of the text are counted by byte range, when it is tokenized. Statistics of the examples are counted in the
finished shards, so that they can be compared with the configuration. Each shard reports sums; the manifest has shares.
"""

import base64
import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bert_pretrain.config import DataConfig, duration_text
from bert_pretrain.errors import InputError
from bert_pretrain.examples.examples import UNSEEN_COUNT, Examples
from bert_pretrain.make_data.plan import MAX_HELD_OUT_SHARE, Plan, held_out_share, make_plan, min_documents
from bert_pretrain.make_data.token_store import TokenStore
from bert_pretrain.text.corpus import Corpus, Sample
from bert_pretrain.text.sources import Source, few_documents, finer_boundary
from bert_pretrain.text.text_files import describe_reasons, join_reasons
from bert_pretrain.text.tokenizer import MAX_UNK_SHARE, Tokenizer

LABEL_SHARES = {"nsp": "is_next_share", "sop": "in_order_share"}  # names of the share of label 0, by objective
TEXT_COUNTS = ("documents", "sentences", "tokens", "unk_tokens")  # counts of each input and each byte range
FREQUENT = 10  # a sentence that occurs more often counts as repeated
SINGLE_SENTENCES_REMEDY = (
    "--set data.next_sentence=none, if each document is one sentence or sequence; or "
    "--set data.document_boundary=file (for records --set data.sentence_splitter=lines), if lines or blank lines "
    "separate the sentences of one document (with few files also --set data.next_sentence=sop)"
)


def measure(examples: Examples, tokenizer: Tokenizer) -> dict[str, int]:
    """Return sums over the examples of a shard. Sums of labels or masks are absent if the examples have none."""
    ids = examples.input_ids
    sums = {
        "examples": len(examples),
        "tokens": len(ids),
        "unk_tokens": int((ids == tokenizer.unk_id).sum()),
        "maskable_tokens": int(((ids != tokenizer.cls_id) & (ids != tokenizer.sep_id)).sum()),
    }
    if examples.next_sentence_label is not None:
        sums["label_0"] = int((examples.next_sentence_label == 0).sum())
    if examples.masks is not None:
        originals, shown = examples.masks.original_ids, ids[examples.masked_indices]
        is_mask, is_kept = shown == tokenizer.mask_id, shown == originals
        sums["masked_tokens"] = len(shown)
        sums["shown_as_mask"] = int(is_mask.sum())
        sums["shown_as_original"] = int((is_kept & ~is_mask).sum())
        sums["shown_as_random"] = int((~is_kept & ~is_mask).sum())
        # [UNK] is counted before masking.
        sums["unk_tokens"] += int((originals == tokenizer.unk_id).sum()) - int((shown == tokenizer.unk_id).sum())
    return sums


def pack_counts(examples: Examples, tokenizer: Tokenizer) -> str:
    """Return the count of each token before masking, as text for JSON."""
    counts = np.bincount(examples.original_ids, minlength=tokenizer.vocab_size)
    counts[[tokenizer.cls_id, tokenizer.sep_id]] = 0
    return base64.b64encode(zlib.compress(counts.astype("<u4").tobytes())).decode()


def unpack_counts(packed: str) -> np.ndarray:
    """Return the counts from `pack_counts`, (vocab_size,)."""
    return np.frombuffer(zlib.decompress(base64.b64decode(packed)), dtype="<u4").astype(np.int64)


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


def join_corpus(
    parts_of_inputs: Sequence[Sequence[dict[str, int]]], store_shards: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the manifest entry `corpus`, from the counts of each input's byte ranges and the shard summaries."""
    inputs = [{name: sum(part[name] for part in parts) for name in TEXT_COUNTS} for parts in parts_of_inputs]
    sums = {name: sum(each[name] for each in inputs) for name in TEXT_COUNTS}
    sentences: Counter[int] = Counter()
    reasons: Counter[str] = Counter()
    repeated: Counter[str] = Counter()
    for summary in store_shards:
        repeated.update(dict(summary["repeated"]))
        sentences.update(dict(summary["sentences_a_document"]))
        reasons.update(summary["repairs_and_drops"])
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
        "repeated_sentences": {
            "share": _share(sum(count for count in repeated.values() if count > FREQUENT), sums["sentences"]),
            "commonest": repeated.most_common(1)[0][0] if repeated else None,
        },
        "inputs": inputs,
        "left_out": {},
    }


def _share(part: float, total: float) -> float:
    return part / total if total else 0.0


def describe(manifest: Mapping[str, Any]) -> str:
    """Return the statistics of a manifest as aligned lines for the terminal."""
    lines, corpus, copies = [], manifest["corpus"], manifest["config"]["data"]["dupe_factor"]
    for name, split in manifest["splits"].items():
        statistics = split["statistics"]
        shares = [
            f"{share.removesuffix('_share').replace('_', '-')} {statistics[share]:.2%}"
            for share in LABEL_SHARES.values()
            if share in statistics
        ]
        shares += [_describe_masks(statistics), f"[UNK] {statistics['unk_share']:.3%}"]
        notes = [" · ".join([*shares, f"padding saved {statistics['padding_share_at_max_seq_length']:.1%}"])]
        if name == "train":
            notes.append(describe_times(statistics["times_text_is_seen"], copies))
        if single := statistics["drops"].get("single_sentence_spans"):
            notes.append(f"left out: {single:,} documents or ends of documents with one sentence, which give no pair")
        lines.append(
            f"{name:<11}{split['rows']:>12,} examples in {len(split['shards'])} shards, {split['tokens']:,} tokens, "
            f"{statistics['mean_length_tokens']:.1f} per example"
        )
        lines += [f"{'':<11}{note}" for note in notes]
    left_out = {f"{name}, left out": count for name, count in corpus["left_out"].items()}
    lines += [f"{'corpus':<11}{line}" for line in describe_reasons(corpus["repairs_and_drops"] | left_out)]
    return "\n".join(lines)


def describe_corpus(corpus: Mapping[str, Any], sources: Sequence[Source], store: Path) -> str:
    """Return the numbers of documents, sentences and tokens, the layouts, and the place and size of the store."""
    size = sum(file.stat().st_size for file in store.rglob("*.npy"))
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
        f"[UNK] {corpus['unk_share']:.3%}\n{'; '.join(described)}\ntoken store: {store} ({size / 1e6:.1f} MB)"
    )


def describe_estimate(
    config: DataConfig,
    sample: Sample,
    corpus: Mapping[str, Any],
    splits: Mapping[str, Any],
    store_bytes: int,
    seconds: float,
    workers: int,
    documents: int | None,
) -> str:
    """Return the expected output of a run as aligned lines, from the output for a sample of the text.

    `seconds` is the CPU time for the sample. `documents` is the number of documents, if it is known.
    """
    scale = sample.scale
    totals = {"documents": 0.0, "tokens": 0.0}
    for source, counts in zip(sample.corpus.sources, corpus["inputs"], strict=True):
        for name in totals:
            totals[name] += counts[name] * (sample.validation_scale if source.is_validation else scale)
    train = splits["train"]
    held_out = splits.get("validation", {"rows": 0})["rows"] * sample.validation_scale
    if config.validation_fraction and not any(source.is_validation for source in sample.corpus.sources):
        held_out *= held_out_share(config, totals["tokens"]) / held_out_share(config, corpus["tokens"])
    shard_bytes = scale * sum(shard["bytes"] for shard in train["shards"])
    rows_per_shard = min(config.examples_per_shard, scale * train["rows"])
    shard_tokens = rows_per_shard * train["statistics"]["mean_length_tokens"]
    worker_bytes = max(230 << 20, (150 << 20) + 37 * shard_tokens)  # measured: tokenizing, building a shard
    core_seconds = scale * seconds
    duration = duration_text(float(math.ceil(2.0 + core_seconds / workers)))  # 2 seconds to start
    return (
        "dry run: estimated from a sample, nothing is written\n"
        f"corpus     {documents or totals['documents']:,.0f} documents, {totals['tokens']:,.0f} tokens\n"
        f"training   {scale * train['rows']:,.0f} examples; {held_out:,.0f} for validation\n"
        f"           {describe_times(train['statistics']['times_text_is_seen'], config.dupe_factor)}\n"
        f"memory     {_bytes(worker_bytes)} per worker\n"
        f"disk       {_bytes(shard_bytes)} of shards, {_bytes(scale * store_bytes)} of token store\n"
        f"time       {duration} on {workers} cores like this one ({core_seconds / 3600:.2f} core hours)"
    )


def _bytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def describe_times(times: float, copies: int) -> str:
    """Format the mean number of occurrences of a token of the text in an epoch.

    `copies` is `data.dupe_factor`. Input weights and overlapping next-sentence windows also change the number.
    """
    return f"an epoch contains each token of the text {times:.2f} times on average (data.dupe_factor is {copies})"


def _describe_masks(metrics: dict[str, Any]) -> str:
    if "masked_share" not in metrics:
        return "masks drawn in training"
    return (
        f"masked {metrics['masked_share']:.2%} (shown as [MASK] {metrics['masked_shown_as_mask_share']:.1%}, random "
        f"{metrics['masked_shown_as_random_share']:.1%}, original {metrics['masked_shown_as_original_share']:.1%})"
    )


def warn_of_repeated_sentences(corpus: Mapping[str, Any]) -> None:
    """Warn if many sentences are repetitions, such as the menus of web pages, which would dominate training.

    The share is approximate and usually too low: each store shard reports only its most frequent sentences. Sentences
    are compared by their first 200 characters.
    """
    share, commonest = corpus["repeated_sentences"].values()
    if share > 0.05:
        print(
            f"warning: at least {share:.0%} of the sentences occur over {FREQUENT} times, most often {commonest!r}\n"
            "  hint: remove them first (docs/cleaning.md)"
        )


def warn_of_unknown_tokens(
    corpus: dict[str, Any], sources: Sequence[Source], tokenizer: Tokenizer, config: DataConfig
) -> None:
    """If inputs have a large share of [UNK], warn of the one with the largest share, and count the other ones."""
    shares = [counts["unk_tokens"] / max(1, counts["tokens"]) for counts in corpus["inputs"]]
    if (share := max(shares)) > MAX_UNK_SHARE:
        others = sum(each > MAX_UNK_SHARE for each in shares) - 1
        more = f" (and more than {MAX_UNK_SHARE:.0%} in {others:,} more inputs)" if others else ""
        worst = sources[shares.index(share)]
        hint = tokenizer.long_word_hint(Corpus((replace(worst, is_validation=False),), config).texts[:1])
        print(
            f"warning: {share:.0%} of the tokens of {worst.location} are [UNK]{more}\n"
            f"  hint: {hint or 'check that the vocabulary is for this language and casing'}"
        )


def checked_plan(
    store: TokenStore,
    corpus: dict[str, Any],
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    output: Path,
    config: DataConfig,
) -> Plan:
    """Plan the shards, and set `corpus["left_out"]`.

    Raises InputError if there are too few documents, before or after duplicates are left out.
    """
    _check_documents([counts["documents"] for counts in corpus["inputs"]], config, sources)
    plan, corpus["left_out"] = make_plan(store, corpus["inputs"], sources, tokenizer, output, config)
    _check_left_out(plan, corpus["left_out"])
    return plan


def _check_documents(documents: Sequence[int], config: DataConfig, sources: Sequence[Source]) -> None:
    """Raise InputError if there are too few documents, given the number of documents of each source."""
    for is_validation in (False, True) if config.validation else (False,):
        chosen = [source for source in sources if source.is_validation is is_validation]
        num = sum(n for n, source in zip(documents, sources, strict=True) if source.is_validation is is_validation)
        name = "validation inputs" if is_validation else "inputs"
        where = ", ".join(source.location for source in chosen[:3]) + (" …" if len(chosen) > 3 else "")
        if num == 0:
            raise InputError(f"the {name} contain no text", where=where, remedy="give files that contain text")
        needed = min_documents(config) * (2 if config.validation_fraction and not config.validation else 1)
        if num < needed and config.next_sentence == "nsp":
            finer = finer_boundary(chosen)
            what = f"the {name} have {num} document(s); next-sentence prediction takes a random B from another "
            what += f"document and needs at least {needed}"
            remedy = "--set data.next_sentence=sop, which takes both segments from one document; or give more "
            remedy += f"documents{finer and f'; or {finer}'}"
            raise InputError(what, where=where, remedy=remedy)


def _check_left_out(plan: Plan, left_out: Mapping[str, int]) -> None:
    """Raise InputError if too few documents remain without duplicates."""
    ends = {"training": (0, plan.num_training), "validation": (plan.num_training, plan.store.num_documents)}
    needed = min_documents(plan.config) * (2 if plan.num_held_out else 1)
    for name, (start, end) in ends.items():
        num_left_out = int(np.diff(np.searchsorted(plan.left_out, (start, end)))[0])
        remaining = end - start - num_left_out
        if num_left_out and remaining < needed:
            what = f"without duplicates, {remaining} of {end - start:,} documents remain for {name}, but at least "
            what += f"{needed} are needed"
            remedy = "give other text, or keep duplicates with --set data.drop_duplicates=no"
            raise InputError(what, where=", ".join(describe_reasons(left_out)), remedy=remedy)


def warn_of_large_documents(plan: Plan, corpus: dict[str, Any], sources: Sequence[Source]) -> None:
    """Warn if there are few documents, or if they are so large that too much or nothing is held out."""
    inputs = [source for source in sources if not source.is_validation]
    num_documents = sum(counts["documents"] for counts in corpus["inputs"][: len(inputs)])  # training inputs come first
    problems, hints = [few_documents(num_documents)], [finer_boundary(inputs)]
    other_text = "--set 'data.validation=[FILE]' holds out another file"
    if plan.config.validation_fraction and len(inputs) == len(sources):
        if plan.held_out_share > max(MAX_HELD_OUT_SHARE, 2 * plan.config.validation_fraction):
            problems.append(f"{plan.held_out_share:.0%} of the text is held out for validation")
            hints.append(f"{other_text}, --set data.validation_fraction=0 holds out nothing")
        elif plan.num_documents("validation") == 0:
            problems.append("nothing is held out for validation")
            hints.append(other_text)
    if any(problems):
        print(f"warning: {'; '.join(filter(None, problems))}\n  hint: {'; or '.join(filter(None, hints))}")


def check_splits(splits: Mapping[str, dict[str, Any]], corpus: dict[str, Any], plan: Plan) -> None:
    """Raise InputError for a split without examples, and warn if much of the text cannot be paired."""
    for name, split in splits.items():
        if split["rows"] == 0:
            what = f"the {name} split has no document of two sentences, so it gives no pair"
            where = f"{corpus['documents']:,} documents, {corpus['sentences']:,} sentences"
            raise InputError(what, where=where, remedy=SINGLE_SENTENCES_REMEDY)
    single = splits["train"]["statistics"]["drops"].get("single_sentence_spans", 0)
    used = sum(each["documents"] * copies for each, copies in zip(corpus["inputs"], plan.copies, strict=True))
    warn_of_single_sentences(single / used, corpus, plan.config)


def warn_of_single_sentences(share: float, corpus: dict[str, Any], config: DataConfig) -> None:
    """Warn if many documents, or ends of documents, are a single sentence, which cannot be paired.

    `share` is the number of such spans per document.
    """
    if config.next_sentence == "none":
        return
    if corpus["median_sentences_per_document"] < 2 or share > 0.2:
        print(
            f"warning: many documents are a single sentence (median {corpus['median_sentences_per_document']:g} "
            f"sentences per document) and give no pairs; {SINGLE_SENTENCES_REMEDY}"
        )
