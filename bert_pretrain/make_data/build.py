"""Building a shard: cut its text, pair the windows, assemble examples, mask them, write them.

A shard is a pure function of (store, configuration, seed, shard number), so it may be built anywhere, in any order and
again.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from bert_pretrain import rng
from bert_pretrain.errors import DataError, InputError
from bert_pretrain.examples.masking import mask_examples
from bert_pretrain.examples.shards import ShardRecord, damage_of, write_shard
from bert_pretrain.io.files import read_json, remove_temporaries, write_checked_json, write_text
from bert_pretrain.make_data import summary
from bert_pretrain.make_data.pairs import (
    Segments,
    assemble,
    cut_windows,
    pack_sentences,
    shuffle_segment_b,
    slices_with_windows,
    swap_segments,
)
from bert_pretrain.make_data.plan import Plan, SplitPlan, locate_slices, shard_slices
from bert_pretrain.make_data.summary import ShardResult
from bert_pretrain.make_data.token_store import DocumentSlices, ShardText

RECORDS = ".records"
"""The folder of what is known about finished shards, in an output that is not complete."""
CLAIM = "claim"
Stream = Callable[[str], np.random.Generator]
"""Random numbers of a shard, by purpose."""
DONORS = (0, 64, 4096)
"""How many slices of other shards are read, one after the other, where a shard's text is of a single document."""
SINGLE_SENTENCES_REMEDY = (
    "--set data.next_sentence=none, if each document is one sentence or sequence; or "
    "--set data.document_boundary=file, if lines or blank lines separate the sentences of one document (with few "
    "files also --set data.next_sentence=sop)"
)


def open_records(plan: Plan) -> None:
    """Prepare an output for its shards: folders, without leftovers of killed writers, and the claim of this plan."""
    for folder in (*(plan.output / split.name for split in plan.splits), plan.output / RECORDS):
        folder.mkdir(parents=True, exist_ok=True)
        remove_temporaries(folder)
    write_text(plan.output / RECORDS / CLAIM, plan.claim)


def shard_name(split: SplitPlan, number: int) -> str:
    """Return the file of a shard, relative to the data folder."""
    return f"{split.name}/{number:05d}.parquet"


def build_shard(plan: Plan, shard: tuple[SplitPlan, int]) -> tuple[ShardResult, str | None]:
    """Build and write one shard, unless it is there undamaged; returns what is known of it, and any damage found."""
    split, number = shard
    file = plan.output / RECORDS / f"{split.name}-{number:05d}.json"
    damage = None
    if file.exists():
        try:
            known: ShardResult = read_json(file)
            damage = damage_of(plan.output, ShardRecord(**known["record"]), whole=True)
            if damage is None:
                return known, None
        except DataError:
            damage = "has a damaged record"
    result = _build(plan, split, number)
    write_checked_json(file, result)
    return result, damage


def _build(plan: Plan, split: SplitPlan, number: int) -> ShardResult:
    config, tokenizer = plan.config, plan.tokenizer
    stream = partial(rng.stream, config.seed, split=split.name, shard=number)
    pairs = stream("pairs")
    text = _read_text(plan, split, shard_slices(plan, split, number), stream)
    segments = _make_segments(plan, text, pairs)
    examples = assemble(segments.take(pairs.permutation(len(segments))), text, tokenizer)
    if config.masking == "static" or split.name == "validation":
        examples = mask_examples(examples, tokenizer, config, stream("mask"))
    _check_claim(plan)
    record = write_shard(plan.output, shard_name(split, number), examples)
    drops = {}
    if config.next_sentence != "none":
        is_single = (text.slice_own_sentences > 0) & ~slices_with_windows(text, plan.max_tokens)
        drops["single_sentence_spans"] = int(is_single.sum())
    statistics = summary.measure(examples, tokenizer)
    counts = summary.pack_counts(examples, tokenizer)
    return {"record": record.as_json(), "statistics": statistics, "drops": drops, "token_counts": counts}


def _make_segments(plan: Plan, text: ShardText, rng: np.random.Generator) -> Segments:
    """Cut text into segments and pair them as the objective says."""
    config, max_tokens = plan.config, plan.max_tokens
    if config.next_sentence == "none":
        return pack_sentences(text, config.max_seq_length)
    is_sop = config.next_sentence == "sop"
    windows = cut_windows(text, max_tokens, config.short_seq_prob, rng, at_sentences=is_sop)
    return swap_segments(windows, rng) if is_sop else shuffle_segment_b(windows, text, max_tokens, rng)


def _check_claim(plan: Plan) -> None:
    """Write nothing into a folder that meanwhile belongs to another command.

    The command that sent this task may be dead, its folder moved aside, and the task still run on a cluster.
    """
    if (plan.output / RECORDS / CLAIM).read_text() != plan.claim:
        raise DataError("the output was claimed by another command", where=str(plan.output), remedy="let that one work")


def _read_text(plan: Plan, split: SplitPlan, own: DocumentSlices, stream: Stream) -> ShardText:
    """Read a shard's text; for next-sentence pairs with donors, where all windows would come from one document."""
    for num_donors in DONORS:
        donors = _donors(plan, split, own, stream, num_donors)
        slices = DocumentSlices._make(np.concatenate(columns) for columns in zip(own, donors, strict=True))
        look_ahead_tokens = plan.max_tokens + plan.max_tokens // 2
        text = plan.store.read(slices, look_ahead_tokens, len(donors.documents))
        of_windows = slices.documents[slices_with_windows(text, plan.max_tokens)]
        if plan.config.next_sentence != "nsp" or len(np.unique(of_windows)) != 1:
            return text
    raise InputError(
        f"only one document of the {split.name} split has two sentences, so there is no other to take a random B from",
        where=f"{split.num_documents:,} documents",
        remedy=SINGLE_SENTENCES_REMEDY,
    )


def _donors(plan: Plan, split: SplitPlan, own: DocumentSlices, stream: Stream, number: int) -> DocumentSlices:
    """Return slices of documents that are not the shard's own, of `number` that are drawn at most."""
    num_documents = split.num_documents
    if number and num_documents <= number:
        positions = np.arange(num_documents)
    else:
        positions = stream("lenders").integers(0, num_documents, number)
    donors = locate_slices(plan, split, positions)
    is_other = ~np.isin(donors.documents, own.documents) & ~plan.is_left_out(donors.documents)
    return donors.take(is_other)
