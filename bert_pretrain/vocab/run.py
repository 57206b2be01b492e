"""Stage 1, `vocab`: raw text to a tokenizer folder that opens in `transformers`.

Chunks are counted in one pass over the text, on all cores; the vocabulary is trained from the counts, and measured on
documents it has not seen.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bert_pretrain import documents, manifest
from bert_pretrain.config import Config
from bert_pretrain.documents import Part
from bert_pretrain.errors import ConfigError, DataError, InputError
from bert_pretrain.executor import Pool, open_pool, run_each
from bert_pretrain.files import exclusive, remove_temporaries
from bert_pretrain.manifest import Progress
from bert_pretrain.sources import resolve
from bert_pretrain.tokenizer import FILES, Tokenizer
from bert_pretrain.vocab.alphabet import Alphabet, choose_alphabet
from bert_pretrain.vocab.counting import Counts, count_parts, count_words
from bert_pretrain.vocab.wordpiece import special_tokens, train_wordpiece


def make_vocab(
    config: Config,
    inputs: Sequence[str],
    output: Path,
    *,
    workers: int | None = None,
    scheduler: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a tokenizer folder and return its path.

    Args:
        config: its sections `vocab` and `data` are used.
        inputs: files, globs, folders, URLs or `dataset:` names.
        output: the tokenizer folder to write.
        workers: processes; all cores when None.
        scheduler: the address of a Dask scheduler whose workers count instead.
        overwrite: move another output aside instead of refusing it.

    Raises:
        UserError: for a mistake in the inputs, the configuration or the folder.
    """
    vocab = config.vocab
    sources = [source for source in resolve(inputs, config.data) if not source.is_validation]
    identity = {
        "inputs": [source.identity for source in sources],
        "vocab": vocab.model_dump(mode="json"),
        "reading": {"text_field": config.data.text_field, "strict": config.data.strict},
    }
    with exclusive(output):
        if manifest.claim(output, "vocab", identity, overwrite=overwrite) is Progress.COMPLETE:
            if _is_intact(output):
                print(f"up to date: {output}")
                return output
            print(f"a file of {output} is missing or damaged; the vocabulary is made anew")
            manifest.reopen(output)
        remove_temporaries(output)
        part_bytes = documents.part_bytes_of(sources)
        parts = (part for source in sources for part in documents.cut(source.absolute, part_bytes))
        groups = documents.group(parts, part_bytes)
        tasks = [_CountTask(parts, number, config) for number, parts in enumerate(groups)]
        files = [Path(source.location) for source in sources if source.is_local]
        with open_pool(workers, scheduler, folders=[], files=files) as pool:
            counts = _count(tasks, pool)
        words = count_words(counts.learned, vocab)
        if not words:
            raise InputError("the inputs hold no text", where=str(inputs[0]), remedy="give files with text in them")
        alphabet = choose_alphabet(words, vocab.limit_alphabet, _room_for_alphabet(config))
        tokenizer = Tokenizer(
            train_wordpiece(words, alphabet, vocab),
            lowercase=vocab.lowercase,
            strip_accents=vocab.strip_accents,
            handle_chinese_chars=vocab.handle_chinese_chars,
        )
        tokenizer.save(output)
        held_out = count_words(counts.held_out, vocab)
        figures = {
            "documents": counts.documents,
            "words": words.total(),
            "distinct_words": len(words),
            "dropped_rare_chunks": {"occurrences": counts.dropped_occurrences, "at_most_of_one": counts.undercount},
            "repairs_and_drops": {reason: count for reason, count in sorted(counts.repairs_and_drops.items()) if count},
            "alphabet": _describe_alphabet(alphabet),
            "measured_on": "held-out documents" if held_out else "the training text: too few documents to hold one out",
            **measure(tokenizer, held_out or words),
        }
        body = {
            "config": {"vocab": vocab.model_dump(mode="json")},
            "tokenizer": {"hash": tokenizer.hash, "vocab_size": tokenizer.vocab_size},
            "inputs": [{"location": source.location, **source.identity} for source in sources],
            "figures": figures,
        }
        manifest.complete(output, "vocab", identity, body)
    _report(tokenizer, figures, config)
    print(f"tokenizer folder: {output}")
    return output


def _is_intact(output: Path) -> bool:
    try:
        found = Tokenizer.load(output)
    except DataError:
        return False
    is_same = found.hash == manifest.read_manifest(output, "vocab", "--output")["tokenizer"]["hash"]
    return is_same and all((output / name).is_file() for name in FILES)


@dataclass(frozen=True)
class _CountTask:
    parts: tuple[Part, ...]
    number: int
    config: Config


def _count_task(task: _CountTask) -> Counts:
    counts = count_parts(task.parts, task.number, task.config)
    documents.check_unchanged(task.parts)
    return counts


def _count(tasks: list[_CountTask], pool: Pool) -> Counts:
    weights = [float(sum(part.num_bytes for part in task.parts)) for task in tasks]
    counts = Counts()
    for result in run_each(_count_task, tasks, workers=pool, description="count", unit="B", weights=weights):
        counts.add(result)
    return counts


def _room_for_alphabet(config: Config) -> int:
    reserved = len(special_tokens(config.vocab.unused_tokens))
    if config.vocab.size <= reserved:
        raise ConfigError(
            f"vocab.size is {config.vocab.size}, and special and unused tokens alone are {reserved}",
            where="vocab.size",
            remedy="raise it, or lower vocab.unused_tokens",
        )
    return config.vocab.size - reserved


def measure(tokenizer: Tokenizer, words: Counter[str]) -> dict[str, Any]:
    """Return the share of words that are [UNK], of tokens that are, and the pieces a word takes."""
    texts = list(words)
    pieces = unk_words = 0
    for word, encoding in zip(texts, tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False), strict=True):
        pieces += len(encoding.ids) * words[word]
        unk_words += words[word] if encoding.ids == [tokenizer.unk_id] else 0
    total = words.total()
    return {
        "measured_words": total,
        "unk_share_of_words": unk_words / total,
        "unk_share_of_tokens": unk_words / pieces,
        "pieces_per_word": pieces / total,
    }


def _describe_alphabet(alphabet: Alphabet) -> dict[str, Any]:
    return {
        "characters": len(alphabet.characters),
        "inside_words": len(alphabet.inside),
        "coverage": alphabet.coverage,
        "left_out": len(alphabet.left_out),
        "most_frequent_left_out": alphabet.left_out[:50],
    }


def _report(tokenizer: Tokenizer, figures: dict[str, Any], config: Config) -> None:
    alphabet = figures["alphabet"]
    examples = " ".join(alphabet["most_frequent_left_out"][:10])
    print(
        f"{tokenizer.vocab_size:,} tokens from {figures['words']:,} words in {figures['documents']:,} documents\n"
        f"alphabet: {alphabet['characters']:,} characters cover {alphabet['coverage']:.4%}, "
        f"{alphabet['left_out']:,} rarer ones left out{': ' + examples if examples else ''}\n"
        f"on {figures['measured_on']}: [UNK] {figures['unk_share_of_words']:.4%} of words, "
        f"{figures['pieces_per_word']:.3f} pieces a word"
    )
    if dropped := figures["dropped_rare_chunks"]["occurrences"]:
        print(
            f"the text has too many different words to keep: {dropped:,} occurrences of rare ones are not counted, "
            f"at most {figures['dropped_rare_chunks']['at_most_of_one']:,} of any one"
        )
    for reason, count in figures["repairs_and_drops"].items():
        print(f"corpus: {count:,} {reason.replace('_', ' ')}")
    if tokenizer.vocab_size < config.vocab.size:
        print(
            f"warning: the corpus is too small for vocab.size {config.vocab.size:,}; "
            f"the vocabulary has {tokenizer.vocab_size:,} tokens"
        )
