"""Build a shard: cut its text into windows, form pairs, assemble and mask the examples, and write them.

A shard depends only on (store, configuration, seed, shard number), so shards can be built anywhere and in any order.
"""

import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from bert_pretrain import rng
from bert_pretrain.errors import DataError, InputError
from bert_pretrain.examples.masking import mask_examples
from bert_pretrain.examples.shards import ShardRecord, damage_of, write_shard
from bert_pretrain.io.files import read_json, remove_temporaries, write_checked_json, write_text
from bert_pretrain.make_data import pairs, summary
from bert_pretrain.make_data.plan import Plan, locate_slices, shard_slices
from bert_pretrain.make_data.token_store import ShardText

RECORDS = ".records"  # folder with the results of finished shards, until the output is complete
CLAIM = "claim"  # file in that folder: the fingerprint of the plan


def open_records(plan: Plan) -> None:
    """Create the output folders, remove temporary files of killed writers, and record the fingerprint of the plan.

    Results of another plan, for example from before a library was upgraded, and results without a claim are removed.
    """
    records = plan.output / RECORDS
    claim = records / CLAIM
    if records.exists() and not (claim.is_file() and claim.read_text(encoding="utf-8") == plan.fingerprint):
        shutil.rmtree(records)
    for name in (*plan.shards_per_copy, RECORDS):
        folder = plan.output / name
        folder.mkdir(parents=True, exist_ok=True)
        remove_temporaries(folder)
    write_text(claim, plan.fingerprint)


def shard_name(split: str, number: int) -> str:
    """Return the path of a shard in the data folder."""
    return f"{split}/{number:05d}.parquet"


def build_shard(plan: Plan, shard: tuple[str, int]) -> tuple[dict[str, Any], str | None]:
    """Build and write a shard, given as (split, number), unless it exists undamaged.

    Returns its JSON result, and a description of the damage of an earlier file, if any. The result has the shard's
    `record`, its `statistics`, and the `token_counts` of its text before masking.
    """
    split, number = shard
    file = plan.output / RECORDS / f"{split}-{number:05d}.json"
    damage = None
    if file.exists():
        try:
            result = read_json(file)
            damage = damage_of(plan.output, ShardRecord(**result["record"]), check_hash=True)
            if damage is None:
                return result, None
        except DataError:
            damage = "has a damaged record"
    result = _build(plan, split, number)
    write_checked_json(file, result)
    return result, damage


def _build(plan: Plan, split: str, number: int) -> dict[str, Any]:
    """Build and write a shard, and return its result. Raise DataError if another plan has claimed the output."""
    config = plan.config
    tokenizer = plan.tokenizer
    stream = partial(rng.stream, config.seed, split=split, shard=number)
    text = _read_text(plan, split, shard_slices(plan, split, number), stream)
    pairs_rng = stream("pairs")
    segments = _make_segments(plan, text, pairs_rng)
    shuffled = segments.take(pairs_rng.permutation(len(segments)))
    examples = pairs.assemble(shuffled, text, tokenizer)
    if config.masking == "static" or split == "validation":
        examples = mask_examples(examples, tokenizer, config, stream("mask"))
    # On a cluster, this task may still run after its command was killed and another command has claimed the output.
    if (plan.output / RECORDS / CLAIM).read_text(encoding="utf-8") != plan.fingerprint:
        raise DataError("another command writes to this output", where=str(plan.output), remedy="wait for that command")
    record = write_shard(plan.output, shard_name(split, number), examples)
    statistics = summary.measure(examples, tokenizer)
    if config.next_sentence != "none":
        has_window = pairs.slices_with_windows(text, plan.max_tokens)
        is_single = (text.num_slice_sentences > 0) & ~has_window  # one short sentence
        statistics["single_sentence_spans"] = int(is_single[: text.num_shard_slices].sum())
    counts = summary.pack_counts(examples, tokenizer)
    return {"record": asdict(record), "statistics": statistics, "token_counts": counts}


def _make_segments(plan: Plan, text: ShardText, pairs_rng: np.random.Generator) -> pairs.Segments:
    """Divide the text of a shard into the segments of its examples, by the rules of the objective."""
    config = plan.config
    if config.next_sentence == "none":
        return pairs.pack_sentences(text, config.max_seq_length)
    if config.next_sentence == "sop":
        windows = pairs.cut_at_sentences(text, plan.max_tokens, config.short_seq_prob, pairs_rng)
        return pairs.swap_segments(windows, pairs_rng)
    windows = pairs.cut_at_length(text, plan.max_tokens, config.short_seq_prob, pairs_rng)
    return pairs.exchange_segment_b(windows, text, plan.max_tokens, pairs_rng)


def _read_text(plan: Plan, split: str, slices: np.ndarray, stream: Callable[[str], np.random.Generator]) -> ShardText:
    """Read the text of a shard, given its slices as for `TokenStore.read`, (3, slices).

    Next-sentence pairs need windows of two documents. If all windows come from one document, the first slices of up to
    64 other random documents are read as donors, then of up to 4,096. Donors only provide Bs. Raises InputError if no
    donor gives a window.
    """
    look_ahead_tokens = plan.max_tokens + plan.max_tokens // 2
    num_documents = plan.num_documents(split)
    for num_donors in (0, 64, 4096):
        positions = np.arange(num_documents)
        if num_donors < num_documents:
            # The random stream depends on this name.
            positions = stream("lenders").integers(0, num_documents, num_donors)
        donors = locate_slices(plan, split, positions)
        is_usable = ~np.isin(donors[0], slices[0]) & ~plan.is_left_out(donors[0])
        donors = donors[:, is_usable]
        with_donors = np.concatenate([slices, donors], axis=1)
        text = plan.store.read(with_donors, look_ahead_tokens, donors.shape[1])
        documents = with_donors[0, pairs.slices_with_windows(text, plan.max_tokens)]
        if plan.config.next_sentence != "nsp" or len(np.unique(documents)) != 1:
            return text
    raise InputError(
        f"only one document of the {split} split seems to have two sentences, and a random B needs another one",
        where=f"{num_documents:,} documents",
        remedy=summary.SINGLE_SENTENCES_REMEDY,
    )
