"""The dry run of `make-data`: rows, disk and hours, estimated from a sample before anything is written.

The beginnings of some inputs go through the same steps as in a real run, in a temporary folder; the result is scaled.
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
from bert_pretrain.text.readers import array_elements
from bert_pretrain.text.sources import READ_ERRORS, TEXT_FORMATS, Source, damaged, examined, is_mix
from bert_pretrain.text.text_files import ByteRange, last_character
from bert_pretrain.text.tokenizer import Tokenizer

SAMPLE_BYTES = 16 << 20
MIN_SOURCES, MAX_SOURCES = 16, 512
_NEW_WORDS = 0.55
"""Tokenising a word for the first time takes long; text of n times the length has about n to this power as many."""
_START_SECONDS = 2.0
_INGEST_BYTES, _BUILD_BYTES, _BUILD_BYTES_PER_TOKEN = 230 << 20, 150 << 20, 37
"""Anonymous memory of a worker: at least, of a shard without tokens, and for each token of a shard."""
_BLOCK_BYTES = 1 << 13
_AHEAD_BYTES = 2 << 20
"""How far to read beyond a sample to learn its share."""
_MAX_AHEAD_BYTES = 64 << 20
"""The same where nothing more of the compressed file has to be read: a kilobyte may hold gigabytes."""


@dataclass(frozen=True)
class Estimate:
    """The output and the resources of a whole run, estimated."""

    documents: float
    tokens: float
    rows: float
    held_out: float
    store_bytes: float
    shard_bytes: float
    core_seconds: float
    times_seen: float
    """How often an epoch sees the text of the training split."""
    worker_bytes: float
    copies: int

    def describe(self, workers: int) -> str:
        """Return the estimate as aligned lines for the terminal."""
        duration = duration_text(float(math.ceil(_START_SECONDS + self.core_seconds / workers)))
        return (
            "estimated from a sample; nothing is written\n"
            f"corpus     {self.documents:,.0f} documents, {self.tokens:,.0f} tokens\n"
            f"training   {self.rows:,.0f} examples; {self.held_out:,.0f} for validation\n"
            f"           {summary.describe_times(self.times_seen, self.copies)}\n"
            f"memory     {_bytes(self.worker_bytes)} for each worker\n"
            f"disk       {_bytes(self.shard_bytes)} of shards, {_bytes(self.store_bytes)} of token store\n"
            f"time       {duration} on {workers} cores like this one ({self.core_seconds / 3600:.2f} core hours)"
        )


def _bytes(number: float) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def estimate(config: Config, sources: Sequence[Source], tokenizer: Tokenizer, *, looks: bool = False) -> Estimate:
    """Estimate a whole run of `make-data` from a sample; with `looks`, of sources that were resolved without."""
    data = config.data
    places, others, sizes, repeats = map(np.array, zip(*_choose(sources), strict=True))
    chosen = [sources[place] for place in places]
    if looks:
        chosen = [examined(source, data, whole_words=tokenizer.whole_words) for source in chosen]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        samples, shares = _samples(folder, chosen, sizes, data)
        scales = others / shares
        shard, seconds = _store(folder, samples, tokenizer, data)
        counts = shard["parts"]
        tokens = np.array([each["tokens"] for each in counts])
        if not tokens.sum():
            raise InputError(
                "the inputs hold no text", where=sources[0].location, remedy="give files with text in them"
            )
        corpus = summary.join_corpus([[each] for each in counts], [shard])
        summary.warn_of_unknown_tokens(corpus, chosen)
        summary.warn_of_repeated_sentences(corpus)
        if len(chosen) == len(sources) and (scales == 1).all():  # nothing is left to be estimated
            summary.checked_plan(TokenStore(folder, 1), corpus, chosen, tokenizer, folder / "plan", data)
        if (scales > 1).any() and data.next_sentence == "nsp" and corpus["documents"] < 2:
            # The sample has no other document to take a B from, the corpus may; `sop` gives nearly as many pairs.
            data = data.model_copy(update={"next_sentence": "sop"})
        # What only the first shard of a process takes is not scaled.
        _build(folder, counts, chosen, tokenizer, data, "first")
        begin = time.process_time()
        built, text_tokens = _build(folder, counts, chosen, tokenizer, data, "data")
        build_seconds = time.process_time() - begin
        rows, shard_bytes = (sum(each["record"][name] for each in built) for name in ("rows", "bytes"))
        single = sum(each["statistics"].get("single_sentence_spans", 0) for each in built)
        summary.warn_of_single_sentences(single, corpus, data.model_copy(update={"dupe_factor": 1}))
        store_bytes = sum(file.stat().st_size for file in store_shard_folder(folder, 0).glob("*.npy"))
    scaled = tokens * scales
    scale = float(scaled.sum() / tokens.sum())
    weights = np.array([0.0 if source.is_validation else source.weight for source in chosen])
    distinct = float((scaled / repeats).sum() / scaled.sum()) if data.drop_duplicates else 1.0
    copies = data.dupe_factor * float((scaled * weights).sum() / scaled.sum()) * distinct  # of the whole text
    held_out = _held_out_share(scaled, sources, chosen, data) * distinct
    length = sum(each["statistics"]["tokens"] for each in built) / max(1, rows)
    seen = sum(each["statistics"]["maskable_tokens"] for each in built) / max(1, text_tokens)
    per_shard = length * min(data.examples_per_shard, max(1.0, scale * copies * rows))
    return Estimate(
        documents=sum(
            each["documents"] * (number if source.boundary == "file" else by)
            for each, number, by, source in zip(counts, others, scales, chosen, strict=True)
        ),
        tokens=scale * float(tokens.sum()),
        rows=scale * copies * rows,
        held_out=scale * held_out * rows,
        store_bytes=scale * store_bytes,
        shard_bytes=scale * copies * shard_bytes,
        core_seconds=scale * (seconds[1] + copies * build_seconds) + (seconds[0] - seconds[1]) * scale**_NEW_WORDS,
        times_seen=seen * copies / distinct / (1 - float(scaled[weights == 0].sum() / scaled.sum())),
        worker_bytes=max(_INGEST_BYTES, _BUILD_BYTES + _BUILD_BYTES_PER_TOKEN * per_shard),
        copies=data.dupe_factor,
    )


def _samples(
    folder: Path, sources: Sequence[Source], sizes: np.ndarray, config: DataConfig
) -> tuple[list[ByteRange], np.ndarray]:
    """Read samples of `sizes` bytes; return them, and the share of its source's text that each is."""
    samples, shares = [], []
    for number, source in enumerate(progress_bar(sources, desc="sample", unit="input")):
        sample, share = sample_source(source, folder / f"{number}.txt", int(sizes[number]), config)
        samples.append(sample)
        shares.append(share / source.fraction)
    return samples, np.array(shares)


def _store(
    folder: Path, samples: Sequence[ByteRange], tokenizer: Tokenizer, config: DataConfig
) -> tuple[dict[str, Any], list[float]]:
    """Write the samples' store shard; returns its record, and the seconds of a first and of a second time.

    The second time all words are known.
    """
    seconds = []
    for number in (1, 0):
        begin = time.process_time()
        shard = write_store_shard(samples, store_shard_folder(folder, number), tokenizer, config)
        seconds.append(time.process_time() - begin)
    return shard, seconds


def _held_out_share(
    tokens: np.ndarray, sources: Sequence[Source], chosen: Sequence[Source], config: DataConfig
) -> float:
    """Return the share of the tokens, given by chosen source, that is held out."""
    held_out = float(tokens[[source.is_validation for source in chosen]].sum() / tokens.sum())
    if not held_out or is_mix(sources, config):
        held_out += config.validation_fraction * (1 - held_out)
    return held_out


def _build(
    folder: Path,
    counts: list[dict[str, int]],
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    config: DataConfig,
    name: str,
) -> tuple[list[dict[str, Any]], int]:
    """Build the shards of one copy of the sample; returns what is known of them, and the tokens of their text."""
    once = config.model_copy(update={"dupe_factor": 1, "validation_fraction": 0.0})
    sources = [replace(source, weight=1.0, is_validation=False) for source in sources]
    plan, _ = make_plan(TokenStore(folder, 1), counts, sources, tokenizer, folder / name, once)
    open_records(plan)
    return [build_shard(plan, shard)[0] for shard in plan.shards], plan.tokens["train"]


def _choose(sources: Sequence[Source]) -> list[tuple[int, float, int, int]]:
    """Return which inputs to sample, large and small ones apart, and of each: for how many inputs it stands, how many
    bytes to read, and how many inputs equal it. Of equal inputs one is chosen.
    """
    sizes = [source.size for source in sources]
    is_large = [size is None or size >= SAMPLE_BYTES // MIN_SOURCES for size in sizes]
    of_size: dict[int | None, list[int]] = {}
    for place, size in enumerate(sizes):
        of_size.setdefault(size, []).append(place)
    equal: dict[int, list[int]] = {}
    chosen = []
    for group in ([place for place, large in enumerate(is_large) if large is kind] for kind in set(is_large)):
        known = np.array([sizes[place] or SAMPLE_BYTES for place in group], dtype=np.int64)
        number = min(MAX_SOURCES, max(MIN_SOURCES, SAMPLE_BYTES // int(known.mean())))
        rows = np.unique(np.linspace(0, len(group) - 1, number).astype(int))
        size = SAMPLE_BYTES // len(rows) // len(set(is_large))
        others = float(known.sum() / known[rows].sum())
        firsts: Counter[tuple[int, int]] = Counter()  # the first of equal inputs, and how many there are
        for place in (group[row] for row in rows.tolist()):
            if place not in equal:
                equal |= _equal_inputs(sources, of_size[sizes[place]])
            firsts[equal[place][0], len(equal[place])] += 1
        chosen += [(place, others * times, size, repeats) for (place, repeats), times in firsts.items()]
    return sorted(chosen)


def _equal_inputs(sources: Sequence[Source], places: Sequence[int]) -> dict[int, list[int]]:
    """Return, for each of some inputs of equal size, those that are used alike and begin with the same bytes.

    Of datasets and URLs, that is not asked.
    """
    equal: dict[int, list[int]] = {}
    kinds: dict[tuple[object, ...], list[int]] = {}
    for place in places:
        source, kind = sources[place], tuple[object, ...]((place,))
        if len(places) > 1 and source.is_local and source.size:
            with open(source.location, "rb") as file:
                beginning = hashlib.blake2b(file.read(_BLOCK_BYTES)).digest()
            kind = source.is_validation, source.weight, beginning
        equal[place] = kinds.setdefault(kind, [])
        equal[place].append(place)
    return equal


def sample_source(source: Source, path: Path, size: int, config: DataConfig) -> tuple[ByteRange, float]:
    """Write the beginning of an input to `path`; returns that, to be read there, and which share of the whole it is."""
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
    """Return which share of an input its first `num_bytes` are, which have been read from `file`.

    A decompressor has read further in `raw` than what it gave so far: up to 128 KiB, or a block of 900 KB. What it
    gives before it has to read more is what those bytes hold.
    """
    position, held = raw.tell(), num_bytes
    measured = None
    while held < num_bytes + (_AHEAD_BYTES if measured else _MAX_AHEAD_BYTES):
        block = file.read(_BLOCK_BYTES)
        if not block:
            return num_bytes / held
        if raw.tell() != position:
            measured, position = (position, held), raw.tell()
        held += len(block)
    position, held = measured or (position, held)
    return min(1.0, position / size * num_bytes / held) if size else 1.0


def _first_elements(file: BinaryIO, source: Source, size: int, max_bytes: int) -> bytes:
    """Return elements from the beginning of a JSON array, as JSON lines."""
    blocks = codecs.iterdecode(iter(partial(file.read, 1 << 16), b""), "utf-8-sig", "replace")
    lines: list[bytes] = []
    num_bytes = 0
    for element, _ in array_elements(blocks, ByteRange(source), max_bytes):
        lines.append(re.sub(r"[\r\n]", " ", element).encode() + b"\n")
        num_bytes += len(lines[-1])
        if num_bytes > size:
            break
    return b"".join(lines)


def _rest_of_record(file: BinaryIO, content: bytes, format_: str, max_bytes: int) -> bytes:
    """Read on from where `content` ends to the end of a record, or until the record is larger than allowed."""
    if format_ == "txt":
        return b""
    rest = [file.readline(max_bytes + 1)]
    num_bytes = len(rest[0])
    if format_ == "csv":  # where a quoted field may contain line ends
        quotes = content.count(b'"') + rest[0].count(b'"')
        while quotes % 2 and num_bytes <= max_bytes and (line := file.readline(max_bytes + 1)):
            rest.append(line)
            num_bytes += len(line)
            quotes += line.count(b'"')
    return b"".join(rest)
