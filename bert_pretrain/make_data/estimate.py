"""The dry run of `make-data`: estimate examples, memory, disk space and time from a sample.

The dry run processes the start of some inputs like a real run, in a temporary folder, and scales the results.
"""

import codecs
import hashlib
import json
import math
import re
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from bert_pretrain.config import Config, DataConfig, duration_text, names_of
from bert_pretrain.errors import InputError
from bert_pretrain.io.inputs import decompress, open_raw
from bert_pretrain.io.pool import progress_bar
from bert_pretrain.make_data import summary
from bert_pretrain.make_data.build import build_shard, open_records
from bert_pretrain.make_data.ingest import write_store_shard
from bert_pretrain.make_data.plan import make_plan
from bert_pretrain.make_data.token_store import TokenStore, store_shard_folder
from bert_pretrain.text import documents, readers
from bert_pretrain.text.encodings import as_utf8
from bert_pretrain.text.sources import READ_ERRORS, TEXT_FORMATS, Source, damaged, examined, is_mix
from bert_pretrain.text.text_files import ByteRange, last_character
from bert_pretrain.text.tokenizer import Tokenizer

SAMPLE_BYTES = 16 << 20
MIN_SOURCES, MAX_SOURCES = 16, 512  # inputs to sample
_BLOCK_BYTES = 1 << 13


@dataclass(frozen=True)
class Estimate:
    """The estimated output of a run, and the resources that it needs."""

    documents: float  # of all inputs
    tokens: float  # of all inputs, each counted once
    rows: float  # training examples
    held_out: float  # validation examples
    store_bytes: float  # disk space of the token store
    shard_bytes: float  # disk space of the Parquet shards
    core_seconds: float  # CPU time of all workers
    times_seen: float  # mean number of occurrences of a token of the training split in an epoch
    worker_bytes: float  # peak memory of a worker
    copies: int  # `data.dupe_factor`

    def describe(self, workers: int) -> str:
        """Return the estimate as aligned lines for the terminal."""
        duration = duration_text(float(math.ceil(2.0 + self.core_seconds / workers)))  # 2 seconds to start
        return (
            "dry run: estimated from a sample, nothing is written\n"
            f"corpus     {self.documents:,.0f} documents, {self.tokens:,.0f} tokens\n"
            f"training   {self.rows:,.0f} examples; {self.held_out:,.0f} for validation\n"
            f"           {summary.describe_times(self.times_seen, self.copies)}\n"
            f"memory     {_bytes(self.worker_bytes)} per worker\n"
            f"disk       {_bytes(self.shard_bytes)} of shards, {_bytes(self.store_bytes)} of token store\n"
            f"time       {duration} on {workers} cores like this one ({self.core_seconds / 3600:.2f} core hours)"
        )


def _bytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def estimate(config: Config, sources: Sequence[Source], tokenizer: Tokenizer, *, examine: bool = False) -> Estimate:
    """Estimate a run of `make-data` from a sample. With `examine`, open the sampled sources to detect their format."""
    data = config.data
    indices, represented, sizes, repeats = map(np.array, zip(*_choose(sources), strict=True))
    chosen = [sources[index] for index in indices]
    if examine:
        chosen = examined(chosen, data, whole_words=tokenizer.whole_words)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bar = enumerate(progress_bar(chosen, desc="sample", unit="input"))
        sampled = [sample_source(source, folder / f"{index}.txt", int(sizes[index]), data) for index, source in bar]
        samples, shares = zip(*sampled, strict=True)
        scales = represented / np.array(shares) * [source.fraction_read for source in chosen]
        shard, first_seconds, store_seconds = _write_store(folder, samples, tokenizer, data)
        counts = shard["parts"]
        tokens = np.array([each["tokens"] for each in counts])
        if not tokens.sum():
            where, remedy = sources[0].location, "give files that contain text"
            raise InputError("the inputs contain no text", where=where, remedy=remedy)
        corpus = summary.join_corpus([[each] for each in counts], [shard])
        summary.warn_of_unknown_tokens(corpus, chosen)
        summary.warn_of_repeated_sentences(corpus)
        if len(chosen) == len(sources) and (scales == 1).all():  # the sample is the whole corpus
            readers.check_texts(corpus["repairs_and_drops"], corpus["documents"])
            summary.checked_plan(TokenStore(folder, 1), corpus, chosen, tokenizer, folder / "plan", data)
        if (scales > 1).any() and data.next_sentence == "nsp" and corpus["documents"] < 2:
            # The sample has no second document for random Bs, but the corpus may. `sop` gives nearly as many pairs.
            data = data.model_copy(update={"next_sentence": "sop"})
        built, text_tokens, build_seconds = _build(folder, counts, chosen, tokenizer, data)
        rows, shard_bytes = (sum(each["record"][name] for each in built) for name in ("rows", "bytes"))
        single = sum(each["statistics"].get("single_sentence_spans", 0) for each in built)
        summary.warn_of_single_sentences(single / corpus["documents"], corpus, data)
        store_bytes = sum(file.stat().st_size for file in store_shard_folder(folder, 0).glob("*.npy"))
    scaled = tokens * scales  # tokens of the corpus that each sampled input represents
    scale = float(scaled.sum() / tokens.sum())  # size of the corpus relative to the sample
    weights = np.array([0.0 if source.is_validation else source.weight for source in chosen])
    # `distinct`: share of the text that is left without equal inputs. `copies`: how often training uses the corpus.
    distinct = float((scaled / repeats).sum() / scaled.sum()) if data.drop_duplicates else 1.0
    copies = data.dupe_factor * float((scaled * weights).sum() / scaled.sum()) * distinct
    # `held_out`: share of the text for validation. `holds_out`: whether this includes documents of training inputs.
    held_out = float(scaled[[source.is_validation for source in chosen]].sum() / scaled.sum())
    holds_out = not held_out or is_mix(sources, data)
    held_out += holds_out * data.validation_fraction * (1 - held_out)
    trained_copies = copies * (1 - holds_out * data.validation_fraction)
    mean_length = sum(each["statistics"]["tokens"] for each in built) / max(1, rows)
    times_seen = sum(each["statistics"]["maskable_tokens"] for each in built) / max(1, text_tokens)
    shard_tokens = mean_length * min(data.examples_per_shard, max(1.0, scale * copies * rows))
    return Estimate(
        documents=sum(
            each["documents"] * (num_inputs if source.boundary == "file" else by)
            for each, num_inputs, by, source in zip(counts, represented, scales, chosen, strict=True)
        ),
        tokens=scale * float(tokens.sum()),
        rows=scale * trained_copies * rows,
        held_out=scale * (held_out * distinct) * rows,
        store_bytes=scale * store_bytes,
        shard_bytes=scale * trained_copies * shard_bytes,
        # The first run also tokenizes new words. Their number grows with about the 0.55th power of the text length.
        core_seconds=scale * (store_seconds + trained_copies * build_seconds)
        + (first_seconds - store_seconds) * scale**0.55,
        times_seen=times_seen * copies / distinct / (1 - float(scaled[weights == 0].sum() / scaled.sum())),
        worker_bytes=max(230 << 20, (150 << 20) + 37 * shard_tokens),  # measured: tokenizing, building a shard
        copies=data.dupe_factor,
    )


def _write_store(
    folder: Path, samples: Sequence[ByteRange], tokenizer: Tokenizer, config: DataConfig
) -> tuple[dict[str, Any], float, float]:
    """Write the store shard of the samples twice, and return its summary and the CPU seconds of both runs.

    In the second run, all words are in the cache of the encoder.
    """
    seconds = []
    for number in (1, 0):
        start = time.process_time()
        shard = write_store_shard(samples, store_shard_folder(folder, number), tokenizer, config)
        seconds.append(time.process_time() - start)
    return shard, seconds[0], seconds[1]


def _build(
    folder: Path, counts: list[dict[str, int]], sources: Sequence[Source], tokenizer: Tokenizer, config: DataConfig
) -> tuple[list[dict[str, Any]], int, float]:
    """Build the shards of one copy of the sample; return their results, the tokens of the text, and CPU seconds."""
    once = config.model_copy(update={"dupe_factor": 1, "validation_fraction": 0.0})
    sources = [replace(source, weight=1.0, is_validation=False) for source in sources]
    for name in ("first", "data"):  # only the second run is timed, because start-up costs must not be scaled
        start = time.process_time()
        plan, _ = make_plan(TokenStore(folder, 1), counts, sources, tokenizer, folder / name, once)
        open_records(plan)
        built = [build_shard(plan, shard)[0] for shard in plan.shards]
    return built, plan.tokens["train"], time.process_time() - start


def _choose(sources: Sequence[Source]) -> list[tuple[int, float, int, int]]:
    """Choose the inputs to sample, separately for large and small inputs. Of equal inputs, only the first is sampled.

    Returns for each: its index, how many inputs it represents, how many bytes to read, and how many inputs equal it.
    """
    sizes = [source.size for source in sources]
    is_large = [size is None or size >= SAMPLE_BYTES // MIN_SOURCES for size in sizes]
    by_size: dict[int | None, list[int]] = {}
    for index, size in enumerate(sizes):
        by_size.setdefault(size, []).append(index)
    equal: dict[int, list[int]] = {}
    chosen = []
    for kind in set(is_large):
        group = [index for index, large in enumerate(is_large) if large is kind]
        num_bytes = np.array([sizes[index] or SAMPLE_BYTES for index in group], dtype=np.int64)
        num_samples = min(MAX_SOURCES, max(MIN_SOURCES, SAMPLE_BYTES // int(num_bytes.mean())))
        rows = np.unique(np.linspace(0, len(group) - 1, num_samples).astype(int))
        sample_bytes = SAMPLE_BYTES // len(rows) // len(set(is_large))
        represented = float(num_bytes.sum() / num_bytes[rows].sum())
        times_chosen: Counter[tuple[int, int]] = Counter()  # by the first of equal inputs and their number
        for index in (group[row] for row in rows.tolist()):
            if index not in equal:
                equal |= _equal_inputs(sources, by_size[sizes[index]])
            times_chosen[equal[index][0], len(equal[index])] += 1
        chosen += [(index, represented * times, sample_bytes, n) for (index, n), times in times_chosen.items()]
    return sorted(chosen)


def _equal_inputs(sources: Sequence[Source], indices: Sequence[int]) -> dict[int, list[int]]:
    """Map each of some inputs of the same size to the inputs that equal it in split, weight and first bytes.

    A dataset or URL equals only itself.
    """
    equal: dict[int, list[int]] = {}
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index in indices:
        source, kind = sources[index], tuple[object, ...]((index,))
        if len(indices) > 1 and source.is_local and source.size:
            with open(source.location, "rb") as file:
                kind = source.is_validation, source.weight, hashlib.blake2b(file.read(_BLOCK_BYTES)).digest()
        equal[index] = kinds.setdefault(kind, [])
        equal[index].append(index)
    return equal


def sample_source(source: Source, path: Path, size: int, config: DataConfig) -> tuple[ByteRange, float]:
    """Copy the start of an input to `path`, and return it as a byte range with its share of the input."""
    if source.format in TEXT_FORMATS:
        try:
            with open_raw(source.location) as raw, as_utf8(decompress(raw, source.location), source.encoding) as file:
                if source.format == "json":
                    content = _first_elements(file, source, size, config.max_record_bytes)
                else:
                    content = file.read(size)
                    content += _rest_of_record(file, content, source.format, config.max_record_bytes)
                is_cut = bool(file.read(1))
                share = _share(raw, file, len(content), source.size) if is_cut else 1.0
        except READ_ERRORS as error:
            raise damaged(source, error) from error
        if is_cut and source.format == "txt":
            content = content[: content.rfind(b"\n") + 1 or content.rfind(b" ") + 1 or last_character(content)]
        path.write_bytes(content)
        format_ = "jsonl" if source.format == "json" else source.format
        return ByteRange(replace(source, format=format_), unpacked=path), share
    num_documents = num_bytes = 0
    with path.open("w", encoding="utf-8") as opened:
        first = replace(source, format="stream") if source.format == "dataset" else source
        for document in documents.read(ByteRange(first), config, Counter()):
            num_documents += document.ends_document
            num_bytes += opened.write(json.dumps({names_of(config.text_field)[0]: document.text}) + "\n")
            if num_bytes > size:
                break
    share = min(1.0, max(1, num_documents) / max(1.0, readers.num_rows(source)))
    return ByteRange(replace(source, format="jsonl"), unpacked=path), share


def _share(raw: BinaryIO, file: BinaryIO, num_bytes: int, size: int | None) -> float:
    """Estimate which share of an input the first `num_bytes` bytes of `file` are. The caller has read these bytes.

    The share is measured by the position of `raw`. A decompressor reads `raw` in blocks of up to 900 KB, so this
    position is ahead of the output. To reduce the error, the function reads at least 2 MiB more. It continues until the
    position changes, but stops after 64 MiB, because a kilobyte can decompress to gigabytes.
    """
    position, total_bytes = raw.tell(), num_bytes
    measured = None
    while total_bytes < num_bytes + ((2 << 20) if measured else (64 << 20)):
        block = file.read(_BLOCK_BYTES)
        if not block:
            return num_bytes / total_bytes
        if raw.tell() != position:
            measured, position = (position, total_bytes), raw.tell()
        total_bytes += len(block)
    position, total_bytes = measured or (position, total_bytes)
    return min(1.0, position / size * num_bytes / total_bytes) if size else 1.0


def _first_elements(file: BinaryIO, source: Source, size: int, max_bytes: int) -> bytes:
    """Return the first records of an array of objects, or of objects over several lines, as JSON lines."""
    blocks = codecs.iterdecode(iter(partial(file.read, 1 << 16), b""), "utf-8-sig", "replace")
    lines: list[bytes] = []
    num_bytes = 0
    for element, _ in readers.json_values(blocks, ByteRange(source), max_bytes):
        lines.append(re.sub(r"[\r\n]", " ", element).encode() + b"\n")
        num_bytes += len(lines[-1])
        if num_bytes > size:
            break
    return b"".join(lines)


def _rest_of_record(file: BinaryIO, content: bytes, format_: str, max_bytes: int) -> bytes:
    """Read the rest of the last record of `content`, up to the maximum size of a record."""
    if format_ == "txt":
        return b""
    rest = [file.readline(max_bytes + 1)]
    num_bytes = len(rest[0])
    if format_ == "csv":  # a quoted field may contain line ends
        quotes = content.count(b'"') + rest[0].count(b'"')
        while quotes % 2 and num_bytes <= max_bytes and (line := file.readline(max_bytes + 1)):
            rest.append(line)
            num_bytes += len(line)
            quotes += line.count(b'"')
    return b"".join(rest)
