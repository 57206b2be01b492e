"""Build a shard: cut its text into windows, form pairs, assemble and mask the examples, and write them.

A shard depends only on (store, configuration, seed, shard number), so shards can be built anywhere and in any order.
"""

from dataclasses import asdict
from typing import Any

import numpy as np

from bert_pretrain import rng
from bert_pretrain.errors import DataError, InputError
from bert_pretrain.examples.masking import mask_examples
from bert_pretrain.examples.shards import ShardRecord, damage_of, write_shard
from bert_pretrain.io.files import read_json, write_checked_json
from bert_pretrain.make_data import pairs, summary
from bert_pretrain.make_data.assignment import Assignment
from bert_pretrain.make_data.token_store import ShardText, Slices


def build_shard(assignment: Assignment, shard: tuple[str, int]) -> dict[str, Any]:
    """Build and write a shard, given as (split, number), unless it exists undamaged.

    Returns its JSON result: the shard's `record`, its `statistics`, and the `token_counts` of its text before masking.
    """
    split, number = shard
    file = assignment.records / f"{split}-{number:05d}.json"
    if file.exists():
        try:
            result = read_json(file)
            damage = damage_of(assignment.output, ShardRecord(**result["record"]), check_hash=True)
        except DataError:
            damage = "has a damaged record"
        if damage is None:
            return result
        print(f"{split}/{number:05d}.parquet {damage}; rebuilt")
    result = _build(assignment, split, number)
    write_checked_json(file, result)
    return result


def _build(assignment: Assignment, split: str, number: int) -> dict[str, Any]:
    """Build and write a shard, and return its result. Raise DataError if another command has claimed the output."""
    config = assignment.config
    tokenizer = assignment.tokenizer
    text = _read_text(assignment, split, number)
    pairs_rng = rng.stream(config.seed, "pairs", split=split, shard=number)
    segments = _make_segments(assignment, text, pairs_rng)
    shuffled = segments.take(pairs_rng.permutation(len(segments)))
    examples = pairs.assemble(shuffled, text, tokenizer)
    if config.masking == "static" or split == "validation":
        mask_rng = rng.stream(config.seed, "mask", split=split, shard=number)
        examples = mask_examples(examples, tokenizer, config, mask_rng)
    # On a cluster, this task may still run after its command was killed and another command has claimed the output.
    if not assignment.records.exists():
        output = str(assignment.output)
        raise DataError("another command writes to this output", where=output, remedy="wait for that command")
    record = write_shard(assignment.output, f"{split}/{number:05d}.parquet", examples)
    statistics = summary.measure(examples, tokenizer)
    if config.next_sentence != "none":
        has_window = pairs.slices_with_windows(text, assignment.max_tokens)
        is_single = (text.num_slice_sentences > 0) & ~has_window  # one short sentence
        statistics["single_sentence_spans"] = int(is_single[: text.num_shard_slices].sum())
    counts = summary.token_counts(examples, tokenizer)
    return {"record": asdict(record), "statistics": statistics, "token_counts": counts.tolist()}


def _make_segments(assignment: Assignment, text: ShardText, pairs_rng: np.random.Generator) -> pairs.Segments:
    """Divide the text of a shard into the segments of its examples, by the rules of the objective."""
    config = assignment.config
    max_tokens = assignment.max_tokens
    if config.next_sentence == "none":
        return pairs.pack_sentences(text, config.max_seq_length)
    if config.next_sentence == "sop":
        windows = pairs.cut_at_sentences(text, max_tokens, config.short_seq_prob, pairs_rng)
        return pairs.swap_segments(windows, pairs_rng)
    windows = pairs.cut_at_length(text, max_tokens, config.short_seq_prob, pairs_rng)
    return pairs.exchange_segment_b(windows, text, max_tokens, pairs_rng)


def _read_text(assignment: Assignment, split: str, number: int) -> ShardText:
    """Read the text of a shard.

    Next-sentence pairs need windows of two documents. If all windows come from one document, the first slices of up to
    64 other random documents are read as donors, then of up to 4,096. Donors only provide Bs. Raises InputError if no
    donor gives a window.
    """
    max_tokens = assignment.max_tokens
    own = assignment.shard_slices(split, number)
    num_documents = assignment.num_documents(split)
    for num_donors in (0, 64, 4096):
        positions = np.arange(num_documents)
        if num_donors < num_documents:
            # The random stream depends on this name.
            donor_rng = rng.stream(assignment.config.seed, "lenders", split=split, shard=number)
            positions = donor_rng.integers(0, num_documents, num_donors)
        donors = assignment.locate(split, positions)
        is_usable = ~np.isin(donors.document, own.document) & ~assignment.is_left_out(donors.document)
        donors = donors.take(is_usable)
        slices = Slices(*map(np.concatenate, zip(own, donors, strict=True)))
        text = assignment.store.read(slices, max_tokens + max_tokens // 2, len(donors.document))
        documents = text.documents[pairs.slices_with_windows(text, max_tokens)]
        if assignment.config.next_sentence != "nsp" or len(np.unique(documents)) != 1:
            return text
    raise InputError(
        f"only one document of the {split} split seems to have two sentences, and a random B needs another one",
        where=f"{num_documents:,} documents",
        remedy=summary.SINGLE_SENTENCES_REMEDY,
    )
