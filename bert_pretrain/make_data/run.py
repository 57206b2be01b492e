"""Stage 2, `make-data`: turn raw text into shards of examples, with a tokenizer.

Text is tokenized into the token store, shards are built from it, and the manifest is written last. Finished work is
kept, so the same command resumes after an interruption.
"""

import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from bert_pretrain.config import Config
from bert_pretrain.errors import DataError, InputError
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.io.cores import available_cores
from bert_pretrain.io.files import remove_temporaries, write_text
from bert_pretrain.io.manifest import Output, OutputState, check_writable, exclusive
from bert_pretrain.io.pool import LocalPool, Pool, open_pool, run_each
from bert_pretrain.make_data import build, summary
from bert_pretrain.make_data.ingest import ingest
from bert_pretrain.make_data.plan import Plan
from bert_pretrain.text.corpus import Corpus
from bert_pretrain.text.normalization import accent_loss, count_words, keeps_accents
from bert_pretrain.text.sources import Source
from bert_pretrain.text.tokenizer import Tokenizer

TOKENIZER = "tokenizer"
SAMPLE_BYTES = 8 << 20  # of the text, for a dry run


def make_data(
    config: Config,
    inputs: Sequence[str],
    vocab: Path,
    output: Path,
    *,
    workers: int | None = None,
    scheduler: str | None = None,
    store: Path | None = None,
    overwrite: bool = False,
    verify: bool = False,
    lowercase: bool | None = None,
    dry_run: bool = False,
) -> Path:
    """Write a data folder and return its path.

    The arguments are the options of the command `make-data`. `store` defaults to `.token-store` next to `output`.
    `lowercase` is the casing of a tokenizer whose folder does not specify it.
    """
    stores = store or output.parent / ".token-store"
    tokenizer = Tokenizer.load(vocab, lowercase=lowercase)
    cores = workers or available_cores()
    # The identity of an existing output contains the detected format of every input. Without an output, a dry run opens
    # only the inputs that it samples.
    examine = not dry_run or output.exists() or isinstance(config.data.document_boundary, dict)
    text = Corpus.open(inputs, config.data, whole_words=tokenizer.whole_words, workers=cores, examine=examine)
    config = config.model_copy(update={"data": text.config})
    _check_accents(text, tokenizer)
    sources = list(text.sources)
    local = [source.location for source in sources if source.is_local]
    out = Output(output, "data", _identity(config, sources, tokenizer), [vocab, *local])
    if dry_run:
        out.would_be(overwrite=overwrite)
        print(_estimate(config, text, tokenizer, cores))
        return output
    check_writable(stores, "--store")
    with out.open(overwrite=overwrite) as state:
        remove_temporaries(output)
        if state is OutputState.COMPLETE:
            shutil.rmtree(output / build.RECORDS, ignore_errors=True)  # left by a command killed before its end
            damage = _damage(output, tokenizer, verify=verify)
            if damage is None:
                print(f"up to date{', all shards verified' if verify else ''}: {output}")
                return output
            print(f"{damage}; rebuilding the data")
            out.reopen()
        stores.mkdir(parents=True, exist_ok=True)
        # A cluster checks that its workers see the same local files.
        files = [vocab, *map(Path, local)]
        with open_pool(workers, scheduler, folders=[output, stores], files=files) as pool:
            corpus, splits = _write_splits(config, sources, tokenizer, output, stores, pool)
        remove_temporaries(output / TOKENIZER)
        tokenizer.save(output / TOKENIZER)
        _write_dataset_card(output, list(splits))
        body = _manifest_body(config, tokenizer, sources, corpus, splits)
        out.publish(body)
        shutil.rmtree(output / build.RECORDS, ignore_errors=True)
        print(f"{summary.describe(body)}\ndata folder: {output}")
    return output


def _check_accents(text: Corpus, tokenizer: Tokenizer) -> None:
    """Warn if the vocabulary strips accents that `vocab` would keep for this text."""
    if not tokenizer.strips_accents:
        return
    lowercase = bool(tokenizer.settings["do_lower_case"])
    words = count_words("\n".join(text.texts[::4]), lowercase=lowercase)
    loss = accent_loss(words, lowercase=lowercase)
    if keeps_accents(loss, text.config.language):
        print(
            f"warning: the vocabulary strips accents, which changes {loss.describe()}\n"
            "  hint: build one from this text with 'bert-pretrain vocab', which keeps accents that matter"
        )


def _estimate(config: Config, text: Corpus, tokenizer: Tokenizer, workers: int) -> str:
    """Run the stage on a sample of the text, in a temporary folder, and describe what it would make of all text."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sample = text.sample(folder, SAMPLE_BYTES)
        start = time.process_time()
        sources = list(sample.corpus.sources)
        with LocalPool(1) as pool, sample.naming_originals():
            corpus, splits = _write_splits(
                config, sources, tokenizer, folder / "data", folder / "store", pool, is_sample=sample.is_part
            )
        seconds = time.process_time() - start
        store_bytes = sum(file.stat().st_size for file in folder.glob("store/*/*/*.npy"))
    summary.warn_of_unknown_tokens(corpus, sample.originals, tokenizer, config.data)
    is_file = all(source.boundary == "file" for source in sources)  # a copy may be the start of a document
    documents = len(text.sources) if is_file else None
    return summary.describe_estimate(config.data, sample, corpus, splits, store_bytes, seconds, workers, documents)


def _identity(config: Config, sources: list[Source], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the inputs and settings that determine the bytes of the output, for given library versions."""
    excluded = {"validation", "fraction", "input_weights", "max_record_bytes", "encoding"}
    data = config.data.model_dump(mode="json", exclude=excluded)
    if isinstance(config.data.document_boundary, dict):  # its paths may change; each input has its own boundary
        data["document_boundary"] = "auto"
    return {
        "inputs": [{**source.identity, "weight": source.weight} for source in sources if not source.is_validation],
        "validation": [source.identity for source in sources if source.is_validation],
        "tokenizer": tokenizer.hash,
        "data": data,
    }


def _damage(output: Path, tokenizer: Tokenizer, *, verify: bool) -> str | None:
    """Describe the damage of a finished data folder, or return None if there is none."""
    try:
        DataFolder.open(output, "--output", verify=verify).tokenizer()
    except DataError as error:
        return error.what
    missing = [name for name in tokenizer.files if not (output / TOKENIZER / name).is_file()]
    return f"{TOKENIZER}/{missing[0]} is missing" if missing else None


def _write_splits(
    config: Config,
    sources: list[Source],
    tokenizer: Tokenizer,
    output: Path,
    stores: Path,
    pool: Pool,
    *,
    is_sample: bool = False,
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Tokenize all text and build all shards. Return the entries `corpus` and `splits` of the manifest.

    With `is_sample`, the text is a part of the corpus, so its amount is neither printed nor judged.
    """
    corpus, store = ingest(sources, tokenizer, config.data, stores, pool)
    if not is_sample:
        print(summary.describe_corpus(corpus, sources, store.folder))
        summary.warn_of_unknown_tokens(corpus, sources, tokenizer, config.data)
    summary.warn_of_repeated_sentences(corpus)
    with exclusive(store.folder, waits=True):  # the plan's arrays are in the store too
        plan = summary.checked_plan(store, corpus, sources, tokenizer, output.absolute(), config.data)
    if not is_sample:
        summary.warn_of_large_documents(plan, corpus, sources)
    try:
        splits = _build_shards(plan, pool)
        summary.check_splits(splits, corpus, plan)
    except InputError:  # leave the output empty for another command
        for leftover in (*plan.shards_per_copy, build.RECORDS):
            shutil.rmtree(plan.output / leftover, ignore_errors=True)
        raise
    return corpus, splits


def _build_shards(plan: Plan, pool: Pool) -> dict[str, dict[str, Any]]:
    """Build all shards, and return the manifest entry of each split."""
    build.open_records(plan)
    built = run_each(partial(build.build_shard, plan), plan.shards, workers=pool, description="build", unit="shard")
    results: dict[str, list[dict[str, Any]]] = {split: [] for split in plan.shards_per_copy}
    counts = {split: np.zeros(plan.tokenizer.vocab_size, dtype=np.int64) for split in results}
    for (split, number), (result, damage) in zip(plan.shards, built, strict=True):
        counts[split] += summary.unpack_counts(result.pop("token_counts"))
        results[split].append(result)
        if damage:
            print(f"{build.shard_name(split, number)} {damage}; rebuilt")
    for split in results:
        remove_temporaries(plan.output / split)  # left by workers that were killed
    entries = {split: summary.join_split(shards, plan.config) for split, shards in results.items()}
    held_out = plan.documents_at("validation", np.arange(plan.num_documents("validation")))
    left_out = {"validation": int(plan.is_left_out(held_out).sum())}
    left_out["train"] = len(plan.left_out) - left_out["validation"]
    for split, entry in entries.items():
        num_tokens = sum(each["statistics"]["maskable_tokens"] for each in results[split])
        entry["statistics"]["documents"] = plan.num_documents(split) - left_out[split]
        entry["statistics"]["times_text_is_seen"] = round(num_tokens / max(1, plan.tokens[split]), 4)
        entry["statistics"]["unigram_entropy"] = summary.unigram_entropy(counts[split], counts["train"])
    return entries


def _manifest_body(
    config: Config, tokenizer: Tokenizer, sources: list[Source], corpus: Mapping[str, Any], splits: Mapping[str, Any]
) -> dict[str, Any]:
    names = {False: "train", True: "validation"}
    inputs = [
        {"location": each.location, **each.identity, "split": names[each.is_validation], "weight": each.weight}
        for each in sources
    ]
    return {
        "config": {"data": config.data.model_dump(mode="json")},
        "seed": config.data.seed,
        "tokenizer": {"hash": tokenizer.hash, "vocab_size": tokenizer.vocab_size},
        "inputs": inputs,
        "corpus": corpus,
        "splits": splits,
    }


def _write_dataset_card(output: Path, splits: Sequence[str]) -> None:
    """Write a README.md with all columns if the splits have different ones. `datasets` then fills them with null."""
    schemas = [pq.read_schema(output / split / "00000.parquet") for split in splits]
    if len({tuple(schema.names) for schema in schemas}) > 1:
        columns = ((field.name, field.type) for field in pa.unify_schemas(schemas))
        features = [
            {"name": name, **({"list": str(kind.value_type)} if pa.types.is_list(kind) else {"dtype": str(kind)})}
            for name, kind in columns
        ]
        write_text(output / "README.md", f"---\n{yaml.safe_dump({'dataset_info': {'features': features}})}---\n")
