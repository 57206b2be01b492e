"""Stage 1, `vocab`: raw text to a tokenizer folder that opens in `transformers`.

All cores count the chunks of the text in one pass. From the counts, a WordPiece vocabulary is trained, whole words are
chosen, or an existing vocabulary is extended. Metrics are computed on held-out documents.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bert_pretrain.config import Config, VocabConfig
from bert_pretrain.errors import ConfigError, InputError
from bert_pretrain.io.files import checksums_of, damage_of_files, remove_temporaries
from bert_pretrain.io.manifest import Output, OutputState, read_record
from bert_pretrain.io.pool import open_pool, run_each
from bert_pretrain.text import documents
from bert_pretrain.text.corpus import Corpus
from bert_pretrain.text.readers import check_decoded, check_texts
from bert_pretrain.text.reasons import describe_reasons, join_reasons
from bert_pretrain.text.sources import Source, few_documents, finer_boundary
from bert_pretrain.text.text_files import ByteRange
from bert_pretrain.text.tokenizer import MAX_UNK_SHARE, Tokenizer
from bert_pretrain.text.tokenizer_folder import NORMALIZER_NAMES
from bert_pretrain.vocab.counting import Counts, count_groups
from bert_pretrain.vocab.extend import extend_vocabulary
from bert_pretrain.vocab.normalized import NormalizedWords, normalize
from bert_pretrain.vocab.wordpiece import choose_alphabet, choose_words, special_tokens, train_wordpiece

MAX_TASKS = 256  # maximum number of counting tasks; each of them has a table of counts


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
    """Write a tokenizer folder with a new or extended vocabulary, and return its path.

    The arguments are the options of the command `vocab`. If a vocabulary is extended, its tokenizer also sets the text
    processing; `lowercase` is its casing if the folder does not set it.
    """
    old = None if extend is None else Tokenizer.load(extend, "--extend", lowercase=lowercase)
    config = config.model_copy(update={"vocab": _checked(config.vocab, old)})
    whole_words = config.vocab.tokens == "words"
    corpus = Corpus.open(inputs, config.data, whole_words=whole_words, finds_language=not whole_words)
    text = corpus.training
    sources = list(text.sources)
    config = config.model_copy(update={"data": text.config})
    identity = {
        "inputs": [source.identity for source in sources],
        **_choices(config.vocab, old),
        "reading": config.data.model_dump(mode="json", include={"text_field", "strict", "language"}),
    }
    used = [extend, *(source.location for source in sources if source.is_local)]
    out = Output(output, "vocab", identity, used)
    with out.open(overwrite=overwrite) as state:
        if state is OutputState.COMPLETE:
            damage = damage_of_files(output, read_record(output).get("files", {}))
            if damage is None:
                print(f"up to date: {output}")
                return output
            print(f"{output} is damaged: {damage}; building the vocabulary again")
            out.reopen()
        remove_temporaries(output)
        counts = _count(sources, output, config, workers, scheduler)
        tokenizer, measured, metrics = _make(counts, old, config, inputs)
        tokenizer.save(output)
        body = {
            "config": {"vocab": config.vocab.model_dump(mode="json")},
            "tokenizer": {"hash": tokenizer.hash, "vocab_size": tokenizer.vocab_size},
            **text.record,
            "metrics": metrics,
            "files": checksums_of(output, tokenizer.files),
        }
        out.publish(body)
    _report(tokenizer, measured, metrics, config.vocab)
    if (few := few_documents(metrics["documents"])) and (finer := finer_boundary(sources)):
        print(f"warning: {few}, for make-data too\n  hint: {finer}")
    print(f"tokenizer folder: {output}")
    return output


def _checked(config: VocabConfig, old: Tokenizer | None) -> VocabConfig:
    """Return the configuration of a new vocabulary, or of an extension of `old`, after checks that need no text."""
    if old is not None:
        return _extending(old, config)
    if config.add_tokens is not None:
        raise ConfigError(
            "no vocabulary is given to add tokens to",
            where="vocab.add_tokens (--add-tokens)",
            remedy="add --extend FOLDER, or leave out the number",
        )
    _max_text_tokens(config)
    return config


def _extending(old: Tokenizer, config: VocabConfig) -> VocabConfig:
    """Return the configuration with the text processing of the old tokenizer."""
    if not old.is_word_piece or config.tokens == "words":
        raise ConfigError(
            "only a vocabulary of word pieces can be extended",
            where="vocab.tokens words" if old.is_word_piece else f"--extend {old.folder}",
            remedy="build a new vocabulary from all the text, without --extend",
        )
    rules = {NORMALIZER_NAMES[name]: value for name, value in old.settings.items()}
    for name, value in rules.items():
        if getattr(config, name) not in (VocabConfig.model_fields[name].default, value):
            raise ConfigError(
                f"the vocabulary to extend has the value {json.dumps(value)}",
                where=f"vocab.{name}",
                remedy="remove the setting, or build a new vocabulary",
            )
    return config.model_copy(update=rules)


def _choices(config: VocabConfig, old: Tokenizer | None) -> dict[str, Any]:
    """Return the settings that affect the vocabulary, and the hash of the old tokenizer."""
    if old is None:
        return {"vocab": config.model_dump(mode="json", exclude={"add_tokens"})}
    used = config.model_dump(mode="json", include={"add_tokens", "min_frequency", "seed"})
    return {"extends": old.hash, "vocab": used}


def _count(
    sources: list[Source],
    output: Path,
    config: Config,
    workers: int | None,
    scheduler: str | None,
) -> Counts:
    """Count all text in parallel, and add up the tables of counts, which pass through a temporary folder of the output.

    The tables are added in order, because the order decides which chunks are dropped.
    """
    part_bytes = documents.part_bytes_of(sources)
    parts = (part for source in sources for part in documents.cut(source.absolute, part_bytes))
    groups = list(enumerate(documents.group(parts, part_bytes)))
    per_task = max(1, -(-len(groups) // MAX_TASKS))
    batches = [groups[first : first + per_task] for first in range(0, len(groups), per_task)]
    shown = documents.progress_of([[part for _, parts in batch for part in parts] for batch in batches])
    files = [Path(source.location) for source in sources if source.is_local]
    counts = Counts()
    with (
        open_pool(workers, scheduler, folders=[output], files=files) as pool,
        tempfile.TemporaryDirectory(dir=output.absolute(), prefix=".counts-", suffix=".tmp") as folder,
    ):
        tasks = [(Path(folder, f"{number}"), batch) for number, batch in enumerate(batches)]
        work = partial(count_to_file, config=config)
        for file in run_each(
            work,
            tasks,
            workers=pool,
            description="count",
            **shown,
        ):
            counts.add(Counts.load(file))
            file.unlink()
    return counts


def count_to_file(task: tuple[Path, Sequence[tuple[int, Sequence[ByteRange]]]], config: Config) -> Path:
    """Count the numbered groups of byte ranges of a task, write the counts to its file, and return the file."""
    file, groups = task
    count_groups(groups, config).save(file)
    return file


def _make(
    counts: Counts,
    old: Tokenizer | None,
    config: Config,
    inputs: Sequence[str],
) -> tuple[Tokenizer, Counter[str], dict[str, Any]]:
    """Train or extend a vocabulary. Return its tokenizer, the words that measure it, and metrics for the manifest."""
    repairs_and_drops = join_reasons(counts.repairs_and_drops)
    check_texts(repairs_and_drops, counts.documents)
    if not counts.training:
        counts.training, counts.held_out = counts.held_out, Counter()
    normalized = normalize(counts, config.vocab, config.data.language, old)
    words, held_out = normalized.training, normalized.held_out
    check_decoded(repairs_and_drops, words.total() + held_out.total(), inputs)
    if not words:
        raise InputError("the inputs contain no text", where=inputs[0], remedy="give files that contain text")
    tokenizer, details = _train(normalized, config) if old is None else _extend(words, old, config.vocab)
    measured = held_out or words
    metrics = {
        "documents": counts.documents,
        "words": words.total(),
        "distinct_words": len(words),
        "dropped_rare_chunks": {"occurrences": counts.dropped_occurrences, "at_most_of_one": counts.undercount},
        "repairs_and_drops": repairs_and_drops,
        "measured_on": "held-out documents" if held_out else "the training text (no document was held out)",
        "normalization": normalized.metrics,
        **measure(tokenizer, measured),
        **({} if old is None else {"before": measure(old, measured)}),
        **details,
    }
    return tokenizer, measured, metrics


def _train(normalized: NormalizedWords, config: Config) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer of a new vocabulary, and metrics of its alphabet or words for the manifest."""
    words, vocab = normalized.training, config.vocab
    if vocab.tokens == "words":
        tokenizer = Tokenizer(choose_words(words, vocab), **asdict(normalized.rules))
        kept = [words[token] for token in tokenizer.tokens if words[token]]
        if not kept:
            raise InputError(
                f"no word occurs {vocab.min_frequency:,} times, so the vocabulary is empty",
                where="vocab.min_frequency",
                remedy="lower it, or add text",
            )
        share = sum(kept) / words.total()
        print(f"{len(kept):,} of {len(words):,} different words cover {share:.4%} of the text")
        return tokenizer, {"whole_words": {"distinct": len(words), "coverage": share}}
    alphabet = choose_alphabet(words, vocab.limit_alphabet, _max_text_tokens(vocab))
    tokens, divisor = train_wordpiece(words, alphabet, vocab)
    tokenizer = Tokenizer(tokens, **asdict(normalized.rules))
    metrics = {
        "characters": len(alphabet.characters),
        "inside_words": len(alphabet.inside),
        "coverage": alphabet.coverage,
        "left_out": len(alphabet.left_out),
        "most_frequent_left_out": alphabet.left_out[:50],
    }
    examples = f": {' '.join(alphabet.left_out[:10])}" if alphabet.left_out else ""
    rarer = f"{len(alphabet.left_out):,} rarer ones left out{examples}"
    print(f"alphabet: {len(alphabet.characters):,} characters cover {alphabet.coverage:.4%}, {rarer}")
    return tokenizer, {"alphabet": metrics, "min_word_count": int(divisor / 2) + 1}


def _max_text_tokens(config: VocabConfig) -> int:
    """Return the maximum number of tokens that are neither special nor unused; raise a ConfigError if it is 0."""
    num_reserved = len(special_tokens(config.unused_tokens))
    if config.size <= num_reserved:
        what = f"vocab.size is {config.size}, but there are {num_reserved} special and unused tokens"
        remedy = f"set it to {num_reserved} plus one or two tokens for each character of the text, or lower "
        remedy += f"vocab.unused_tokens ({config.unused_tokens})"
        raise ConfigError(what, where="vocab.size", remedy=remedy)
    return config.size - num_reserved


def _extend(words: Counter[str], old: Tokenizer, config: VocabConfig) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer of the extended vocabulary, and the new tokens for the manifest."""
    tokenizer, added = extend_vocabulary(words, old, add_tokens=config.add_tokens, min_frequency=config.min_frequency)
    if not added:
        raise InputError(
            "the vocabulary already has every frequent word of the inputs",
            where="--extend",
            remedy=f"use {old.folder} as it is, add more text, or lower vocab.min_frequency ({config.min_frequency})",
        )
    in_slots = sum(token["id"] < old.vocab_size for token in added)
    examples = ", ".join(f"{token['token']} ({' '.join(token['pieces'])})" for token in added[:5])
    print(f"{len(added):,} new: {in_slots:,} in unused slots, {len(added) - in_slots:,} at the end: {examples}, …")
    extends = {"folder": str(old.folder), "hash": old.hash, "vocab_size": old.vocab_size}
    return tokenizer, {"extends": extends, "added": added}


def measure(tokenizer: Tokenizer, words: Counter[str]) -> dict[str, Any]:
    """Return the shares of words, characters and tokens that are [UNK], and the mean number of tokens per word."""
    pieces = unk_words = characters = unk_characters = 0
    for word, count in words.items():
        ids = tokenizer.encode_word(word)
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


def _report(
    tokenizer: Tokenizer,
    measured: Counter[str],
    metrics: dict[str, Any],
    config: VocabConfig,
) -> None:
    print(f"{tokenizer.vocab_size:,} tokens from {metrics['words']:,} words in {metrics['documents']:,} documents")
    for name, values in (("", metrics), ("before, ", metrics.get("before"))):
        if values:
            words, characters = values["unk_share_of_words"], values["unk_share_of_characters"]
            unknown = f"[UNK] {words:.4%} of words, {characters:.4%} of characters"
            print(f"{name}on {metrics['measured_on']}: {unknown}, {values['pieces_per_word']:.3f} pieces per word")
    if dropped := metrics["dropped_rare_chunks"]["occurrences"]:
        print(f"the text has too many different words: {dropped:,} occurrences of rare ones are not counted")
    for line in describe_reasons(metrics["repairs_and_drops"]):
        print(f"corpus: {line}")
    if (min_count := metrics.get("min_word_count", 1)) > config.min_frequency:
        print(f"words with a count below {min_count:,} are ignored, because counts of a large corpus are scaled down")
    share = metrics["unk_share_of_words"]
    if share > MAX_UNK_SHARE and (hint := tokenizer.long_word_hint(measured)):
        print(f"warning: {share:.0%} of the words are [UNK]\n  hint: {hint}")
    elif "alphabet" in metrics and tokenizer.vocab_size < config.size:
        print(
            f"warning: the corpus is too small for vocab.size {config.size:,}: with vocab.min_frequency "
            f"{config.min_frequency}, the vocabulary has only {tokenizer.vocab_size:,} tokens\n"
            "  hint: use it as it is, add more text, or lower vocab.min_frequency"
        )
