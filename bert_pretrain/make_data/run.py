"""Stage 2, `make-data`: turn raw text into shards of examples, with a tokenizer.

Text is tokenized into the token store, shards are built from it, and the manifest is written last. Finished work is
kept, so the same command resumes after an interruption.
"""

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from bert_pretrain.config import AUTO_LANGUAGE, SINGLE_CHARACTERS, Config, DataConfig
from bert_pretrain.errors import ConfigError, DataError, InputError
from bert_pretrain.examples.data_folder import DataFolder
from bert_pretrain.io.cores import available_cores
from bert_pretrain.io.files import remove_temporaries, write_text
from bert_pretrain.io.manifest import Output, OutputState, check_writable, read_record
from bert_pretrain.io.pool import LocalPool, Pool, open_pool, run_each
from bert_pretrain.make_data import summary
from bert_pretrain.make_data.assignment import RECORDS, Assignment, assign
from bert_pretrain.make_data.build import build_shard
from bert_pretrain.make_data.ingest import ingest
from bert_pretrain.text.corpus import Corpus, Sample
from bert_pretrain.text.normalization import accent_loss, keeps_accents
from bert_pretrain.text.tokenizer import JsonTokenizer, Tokenizer
from bert_pretrain.text.tokenizer_folder import TextRules

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
    text = Corpus.open(inputs, _with_words_of(tokenizer, config.data), whole_words=tokenizer.whole_words)
    _check_vocabulary(text, tokenizer, vocab)
    files = [vocab, *(Path(source.location) for source in text.sources if source.is_local)]
    out = Output(output, "data", _identity(text, tokenizer), files)
    if dry_run:
        out.would_be(overwrite=overwrite)
        print(_estimate(text, tokenizer, cores))
        return output
    check_writable(stores, "--store")
    with out.open(overwrite=overwrite) as state:
        remove_temporaries(output)
        if state is OutputState.COMPLETE:
            _remove_records(output)  # left by a command killed before its end
            damage = _damage(output, tokenizer, verify=verify)
            if damage is None:
                print(f"up to date{', all shards verified' if verify else ''}: {output}")
                return output
            print(f"{damage}; rebuilding the data")
            out.reopen()
        stores.mkdir(parents=True, exist_ok=True)
        # A cluster checks that its workers see the same local files.
        with open_pool(workers, scheduler, folders=[output, stores], files=files) as pool:
            contents = _write_splits(text, tokenizer, output, stores, pool)
        remove_temporaries(output / TOKENIZER)
        tokenizer.save(output / TOKENIZER)
        _write_dataset_card(output, list(contents["splits"]))
        body = {
            "config": {"data": text.config.model_dump(mode="json")},
            "seed": text.config.seed,
            "tokenizer": {"hash": tokenizer.hash, "vocab_size": tokenizer.vocab_size},
            **text.record,
            **contents,
        }
        out.publish(body)
        _remove_records(output)
        print(f"{summary.describe(body)}\ndata folder: {output}")
    return output


def _with_words_of(tokenizer: Tokenizer, config: DataConfig) -> DataConfig:
    """Return the configuration without a segmenter if the tokenizer finds words itself."""
    if not isinstance(tokenizer, JsonTokenizer) or not config.whole_word_mask:
        return config
    if config.segments_words:
        raise ConfigError(
            "only tokenizers that split Chinese text into characters need a segmenter",
            where="data.word_segmenter",
            remedy="leave it out; whole words are those of the tokenizer",
        )
    return config.model_copy(update={"word_segmenter": SINGLE_CHARACTERS})


def _remove_records(output: Path) -> None:
    for records in output.glob(f"{RECORDS}*"):
        shutil.rmtree(records, ignore_errors=True)


def _check_vocabulary(text: Corpus, tokenizer: Tokenizer, vocab: Path) -> None:
    """Warn if the vocabulary was made for another language, or strips accents that `vocab` would keep for this text."""
    made_for = read_record(vocab).get("language", AUTO_LANGUAGE)
    if made_for not in (AUTO_LANGUAGE, text.config.language):
        print(
            f"warning: the vocabulary was made for text in {made_for}, and this text is in {text.config.language}\n"
            "  hint: build one from this text with 'bert-pretrain vocab'"
        )
    if not tokenizer.strips_accents:
        return
    lowercase = bool(tokenizer.rules.lowercase)
    rules = TextRules(lowercase=lowercase, strip_accents=False)
    words = Counter(rules.words("\n".join(text.texts[::4]).encode()))
    loss = accent_loss(words, lowercase=lowercase)
    if keeps_accents(loss, text.config.language):
        print(
            f"warning: the vocabulary strips accents, which changes {loss.describe()}\n"
            "  hint: build one from this text with 'bert-pretrain vocab', which keeps accents that matter"
        )


def _estimate(text: Corpus, tokenizer: Tokenizer, workers: int) -> str:
    """Run the stage on a sample of the text, in a temporary folder, and describe what it would make of all text."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sample = text.sample(folder, SAMPLE_BYTES)
        start = time.process_time()
        with LocalPool(1) as pool, sample.naming_originals():
            contents = _write_splits(
                sample.corpus,
                tokenizer,
                folder / "data",
                folder / "store",
                pool,
                sample,
            )
        seconds = time.process_time() - start
        store_bytes = summary.store_bytes(folder)
    is_file = all(
        source.boundary == "file" for source in sample.corpus.sources
    )  # a copy may be the start of a document
    documents = len(text.sources) if is_file else None
    return summary.describe_estimate(
        sample,
        contents,
        documents,
        store_bytes,
        seconds,
        workers,
    )


def _identity(text: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the inputs and settings that determine the bytes of the output, for given library versions."""
    excluded = {"validation", "fraction", "input_weights", "max_record_bytes", "encoding"}
    data = text.config.model_dump(mode="json", exclude=excluded)
    if isinstance(text.config.document_boundary, dict):  # its paths may change; each input has its own boundary
        data["document_boundary"] = "auto"
    return {
        "inputs": [{**source.identity, "weight": source.weight} for source in text.training.sources],
        "validation": [source.identity for source in text.sources if source.is_validation],
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
    text: Corpus,
    tokenizer: Tokenizer,
    output: Path,
    stores: Path,
    pool: Pool,
    sample: Sample | None = None,
) -> dict[str, dict[str, Any]]:
    """Tokenize all text and build all shards. Return the entries `corpus` and `splits` of the manifest.

    The text is that of the sample, if there is one.
    """
    summary.warn_of_repeated_sentences(text)
    corpus, store = ingest(
        text.sources,
        tokenizer,
        text.config,
        stores,
        pool,
    )
    if sample is None:
        print(summary.describe_corpus(corpus, text.sources, store.folder))
    summary.warn_of_unknown_tokens(corpus, sample.originals if sample else text.sources, tokenizer, text.config)
    try:
        assignment, left_out = assign(
            store,
            corpus["inputs"],
            text.sources,
            tokenizer,
            output.absolute(),
            text.config,
        )
        corpus["left_out"] = left_out
        summary.check_documents(assignment, text.sources)
        if sample is None or not sample.is_part:
            summary.warn_of_large_documents(assignment, text.sources)
        splits = _build_shards(assignment, pool)
        summary.check_splits(splits, corpus, assignment)
    except InputError:  # leave the output empty for another command
        _remove_records(output)
        for split in ("train", "validation"):
            shutil.rmtree(output / split, ignore_errors=True)
        raise
    return {"corpus": corpus, "splits": splits}


def _build_shards(assignment: Assignment, pool: Pool) -> dict[str, dict[str, Any]]:
    """Build all shards, and return the manifest entry of each split."""
    results: dict[str, list[dict[str, Any]]] = {}
    counts: dict[str, np.ndarray] = {}
    for split in assignment.shards_per_copy:
        (assignment.output / split).mkdir(parents=True, exist_ok=True)
        results[split] = []
        counts[split] = np.zeros(assignment.tokenizer.vocab_size, dtype=np.int64)
    work = partial(build_shard, assignment)
    built = run_each(
        work,
        assignment.shards,
        workers=pool,
        description="build",
        unit="shard",
    )
    for (split, _), result in zip(assignment.shards, built, strict=True):
        counts[split] += result.pop("token_counts")
        results[split].append(result)
    entries: dict[str, dict[str, Any]] = {}
    for split, shards in results.items():
        remove_temporaries(assignment.output / split)  # left by workers that were killed
        num_tokens = sum(shard["statistics"]["maskable_tokens"] for shard in shards)
        entries[split] = summary.join_split(shards, assignment.config)
        entries[split]["statistics"] |= {
            "documents": assignment.documents[split],
            "times_text_is_seen": round(num_tokens / max(1, assignment.tokens[split]), 4),
            "unigram_entropy": summary.unigram_entropy(counts[split], counts["train"]),
        }
    return entries


def _write_dataset_card(output: Path, splits: Sequence[str]) -> None:
    """Write a README.md with all columns if the splits have different ones. `datasets` then fills them with null."""
    schemas = [pq.read_schema(output / split / "00000.parquet") for split in splits]
    if schemas[0].names == schemas[-1].names:
        return
    features: list[dict[str, Any]] = []
    for column in pa.unify_schemas(schemas):
        is_list = pa.types.is_list(column.type)
        kind = {"list": str(column.type.value_type)} if is_list else {"dtype": str(column.type)}
        features.append({"name": column.name, **kind})
    write_text(output / "README.md", f"---\n{yaml.safe_dump({'dataset_info': {'features': features}})}---\n")
