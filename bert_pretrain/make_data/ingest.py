"""Raw text to the token store: the inputs in byte ranges, each group of them one store shard, on all workers."""

import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path

from bert_pretrain.config import DataConfig
from bert_pretrain.errors import InputError
from bert_pretrain.io.files import damage_of_folder, is_url, read_json, remove_temporaries
from bert_pretrain.io.manifest import exclusive
from bert_pretrain.io.pool import Pool, run_each
from bert_pretrain.make_data import segmenter, summary
from bert_pretrain.make_data.parts import cut_inputs, ensure_unpacked, remove_unpacked
from bert_pretrain.make_data.store_writer import SUMMARY, write_store_shard
from bert_pretrain.make_data.summary import CorpusStatistics, StoreShardSummary
from bert_pretrain.make_data.token_store import TokenStore, store_key, store_shard_folder
from bert_pretrain.text import documents
from bert_pretrain.text.sources import Source
from bert_pretrain.text.text_files import ByteRange
from bert_pretrain.text.tokenizer import Tokenizer


def ingest(
    sources: list[Source], tokenizer: Tokenizer, config: DataConfig, stores: Path, pool: Pool
) -> tuple[CorpusStatistics, TokenStore]:
    """Fill the token store; returns the statistics of the corpus, and the store."""
    if config.word_segmenter is not None:
        segmenter.jieba()  # before its version is asked for
    folder = stores.absolute() / store_key(sources, tokenizer, config)
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder, waits=True):  # for another command with these inputs, whose store serves this one too
        remove_temporaries(folder)
        groups = cut_inputs([source.absolute for source in sources], folder, pool)
        tasks = [(parts, store_shard_folder(folder, number), tokenizer, config) for number, parts in enumerate(groups)]
        progress = documents.progress_of(groups)
        try:
            results = list(run_each(_run, tasks, workers=pool, description="tokenise", **progress))
        except InputError:  # the same command would be refused again
            remove_unpacked(itertools.chain.from_iterable(groups))
            raise
        remove_temporaries(folder)  # of workers that were killed while this process was not
        remove_unpacked(itertools.chain.from_iterable(groups))
    try:
        for source in sources:
            if not is_url(source.location):  # URLs were checked after they had been read
                source.check_unchanged()
    except InputError:
        shutil.rmtree(folder)
        raise
    for (parts, shard, *_), (_, damage) in zip(tasks, results, strict=True):
        if damage:
            print(f"the token store was damaged, {shard}: {damage}; tokenised again from {parts[0].name} on")
    corpus = _join(groups, [found for found, _ in results])
    _report(corpus, sources, folder)
    return corpus, TokenStore(folder, len(groups))


def _run(task: tuple[Sequence[ByteRange], Path, Tokenizer, DataConfig]) -> tuple[StoreShardSummary, str | None]:
    return ensure_store_shard(*task)


def ensure_store_shard(
    parts: Sequence[ByteRange], folder: Path, tokenizer: Tokenizer, config: DataConfig
) -> tuple[StoreShardSummary, str | None]:
    """Write a store shard unless it is there undamaged; returns its summary, and any damage found."""
    damage = None
    if folder.exists():
        damage = damage_of_folder(folder)
        if damage is None:
            return read_json(folder / SUMMARY), None
        shutil.rmtree(folder)
    for part in parts:
        ensure_unpacked(part)
    found = write_store_shard(parts, folder, tokenizer, config)
    try:
        documents.check_unchanged(parts)
    except InputError:
        shutil.rmtree(folder)
        raise
    return found, damage


def _join(groups: Sequence[Sequence[ByteRange]], summaries: Sequence[StoreShardSummary]) -> CorpusStatistics:
    counts = (counts for found in summaries for counts in found["parts"])
    of_parts = zip(itertools.chain.from_iterable(groups), counts, strict=True)
    of_sources = itertools.groupby(of_parts, key=lambda pair: pair[0].source)
    return summary.join_corpus([[each for _, each in group] for _, group in of_sources], summaries)


def _report(corpus: CorpusStatistics, sources: list[Source], folder: Path) -> None:
    size = sum(file.stat().st_size for file in folder.rglob("*.npy"))
    boundaries = sorted({f"documents end at {source.boundary}, sentences by {source.splitter}" for source in sources})
    print(
        f"{corpus['documents']:,} documents, {corpus['sentences']:,} sentences "
        f"(median {corpus['median_sentences_per_document']:g} per document), {corpus['tokens']:,} tokens, "
        f"[UNK] {corpus['unk_share']:.3%}\n{'; '.join(boundaries)}\ntoken store: {folder} ({size / 1e6:.1f} MB)"
    )
