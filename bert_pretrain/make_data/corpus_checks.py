"""Checks whether a corpus allows its objective, before or instead of writing a useless data folder."""

from collections.abc import Mapping, Sequence

import numpy as np

from bert_pretrain.config import DataConfig
from bert_pretrain.errors import InputError
from bert_pretrain.make_data import build
from bert_pretrain.make_data.plan import MAX_HELD_OUT_SHARE, Plan, documents_needed
from bert_pretrain.make_data.summary import CorpusStatistics, SplitStatistics
from bert_pretrain.text.sources import Source, few_documents, finer_boundary
from bert_pretrain.text.tokenizer import MAX_UNK_SHARE

_OTHER_TEXT = "--set 'data.validation=[FILE]' holds out another file"


def check_corpus(corpus: CorpusStatistics, config: DataConfig, sources: list[Source]) -> None:
    """Refuse a corpus without text, or with too few documents for random Bs from other documents."""
    if corpus["tokens"] == 0:
        raise InputError("the inputs hold no text", where=_names(sources), remedy="give files with text in them")
    warn_of_unknown_tokens(corpus, sources)
    check_documents([counts["documents"] for counts in corpus["inputs"]], config, sources)


def warn_of_unknown_tokens(corpus: CorpusStatistics, sources: Sequence[Source]) -> None:
    """Warn of inputs of which much is [UNK]."""
    for source, counts in zip(sources, corpus["inputs"], strict=True):
        if counts["unk_tokens"] > MAX_UNK_SHARE * counts["tokens"]:
            share = counts["unk_tokens"] / counts["tokens"]
            print(
                f"warning: {share:.0%} of the tokens of {source.location} are [UNK]; is the vocabulary made for this "
                "language and casing?"
            )


def check_documents(documents: Sequence[int], config: DataConfig, sources: Sequence[Source]) -> None:
    """Refuse inputs with too few documents, given the number of each."""
    needed, training = documents_needed(config), [source for source in sources if not source.is_validation]
    held_out = sum(number for number, source in zip(documents, sources, strict=True) if source.is_validation)
    if sum(documents) == held_out:
        raise InputError(
            "the inputs hold no text to train on", where=_names(training), remedy="give files with text in them"
        )
    if config.validation and held_out < needed:
        held_out_sources = [source for source in sources if source.is_validation]
        raise _too_few(held_out, "inputs held out for validation", needed, held_out_sources)
    if config.validation_fraction and not config.validation:
        needed *= 2
    if sum(documents) - held_out < needed and config.next_sentence == "nsp":
        raise _too_few(sum(documents) - held_out, "inputs", needed, training)


def warn_of_large_documents(plan: Plan, corpus: CorpusStatistics, sources: Sequence[Source]) -> None:
    """Warn where documents are so few or large that much of the text is held out, with what divides it further."""
    inputs = [
        (counts, source) for counts, source in zip(corpus["inputs"], sources, strict=True) if not source.is_validation
    ]
    number, tokens = (sum(counts[name] for counts, _ in inputs) for name in ("documents", "tokens"))
    shares = [(counts["tokens"] / max(1, tokens), source) for counts, source in inputs if counts["documents"] == 1]
    large = [(share, source) for share, source in shares if share > MAX_HELD_OUT_SHARE]
    found = [f"{source.location} is one document, {share:.0%} of the text" for share, source in large[:1]]
    if few := few_documents(number):
        found = [few]
    # Only what is too large is divided; other inputs stay as they are.
    remedies = [finer_boundary([source for _, source in large or inputs])]
    if plan.config.validation_fraction and not plan.config.validation and len(inputs) == len(sources):
        count = sum(split.num_documents for split in plan.splits if split.name == "validation")
        if plan.held_out_share > max(MAX_HELD_OUT_SHARE, 2 * plan.config.validation_fraction):
            found.append(f"{count:,} documents, {plan.held_out_share:.0%} of the text, are held out for validation")
            remedies.append(f"{_OTHER_TEXT}, --set data.validation_fraction=0 nothing")
        elif count == 0:
            found.append("nothing is held out for validation")
            remedies.append(_OTHER_TEXT)
    if found:
        print(f"warning: {'; '.join(found)}\n  hint: {'; or '.join(filter(None, remedies))}")


def _names(sources: Sequence[Source]) -> str:
    return ", ".join(source.location for source in sources[:3]) + (" …" if len(sources) > 3 else "")


def _too_few(number: int, of: str, needed: int, sources: Sequence[Source]) -> InputError:
    finer = finer_boundary(sources)
    return InputError(
        f"the {of} hold {number} document(s); next-sentence prediction takes a random B from another document and "
        f"needs at least {needed}",
        where=_names(sources),
        remedy="--set data.next_sentence=sop, which takes both sentences from one document"
        + (f"; or {finer}" if finer else "; or give more documents"),
    )


def check_left_out(plan: Plan, left_out: dict[str, int]) -> None:
    """Refuse a corpus of which too little is left without duplicates."""
    for numbers in {split.numbers for split in plan.splits}:
        names = [split.name for split in plan.splits if split.numbers == numbers]
        needed = documents_needed(plan.config) * len(names)
        gone = np.diff(np.searchsorted(plan.left_out, (numbers.start, numbers.stop))).item()
        if gone and len(numbers) - gone < needed:
            reasons = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in sorted(left_out.items()))
            raise InputError(
                f"without duplicates {len(numbers) - gone} of {len(numbers):,} documents are left for "
                f"{' and '.join(names)}, which need at least {needed}",
                where=reasons,
                remedy="give other text, or keep duplicates with data.drop_duplicates=no",
            )


def check_splits(splits: Mapping[str, SplitStatistics], corpus: CorpusStatistics, plan: Plan) -> None:
    """Refuse splits without examples, and warn when much of the text cannot be paired."""
    for name, split in splits.items():
        if split["rows"] == 0:
            raise InputError(
                f"the {name} split has no document of two sentences, so no pair can be made",
                where=f"{corpus['documents']:,} documents, {corpus['sentences']:,} sentences",
                remedy=build.SINGLE_SENTENCES_REMEDY,
            )
    single = splits["train"]["statistics"]["drops"].get("single_sentence_spans", 0)
    warn_of_single_sentences(single, corpus, plan.config)


def warn_of_single_sentences(single: int, corpus: CorpusStatistics, config: DataConfig) -> None:
    """Warn when much of the text is spans of a single sentence, which cannot be paired."""
    if config.next_sentence == "none":
        return
    share = single / (corpus["documents"] * config.dupe_factor)
    if corpus["median_sentences_per_document"] < 2 or share > 0.2:
        print(
            f"warning: many documents are a single sentence (median {corpus['median_sentences_per_document']:g} "
            f"sentences per document) and give no pairs; {build.SINGLE_SENTENCES_REMEDY}"
        )
