"""Stage 2, `make-data`: raw text and a tokenizer to shards of examples.

Text is tokenised once into the token store; shards are built from it; the manifest is written last. Whatever is on disk
is not done again, so the same command continues after any interruption.
"""

import itertools
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_pretrain import documents, manifest
from bert_pretrain.config import Config, DataConfig
from bert_pretrain.documents import Part
from bert_pretrain.errors import ConfigError, InputError
from bert_pretrain.executor import Pool, open_pool, run_all
from bert_pretrain.files import damage_of_folder, exclusive, read_json, remove_temporaries, remove_tree
from bert_pretrain.make_data import build, checks, repair, segmenter, summary, token_store
from bert_pretrain.make_data.build import ShardTask
from bert_pretrain.make_data.dataset_card import write_dataset_card
from bert_pretrain.make_data.ingest import ingest as ingest_parts
from bert_pretrain.make_data.parts import cut_inputs, ensure_unpacked, remove_unpacked
from bert_pretrain.make_data.plan import BuildPlan, plan_build
from bert_pretrain.make_data.selection import InputShare
from bert_pretrain.make_data.token_store import TokenStore
from bert_pretrain.manifest import Progress
from bert_pretrain.places import AnyPlace, Place, RemotePath, is_url
from bert_pretrain.sources import Source, resolve
from bert_pretrain.tokenizer import Tokenizer, TokenizerReference, load_once


def make_data(
    config: Config,
    inputs: Sequence[str],
    vocab: Place,
    output: AnyPlace,
    *,
    workers: int | None = None,
    scheduler: str | None = None,
    store: Path | None = None,
    overwrite: bool = False,
    verify: bool = False,
    lowercase: bool | None = None,
) -> AnyPlace:
    """Write a data folder and return its path.

    Args:
        config: its sections `data` is used.
        inputs: files, globs, folders, URLs or `dataset:` names.
        vocab: the tokenizer folder, by path or URL.
        output: the data folder to write, by path or URL.
        workers: processes; all cores when None.
        scheduler: the address of a Dask scheduler whose workers do the work instead.
        store: where the token store lies; `.token-store` beside a local `output` when None.
        overwrite: move another output aside instead of refusing it.
        verify: of a finished folder, compare the SHA-256 of all shards, not only their sizes and footers.
        lowercase: the casing, for a tokenizer folder that does not state it.

    Raises:
        UserError: for a mistake in the inputs, the tokenizer or the folders.
    """
    stores = _place_of_store(store, output)
    tokenizer = Tokenizer.load(vocab, lowercase=lowercase)
    sources = resolve(inputs, config.data)
    identity = {
        "inputs": [{**source.identity, "weight": source.weight} for source in sources if not source.is_validation],
        "validation": [source.identity for source in sources if source.is_validation],
        "tokenizer": tokenizer.hash,
        "data": config.data.model_dump(mode="json", exclude={"validation", "input_weights"}),
    }
    with exclusive(output):
        is_complete = manifest.claim(output, "data", identity, overwrite=overwrite) is Progress.COMPLETE
        damaged: dict[str, str] = {}
        remove_temporaries(output)
        if is_complete:
            remove_tree(output / build.RECORDS)  # of a command killed at its very end
            damaged = repair.find_damage(output, verify=verify, workers=workers or os.cpu_count() or 1)
            if not damaged:
                print(f"up to date{', every shard as it was written' if verify else ''}: {output}")
                return output
        stores.mkdir(parents=True, exist_ok=True)
        # Whether workers see the same, a cluster asks of what lies in files; URLs mean the same to all.
        folders = [folder for folder in (output, stores) if isinstance(folder, Path)]
        files = [Path(source.location) for source in sources if source.is_local]
        files += [vocab] if isinstance(vocab, Path) else []
        with open_pool(workers, scheduler, folders=folders, files=files) as pool:
            corpus, text = ingest(sources, tokenizer, config.data, stores, pool)
            checks.check_corpus(corpus, config.data, sources)
            plan, left_out = plan_build(text, _shares(sources, corpus), tokenizer, output.absolute(), config.data)
            checks.check_left_out(plan, left_out)
            corpus["left_out"] = left_out
            if is_complete:
                repair.rebuild(plan, tokenizer, damaged, pool)
                return output
            try:
                splits = build_shards(plan, pool)
                checks.check_splits(splits, corpus, plan)
            except InputError:
                # So that the mended command finds the folder free.
                for leftover in (*(split.name for split in plan.splits), build.RECORDS):
                    remove_tree(output / leftover)
                raise
        remove_temporaries(output / "tokenizer")
        tokenizer.save(output / "tokenizer")
        write_dataset_card(output, list(splits))
        body = _body(config, tokenizer, sources, corpus, splits)
        manifest.complete(output, "data", identity, body)
        remove_tree(output / build.RECORDS)
    print(summary.describe(body))
    print(f"data folder: {output}")
    return output


def _place_of_store(store: Path | None, output: Place) -> Path:
    """Return where the token store lies: memory is mapped from it, so it must be local.

    Raises:
        ConfigError: when the output is remote and nobody said where.
    """
    if store is not None:
        return store
    if isinstance(output, RemotePath):
        raise ConfigError(
            f"the token store cannot lie beside {output}: it is read at random, from a local folder",
            where="--store",
            remedy="name one with --store, on a disk with about half the size of the text",
        )
    return output.parent / ".token-store"


def _shares(sources: list[Source], corpus: dict[str, Any]) -> list[InputShare]:
    return [
        InputShare(figures["documents"], figures["tokens"], source.weight, source.is_validation)
        for source, figures in zip(sources, corpus["inputs"], strict=True)
    ]


def _body(
    config: Config, tokenizer: Tokenizer, sources: list[Source], corpus: dict[str, Any], splits: dict[str, Any]
) -> dict[str, Any]:
    """Return what the manifest says of the finished folder."""
    return {
        "config": {"data": config.data.model_dump(mode="json")},
        "seed": config.data.seed,
        "tokenizer": {"hash": tokenizer.hash, "vocab_size": tokenizer.vocab_size},
        "inputs": [
            {
                "location": source.location,
                **source.identity,
                "split": "validation" if source.is_validation else "train",
                "weight": source.weight,
            }
            for source in sources
        ],
        "corpus": corpus,
        "splits": splits,
    }


@dataclass(frozen=True)
class _IngestTask:
    parts: tuple[Part, ...]
    folder: Path
    tokenizer: TokenizerReference
    config: DataConfig


def _ingest_task(task: _IngestTask) -> tuple[dict[str, Any], str | None]:
    """Fill one piece of the store unless it is there undamaged; returns its summary, and the damage found."""
    is_there = task.folder.exists()
    damage = damage_of_folder(task.folder) if is_there else None
    if is_there and not damage:
        return read_json(task.folder / "summary.json"), None
    shutil.rmtree(task.folder, ignore_errors=True)
    for part in task.parts:
        ensure_unpacked(part)
    piece = ingest_parts(task.parts, task.folder, load_once(task.tokenizer), task.config)
    try:
        documents.check_unchanged(task.parts)
    except InputError:
        shutil.rmtree(task.folder)
        raise
    return piece, damage


def ingest(
    sources: list[Source], tokenizer: Tokenizer, config: DataConfig, stores: Path, pool: Pool
) -> tuple[dict[str, Any], TokenStore]:
    """Fill the token store; returns the figures of the corpus, and the store.

    Raises:
        InputError: when an input changes meanwhile.
        ConfigError: when the segmenter asked for is not installed.
    """
    if config.word_segmenter is not None:
        segmenter.check_installed()  # before its version is asked for
    folder = stores.absolute() / token_store.store_key(sources, tokenizer, config)
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder):
        remove_temporaries(folder)
        groups = cut_inputs([source.absolute for source in sources], folder, pool)
        tasks = [
            _IngestTask(parts, token_store.piece_folder(folder, number), tokenizer.reference, config)
            for number, parts in enumerate(groups)
        ]
        weights = [float(sum(part.num_bytes for part in parts)) for parts in groups]
        results = run_all(_ingest_task, tasks, workers=pool, description="tokenise", unit="B", weights=weights)
        remove_temporaries(folder)  # of workers that were killed while we were not
        remove_unpacked(itertools.chain.from_iterable(groups))
    try:
        for source in sources:
            if not is_url(source.location):  # which were looked at when they had been read
                source.check_unchanged()
    except InputError:
        shutil.rmtree(folder)
        raise
    for task, (_, damage) in zip(tasks, results, strict=True):
        if damage:
            print(f"the token store was damaged, {task.folder}: {damage}; tokenised anew from {task.parts[0].name} on")
    figures = (figures for piece, _ in results for figures in piece["parts"])
    of_parts = zip(itertools.chain.from_iterable(groups), figures, strict=True)
    of_sources = itertools.groupby(of_parts, key=lambda pair: pair[0].source)
    corpus = summary.join_corpus(
        [[each for _, each in group] for _, group in of_sources], [piece for piece, _ in results]
    )
    size = sum(file.stat().st_size for file in folder.rglob("*.npy"))
    layouts = sorted({f"documents end at {source.boundary}, sentences by {source.splitter}" for source in sources})
    print(
        f"{corpus['documents']:,} documents, {corpus['sentences']:,} sentences "
        f"(median {corpus['median_sentences_per_document']:g} a document), {corpus['tokens']:,} tokens, "
        f"[UNK] {corpus['unk_share']:.3%}\n{'; '.join(layouts)}\ntoken store: {folder} ({size / 1e6:.1f} MB)"
    )
    return corpus, TokenStore(folder, len(groups))


def build_shards(plan: BuildPlan, pool: Pool) -> dict[str, Any]:
    """Build all shards; returns the manifest's entries of the splits."""
    build.open_records(plan)
    tasks = [ShardTask(plan, split, number) for split in plan.splits for number in range(split.num_shards)]
    results = run_all(build.build_shard, tasks, workers=pool, description="build", unit="shard")
    for split in plan.splits:
        remove_temporaries(plan.output / split.name)  # of workers that were killed while we were not
    for task, result in zip(tasks, results, strict=True):
        if result["damage"]:
            print(f"{task.name} {result['damage']}; made anew")
    return {
        split.name: summary.join_split(
            [result for task, result in zip(tasks, results, strict=True) if task.split is split],
            plan.config,
        )
        for split in plan.splits
    }
