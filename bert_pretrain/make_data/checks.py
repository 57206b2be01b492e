"""What makes a corpus unfit for its objective, told before or instead of a data folder without worth."""

from typing import Any

import numpy as np

from bert_pretrain.config import DataConfig
from bert_pretrain.errors import InputError
from bert_pretrain.make_data import build
from bert_pretrain.make_data.plan import BuildPlan, documents_needed
from bert_pretrain.sources import Source

MOST_UNK = 0.05
"""The share of [UNK] among an input's tokens above which something is likely wrong."""


def check_corpus(corpus: dict[str, Any], config: DataConfig, sources: list[Source]) -> None:
    """Refuse a corpus without text, or one from which no honest next-sentence pairs can be made.

    Raises:
        InputError: with the remedy.
    """
    where = ", ".join(source.location for source in sources[:3]) + (" …" if len(sources) > 3 else "")
    if corpus["tokens"] == 0:
        raise InputError("the inputs hold no text", where=where, remedy="give files with text in them")
    for source, figures in zip(sources, corpus["inputs"], strict=True):
        if figures["unk_tokens"] > MOST_UNK * figures["tokens"]:
            share = figures["unk_tokens"] / figures["tokens"]
            print(
                f"warning: {share:.0%} of the tokens of {source.location} are [UNK]; is the vocabulary made for this "
                "language and casing?"
            )
    needed = documents_needed(config)
    documents = [figures["documents"] for figures in corpus["inputs"]]
    held_out = sum(number for number, source in zip(documents, sources, strict=True) if source.is_validation)
    if config.validation and held_out < needed:
        raise _too_few(held_out, "inputs held out for validation", needed, where)
    if config.validation_fraction and not config.validation:
        needed *= 2
    if sum(documents) - held_out >= needed:
        return
    if config.next_sentence != "nsp":
        print("the inputs hold a single document, so nothing is held out for validation")
        return
    raise _too_few(sum(documents) - held_out, "inputs", needed, where)


def _too_few(number: int, of: str, needed: int, where: str) -> InputError:
    return InputError(
        f"the {of} hold {number} document(s); next-sentence prediction takes a random B from another document and "
        f"needs at least {needed}",
        where=where,
        remedy="put a blank line between documents and set data.document_boundary=blank_line, give each document a "
        "file of its own, or choose data.next_sentence=sop or none",
    )


def check_left_out(plan: BuildPlan, left_out: dict[str, int]) -> None:
    """Refuse a corpus of which too little is left without duplicates.

    Raises:
        InputError: with how many are left out, by reason.
    """
    for ordered in {split.ordered for split in plan.splits}:
        names = [split.name for split in plan.splits if split.ordered == ordered]
        needed = documents_needed(plan.config) * len(names)
        gone = np.diff(np.searchsorted(plan.selection.left_out, (ordered.start, ordered.stop))).item()
        if gone and len(ordered) - gone < needed:
            reasons = ", ".join(f"{count:,} {reason.replace('_', ' ')}" for reason, count in sorted(left_out.items()))
            raise InputError(
                f"without duplicates {len(ordered) - gone} of {len(ordered):,} documents are left for "
                f"{' and '.join(names)}, which need at least {needed}",
                where=reasons,
                remedy="give other text, or keep duplicates with data.drop_duplicates=no",
            )


def check_splits(splits: dict[str, Any], corpus: dict[str, Any], plan: BuildPlan) -> None:
    """Refuse splits without examples, and warn when much of the text cannot be paired.

    Raises:
        InputError: when a split holds no example because its documents are single sentences.
    """
    for name, split in splits.items():
        if split["rows"] == 0:
            raise InputError(
                f"the {name} split has no document of two sentences, so no pair can be made",
                where=f"{corpus['documents']:,} documents, {corpus['sentences']:,} sentences",
                remedy=build.SINGLE_SENTENCES_REMEDY,
            )
    if plan.config.next_sentence == "none":
        return
    single = splits["train"]["statistics"]["drops"].get("single_sentence_spans", 0)
    share = single / (corpus["documents"] * plan.config.dupe_factor)
    if corpus["median_sentences_per_document"] < 2 or share > 0.2:
        print(
            f"warning: many documents are a single sentence (median {corpus['median_sentences_per_document']:g} "
            f"sentences a document) and give no pairs; {build.SINGLE_SENTENCES_REMEDY}"
        )
