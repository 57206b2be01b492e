"""What `bench_data.py` times in processes of their own: ours and the libraries' work on one text; prints JSON.

python scripts/bench_data_tasks.py ids-ours|ids-peer|ids-equal|vocab-peer|shape|merge ARGUMENT...
"""

import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bert_pretrain.text.fast_tokenizer import Encoder
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.vocab.counting import Counts

BLOCK_BYTES = 4 << 20  # as the token store feeds its encoder
PEER_SENTENCES = 10_000  # in one call of encode_batch_fast


def ids_ours(vocab: str, text: str) -> list[float]:
    """Return MB/s of a first pass with a fresh encoder, and of a second one that knows every chunk."""
    tokenizer = Tokenizer.load(Path(vocab))
    blocks = [with_starts(block) for block in blocks_of(Path(text))]
    megabytes = sum(len(block) for block, _ in blocks) / 1e6
    begin = time.perf_counter()
    encoder = Encoder(tokenizer)
    for block, starts in blocks:
        encoder.encode(block, starts)
    middle = time.perf_counter()
    for block, starts in blocks:
        encoder.encode(block, starts)
    return [megabytes / (middle - begin), megabytes / (time.perf_counter() - middle)]


def ids_peer(vocab: str, text: str, slice_bytes: str) -> float:
    """Return MB/s of `encode_batch_fast` on sentences that are Python strings already."""
    backend = library_tokenizer(Path(vocab))
    content = slice_of(Path(text), int(slice_bytes))
    found = content.decode().split("\n")
    batches = [found[first : first + PEER_SENTENCES] for first in range(0, len(found), PEER_SENTENCES)]
    begin = time.perf_counter()
    for batch in batches:
        backend.encode_batch_fast(batch, add_special_tokens=False)
    return len(content) / 1e6 / (time.perf_counter() - begin)


def ids_equal(vocab: str, text: str, slice_bytes: str) -> bool:
    """Whether ours and the library give the same ids, sentence by sentence."""
    content = slice_of(Path(text), int(slice_bytes))
    block, starts = with_starts(content)
    ids, offsets = Encoder(Tokenizer.load(Path(vocab))).encode(block, starts)
    backend, found, first = library_tokenizer(Path(vocab)), content.decode().split("\n"), 0
    for first in range(0, len(found), PEER_SENTENCES):
        encodings = backend.encode_batch_fast(found[first : first + PEER_SENTENCES], add_special_tokens=False)
        lengths = [len(encoding.ids) for encoding in encodings]
        flat = np.array([token for encoding in encodings for token in encoding.ids], dtype=ids.dtype)
        span = offsets[first : first + len(encodings) + 1]
        if np.diff(span).tolist() != lengths or not np.array_equal(ids[span[0] : span[-1]], flat):
            return False
    return True


def vocab_peer(text: str, size: str) -> int:
    """Train the library's vocabulary; returns its size."""
    from tokenizers import BertWordPieceTokenizer

    trained = BertWordPieceTokenizer()
    trained.train([text], vocab_size=int(size), show_progress=False)
    return int(trained.get_vocab_size())


def library_tokenizer(vocab: Path) -> Any:
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(vocab / "tokenizer.json"))
    backend.encode_special_tokens = True  # text such as [MASK] is text, as it is with us
    return backend


def blocks_of(text: Path) -> Iterator[bytes]:
    """Yield the sentences of a corpus in blocks that end at line ends, without the blank lines."""
    with text.open("rb") as file:
        while lines := file.readlines(BLOCK_BYTES):
            yield b"".join(line for line in lines if line.strip()).removesuffix(b"\n")


def slice_of(text: Path, num_bytes: int) -> bytes:
    """Return about so many bytes of sentences, taken evenly from the whole corpus."""
    with text.open("rb") as file:
        lines = [line for line in file if line.strip()]
    every = max(1, round(sum(map(len, lines)) / num_bytes))
    runs = [lines[first : first + 100] for first in range(0, len(lines), 100)]
    return b"".join(line for run in runs[::every] for line in run).removesuffix(b"\n")


def with_starts(block: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Return text as the encoder takes it: bytes, and where sentences begin."""
    text = np.frombuffer(block, dtype=np.uint8)
    return text, np.concatenate([[0], np.flatnonzero(text == ord("\n")) + 1])


def shape(text: str, kind: str, megabytes: str, target: str) -> list[str]:
    """Write sentences of a text, drawn again and again, in a shape that corpora have; returns the inputs."""
    sentences = [line for line in Path(text).read_text(encoding="utf-8").splitlines() if line]
    draw, place = np.random.default_rng(SHAPES.index(kind)), Path(target)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    if kind == "mix":
        share = str(float(megabytes) / len(SHAPES[:-1]))
        return [found for each in SHAPES[:-1] for found in shape(text, each, share, str(place / each))]
    length = 7000 / (sum(map(len, sentences)) / len(sentences) + 1)  # sentences of a document
    rows = ("\n".join(sentences[place] for place in draw.integers(0, len(sentences), max(2, draw.poisson(length))))
            for _ in range(round(float(megabytes) * 1e6 / 7000)))  # fmt: skip
    if kind == "small files":
        for number, row in enumerate(rows):
            (place / f"{number:07}.txt").write_text(row, encoding="utf-8")
    elif kind == "jsonl":
        with (place / "a.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": row}) + "\n" for row in rows)
    else:
        table = pa.table({"text": list(rows)})
        if kind == "save_to_disk":
            datasets.Dataset(table).save_to_disk(str(place / "saved"))
            return [str(place / "saved")]
        pq.write_table(table, place / "a.parquet")
    return [str(place)]


def merge() -> float:
    """Return the seconds per million different chunks that merging the counts of two tasks takes."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2):  # most words are in both
            chunks = {f"word{index}".encode(): 1 for index in range(number * 100_000, 500_000 + number * 100_000)}
            Counts(Counter(chunks)).save(Path(folder, str(number)))
        merged = Counts.load(Path(folder, "0"))
        begin = time.process_time()
        merged.add(Counts.load(Path(folder, "1")))
        merged.save(Path(folder, "2"))
        return (time.process_time() - begin) / 0.5


SHAPES = ("parquet", "save_to_disk", "jsonl", "small files", "mix")
TASKS: dict[str, Callable[..., Any]] = {
    "ids-ours": ids_ours,
    "ids-peer": ids_peer,
    "ids-equal": ids_equal,
    "vocab-peer": vocab_peer,
    "shape": shape,
    "merge": merge,
}

if __name__ == "__main__":
    print(json.dumps(TASKS[sys.argv[1]](*sys.argv[2:])))
