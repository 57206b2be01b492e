"""Stage 1, `vocab`: raw text to a tokenizer folder that opens in `transformers`.

Chunks are counted in one pass over the text, on all cores; from the counts a vocabulary is trained, whole words are
chosen, or an existing vocabulary is extended. It is measured on documents it has not seen.
"""

import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bert_pretrain.config import Config, VocabConfig
from bert_pretrain.errors import ConfigError, DataError, InputError
from bert_pretrain.io import manifest
from bert_pretrain.io.cores import available_cores
from bert_pretrain.io.files import remove_temporaries
from bert_pretrain.io.manifest import Progress, exclusive
from bert_pretrain.io.pool import Pool, open_pool, run_each
from bert_pretrain.text import documents
from bert_pretrain.text.languages import with_language
from bert_pretrain.text.readers import check_texts
from bert_pretrain.text.sources import Source, few_documents, finer_boundary, resolve
from bert_pretrain.text.text_files import ByteRange, describe_reasons, join_reasons
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.text.tokenizer_folder import TOKENIZER
from bert_pretrain.vocab.counting import Counts, count_groups
from bert_pretrain.vocab.extend import extend_vocabulary
from bert_pretrain.vocab.normalized import NormalizedWords, normalize
from bert_pretrain.vocab.wordpiece import choose_alphabet, choose_words, special_tokens, train_wordpiece

MAX_TASKS = 256
"""That count, at most; each merges the counts of all its text as it reads."""
MERGED_AT_ONCE = 4


def make_vocab(
    config: Config,
    inputs: Sequence[str],
    output: Path,
    *,
    extend: Path | None = None,
    lowercase: bool | None = None,
    workers: int | None = None,
    scheduler: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a tokenizer folder, with a vocabulary of its own or an extended one, and return its path.

    The arguments are the options of the command `vocab`. Text is processed as by the tokenizer of `extend`; `lowercase`
    is its casing, where its folder does not state it.
    """
    old = None if extend is None else Tokenizer.load(extend, "--extend", lowercase=lowercase)
    if old is not None:
        config = config.model_copy(update={"vocab": _extending(old, config.vocab)})
    else:
        _room(config)  # before the text is read
    whole_words = config.vocab.tokens == "words"
    found = resolve(inputs, config.data, whole_words=whole_words, workers=workers or available_cores())
    sources = [source for source in found if not source.is_validation]
    if not whole_words:
        config = config.model_copy(update={"data": with_language(config.data, sources)})
    identity = {
        "inputs": [source.identity for source in sources],
        **_choices(config.vocab, old),
        "reading": config.data.model_dump(mode="json", include={"text_field", "strict", "language"}),
    }
    with exclusive(output):
        progress = manifest.claim(output, "vocab", identity, overwrite=overwrite)
        if progress is Progress.COMPLETE:
            if _is_intact(output):
                print(f"up to date: {output}")
                return output
            print(f"a file of {output} is missing or damaged; the vocabulary is built again")
            manifest.reopen(output)
        remove_temporaries(output)
        counts = _count(sources, output, config, workers, scheduler)
        tokenizer, metrics = _make(counts, old, config, inputs[0])
        tokenizer.save(output)
        body = {
            "config": {"vocab": config.vocab.model_dump(mode="json")},
            "language": config.data.language,
            "tokenizer": {"hash": tokenizer.hash, "vocab_size": tokenizer.vocab_size},
            "inputs": [{"location": source.location, **source.identity} for source in sources],
            "metrics": metrics,
        }
        manifest.complete(output, "vocab", identity, body)
    _report(tokenizer, metrics, config.vocab)
    if (few := few_documents(metrics["documents"])) and (finer := finer_boundary(sources)):
        print(f"warning: {few}, for make-data too\n  hint: {finer}")
    print(f"tokenizer folder: {output}")
    return output


def _extending(old: Tokenizer, config: VocabConfig) -> VocabConfig:
    """Return the configuration with the text processing of the vocabulary that is extended."""
    if old.whole_words or config.tokens == "words":
        raise ConfigError(
            "only a vocabulary of pieces of words can be extended",
            where=f"--extend {old.folder}" if old.whole_words else "vocab.tokens words",
            remedy="build a vocabulary of whole words from all the text, without --extend",
        )
    keys = ("lowercase", "strip_accents", "handle_chinese_chars")
    return config.model_copy(update=dict(zip(keys, old.settings.values(), strict=True)))


def _choices(config: VocabConfig, old: Tokenizer | None) -> dict[str, Any]:
    """Return what of the configuration, and which old vocabulary, decides the new one."""
    if old is None:
        return {"vocab": config.model_dump(mode="json", exclude={"add_tokens"})}
    chosen = config.model_dump(mode="json", include={"add_tokens", "min_frequency", "seed"})
    return {"extends": old.hash, "vocab": chosen}


def _is_intact(output: Path) -> bool:
    try:
        found = Tokenizer.load(output)
        texts = found.contents()
        del texts[TOKENIZER]  # whose form may be that of another version of the library
        is_same = all((output / name).read_text(encoding="utf-8") == text for name, text in texts.items())
    except (DataError, OSError, UnicodeDecodeError):
        return False
    written = manifest.read_manifest(output, "vocab", "--output")["tokenizer"]["hash"]
    return is_same and (output / TOKENIZER).is_file() and found.hash == written


def _count_groups(task: tuple[Path, Sequence[tuple[int, Sequence[ByteRange]]]], config: Config) -> None:
    file, groups = task
    count_groups(groups, config).save(file)


def _merge(task: tuple[Path, Sequence[Path]]) -> None:
    merged, files = task
    _merged(files).save(merged)


def _merged(files: Sequence[Path]) -> Counts:
    counts = Counts.load(files[0])
    for file in files[1:]:
        counts.add(Counts.load(file))
    return counts


def _count(sources: list[Source], output: Path, config: Config, workers: int | None, scheduler: str | None) -> Counts:
    """Count all text; counts are merged by the workers, in a tree, through files in a temporary folder of the output.

    What is merged with what, and so what is dropped, does not depend on the number of workers.
    """
    part_bytes = documents.part_bytes_of(sources)
    parts = (part for source in sources for part in documents.cut(source.absolute, part_bytes))
    groups = documents.group(parts, part_bytes)
    files = [Path(source.location) for source in sources if source.is_local]
    numbered = list(enumerate(groups))
    per_task = max(1, -(-len(groups) // MAX_TASKS))
    batches = [numbered[first : first + per_task] for first in range(0, len(groups), per_task)]
    shown = documents.progress_of([[part for _, parts in batch for part in parts] for batch in batches])
    with (
        open_pool(workers, scheduler, folders=[output], files=files) as pool,
        tempfile.TemporaryDirectory(dir=output.absolute(), prefix=".counts-", suffix=".tmp") as folder,
    ):
        found = [Path(folder, f"{number}") for number in range(len(batches))]
        count = partial(_count_groups, config=config)
        list(run_each(count, list(zip(found, batches, strict=True)), workers=pool, description="count", **shown))
        return merge_counts(found, pool)


def merge_counts(files: Sequence[Path], pool: Pool) -> Counts:
    """Merge files of counts, which are deleted, on all workers: `MERGED_AT_ONCE` at a time, then what that gives."""
    while len(files) > MERGED_AT_ONCE:
        merges = [files[first : first + MERGED_AT_ONCE] for first in range(0, len(files), MERGED_AT_ONCE)]
        tasks = [(some[0].with_name(f"{some[0].name}+"), some) for some in merges]
        list(run_each(_merge, tasks, workers=pool, description="merge", unit="table"))
        for file in files:
            file.unlink()
        files = [file for file, _ in tasks]
    return _merged(files)


def _make(counts: Counts, old: Tokenizer | None, config: Config, where: str) -> tuple[Tokenizer, dict[str, Any]]:
    """Train or extend a vocabulary; returns its tokenizer, and what the manifest says of it and of the text."""
    repairs_and_drops = join_reasons(counts.repairs_and_drops)
    check_texts(repairs_and_drops, counts.documents)
    normalized = normalize(counts, config.vocab, config.data.language, old)
    words, held_out = normalized.learned, normalized.held_out
    if not words:
        raise InputError("the inputs hold no text", where=where, remedy="give files with text in them")
    tokenizer, made = _train(normalized, config) if old is None else _extend(words, old, config.vocab)
    measured = held_out or words
    return tokenizer, {
        "documents": counts.documents,
        "words": words.total(),
        "distinct_words": len(words),
        "dropped_rare_chunks": {"occurrences": counts.dropped_occurrences, "at_most_of_one": counts.undercount},
        "repairs_and_drops": repairs_and_drops,
        "measured_on": "held-out documents" if held_out else "the training text: too few documents to hold one out",
        "normalization": normalized.metrics,
        **measure(tokenizer, measured),
        **({} if old is None else {"before": measure(old, measured)}),
        **made,
    }


def _train(normalized: NormalizedWords, config: Config) -> tuple[Tokenizer, dict[str, Any]]:
    """Return a vocabulary of its own, and what the manifest says of its alphabet, or of its words."""
    words, vocab = normalized.learned, normalized.config
    if vocab.tokens == "words":
        tokenizer = Tokenizer.of_words(choose_words(words, vocab))
        kept = [words[token] for token in tokenizer.tokens if words[token]]
        share = sum(kept) / words.total()
        print(f"{len(kept):,} of {len(words):,} different words cover {share:.4%} of the text")
        return tokenizer, {"whole_words": {"distinct": len(words), "coverage": share}}
    alphabet = choose_alphabet(words, vocab.limit_alphabet, _room(config))
    tokens, divisor = train_wordpiece(words, alphabet, vocab)
    tokenizer = Tokenizer(tokens, **normalized.rules)
    described = {
        "characters": len(alphabet.characters),
        "inside_words": len(alphabet.inside),
        "coverage": alphabet.coverage,
        "left_out": len(alphabet.left_out),
        "most_frequent_left_out": alphabet.left_out[:50],
    }
    print(
        f"alphabet: {len(alphabet.characters):,} characters cover {alphabet.coverage:.4%}, {len(alphabet.left_out):,} "
        f"rarer ones left out{': ' if alphabet.left_out else ''}{' '.join(alphabet.left_out[:10])}"
    )
    return tokenizer, {"alphabet": described, "words_seen_from_count": int(divisor / 2) + 1}


def _room(config: Config) -> int:
    """Return how many tokens a vocabulary may have besides special and unused ones."""
    reserved = len(special_tokens(config.vocab.unused_tokens))
    if config.vocab.size <= reserved:
        raise ConfigError(
            f"vocab.size is {config.vocab.size}, and special and unused tokens alone are {reserved}",
            where="vocab.size",
            remedy=f"set it to {reserved} and a token or two for each character of the text, or lower "
            f"vocab.unused_tokens ({config.vocab.unused_tokens})",
        )
    return config.vocab.size - reserved


def _extend(words: Counter[str], old: Tokenizer, config: VocabConfig) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the extended vocabulary, and what the manifest says of each new token."""
    tokenizer, added = extend_vocabulary(words, old, add_tokens=config.add_tokens, min_frequency=config.min_frequency)
    if not added:
        raise InputError(
            "the vocabulary already holds every frequent word of the inputs",
            where="--extend",
            remedy=f"use {old.folder} as it is, give more text, or lower vocab.min_frequency ({config.min_frequency})",
        )
    in_slots = sum(token["id"] < old.vocab_size for token in added)
    examples = ", ".join(f"{token['token']} ({' '.join(token['pieces'])})" for token in added[:5])
    print(f"{len(added):,} new: {in_slots:,} in unused slots, {len(added) - in_slots:,} at the end: {examples}, …")
    extends = {"folder": str(old.folder), "hash": old.hash, "vocab_size": old.vocab_size}
    return tokenizer, {"extends": extends, "added": added}


def measure(tokenizer: Tokenizer, words: Counter[str]) -> dict[str, Any]:
    """Return the share of words, of characters and of tokens that are [UNK], and the pieces per word."""
    pieces = unk_words = characters = unk_characters = 0
    for (word, count), ids in zip(words.items(), tokenizer.encode_texts(list(words)), strict=True):
        pieces += len(ids) * count
        characters += len(word) * count
        if ids == [tokenizer.unk_id]:
            unk_words += count
            unk_characters += len(word) * count
    total = words.total()
    return {
        "unk_share_of_words": unk_words / total,
        "unk_share_of_characters": unk_characters / characters,
        "unk_share_of_tokens": unk_words / pieces,
        "pieces_per_word": pieces / total,
    }


def _report(tokenizer: Tokenizer, metrics: dict[str, Any], config: VocabConfig) -> None:
    print(f"{tokenizer.vocab_size:,} tokens from {metrics['words']:,} words in {metrics['documents']:,} documents")
    for name, found in (("", metrics), ("before, ", metrics.get("before"))):
        if found:
            share, characters = found["unk_share_of_words"], found["unk_share_of_characters"]
            unknown = f"[UNK] {share:.4%} of words, {characters:.4%} of characters"
            print(f"{name}on {metrics['measured_on']}: {unknown}, {found['pieces_per_word']:.3f} pieces per word")
    if dropped := metrics["dropped_rare_chunks"]["occurrences"]:
        print(f"the text has too many different words to keep: {dropped:,} occurrences of rare ones are not counted")
    for line in describe_reasons(metrics["repairs_and_drops"]):
        print(f"corpus: {line}")
    if (least := metrics.get("words_seen_from_count", 1)) > config.min_frequency:
        print(f"words that occur fewer than {least:,} times are not learned from: too small a share of so much text")
    if "alphabet" in metrics and tokenizer.vocab_size < config.size:
        print(
            f"warning: the corpus is too small for vocab.size {config.size:,}; the vocabulary has "
            f"{tokenizer.vocab_size:,} tokens, as vocab.min_frequency is {config.min_frequency}\n"
            "  hint: use it as it is, give more text, or lower vocab.min_frequency"
        )
