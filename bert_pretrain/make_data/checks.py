"""What makes a corpus unfit for its objective, told before or instead of a data folder without worth."""

from typing import Any

import numpy as np

from bert_pretrain.config import DataConfig
from bert_pretrain.errors import InputError
from bert_pretrain.make_data import build
from bert_pretrain.make_data.plan import BuildPlan, documents_needed
from bert_pretrain.sources import Source


def check_corpus(corpus: dict[str, Any], config: DataConfig, sources: list[Source]) -> None:
    """Refuse a corpus without text, or one from which no honest next-sentence pairs can be made.

    Raises:
        InputError: with the remedy.
    """
    where = ", ".join(source.location for source in sources[:3]) + (" …" if len(sources) > 3 else "")
    if corpus["tokens"] == 0:
        raise InputError("the inputs hold no text", where=where, remedy="give files with text in them")
    per_split = documents_needed(config)
    needed = 2 * per_split if config.validation_fraction else per_split
    if corpus["documents"] >= needed:
        return
    if config.next_sentence != "nsp":
        print("the inputs hold a single document, so nothing is held out for validation")
        return
    raise InputError(
        f"the inputs hold {corpus['documents']} document(s); next-sentence prediction takes a random B from "
        f"another document and needs at least {needed}",
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
