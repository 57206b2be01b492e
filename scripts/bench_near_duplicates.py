"""Measure `data.near_duplicates` on planted near duplicates: recall and false drops, time and memory.

Documents of the corpus are cut into passages. Of some, copies are planted in which a share of the words is replaced by
words drawn from the whole text. The truth is the exact Jaccard similarity of 5-token shingles, between each document
that is planted or left out and all earlier ones. Memory and time of a large corpus are measured on random signatures.

    python scripts/bench_near_duplicates.py --corpus corpus.jsonl.gz --work runs/near-duplicates
"""

import argparse
import itertools
import json
import shutil
import time
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from bert_pretrain.config import DataConfig
from bert_pretrain.config_file import load_config
from bert_pretrain.make_data import near_duplicates
from bert_pretrain.make_data.ingest import ingest
from bert_pretrain.make_data.near_duplicates import NUM_HASHES, SHINGLE_TOKENS, find_near_duplicates, write_signatures
from bert_pretrain.make_data.token_store import TokenStore
from bert_pretrain.parallel.executor import open_pool
from bert_pretrain.rng import stream
from bert_pretrain.storage.files import atomic_folder, write_json
from bert_pretrain.text import documents
from bert_pretrain.text.sources import resolve
from bert_pretrain.text.text_files import ByteRange
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.vocab.run import make_vocab

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
BANDS = (0.0, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 1.0)


@dataclass(frozen=True)
class Signatures:
    """Stands for a token store of which only the signatures are there."""

    folder: Path
    num_documents: int

    @property
    def first_documents(self) -> np.ndarray:
        return np.array([0, self.num_documents])


def main() -> None:
    options = _options()
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    for old in ("vocab", "stores"):
        shutil.rmtree(work / old, ignore_errors=True)
    passages = read_passages(options.corpus, options.passages, options.words)
    planted = plant(passages, options.planted)
    file = work / "passages.jsonl"
    file.write_text("".join(json.dumps({"text": " ".join(words)}) + "\n" for words in [*passages, *planted]))
    store = tokenise(file, work)
    left_out, figures = measure(store, options.threshold)
    similarities = true_similarities(store, range(len(passages), store.num_documents), left_out)
    report: dict[str, Any] = {
        "documents": store.num_documents,
        "tokens": sum(len(store.map(index, "ids")) for index in range(store.num_shards)),
        "by_true_similarity": table(similarities, left_out),
        **figures,
        **exactness(similarities, left_out, options.threshold),
        **on_random_signatures(work, options.random_documents, options.threshold),
    }
    for name, value in report.items():
        print(f"{name:<34}{value}")
    if options.json:
        write_json(options.json, report)


def read_passages(corpus: str, number: int, words: int) -> list[list[str]]:
    """Return the first passages of so many words of a corpus."""
    passages: list[list[str]] = []
    (source,) = resolve([corpus], DataConfig())
    for document in documents.read(ByteRange(source), DataConfig(), Counter()):
        found = document.text.split()
        passages += [found[begin : begin + words] for begin in range(0, len(found) - words + 1, words)]
        if len(passages) >= number:
            break
    return passages[:number]


def plant(passages: list[list[str]], number: int) -> list[list[str]]:
    """Return copies of passages drawn at random, as many for each share of words that are replaced."""
    rng = stream(1, "planted near duplicates")
    pool = [word for passage in passages for word in passage]
    planted = []
    for share in SHARES:
        for place in rng.choice(len(passages), number, replace=False).tolist():
            replaced = rng.random(len(passages[place])) < share
            drawn = rng.integers(0, len(pool), len(passages[place])).tolist()
            pairs = zip(passages[place], replaced.tolist(), drawn, strict=True)
            planted.append([pool[other] if is_new else word for word, is_new, other in pairs])
    return planted


def tokenise(file: Path, work: Path) -> TokenStore:
    """Return the token store of a file, with a vocabulary made from it."""
    config = load_config(settings=["vocab.size=8000", "data.sentence_splitter=lines"])
    tokenizer = Tokenizer.load(make_vocab(config, [str(file)], work / "vocab", workers=1))
    with open_pool(1, None, folders=[], files=[]) as pool:
        _, store = ingest(resolve([str(file)], config.data), tokenizer, config.data, work / "stores", pool)
    return store


def measure(store: TokenStore, threshold: float) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the documents that are left out, and what it took."""
    for folder in store.folder.glob("minhash-*"):
        shutil.rmtree(folder)
    with open_pool(1, None, folders=[], files=[]) as pool:
        _, signing = timed(lambda: write_signatures(store, pool))
    (left_out, counts), finding = timed(lambda: find(store, threshold))
    return left_out, {"counts": dict(counts), "signatures_cpu_seconds": signing, "comparison_cpu_seconds": finding}


def find(store: TokenStore, threshold: float) -> tuple[np.ndarray, Counter[str]]:
    return find_near_duplicates(store, threshold, np.zeros(0, dtype=np.int64), lambda numbers: np.ones(len(numbers)))


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.process_time()
    result = call()
    return result, round(time.process_time() - begin, 2)


def true_similarities(store: TokenStore, planted: range, left_out: np.ndarray) -> dict[int, float]:
    """Return the highest exact Jaccard similarity of each planted or left-out document to an earlier one."""
    sets = [shingle_set(ids) for ids in ids_of_documents(store)]
    containing: dict[bytes, list[int]] = defaultdict(list)
    best = {}
    for number, shingles in enumerate(sets):
        if number in planted or number in left_out:
            shared = Counter(itertools.chain.from_iterable(containing.get(shingle, ()) for shingle in shingles))
            found = (count / (len(shingles) + len(sets[earlier]) - count) for earlier, count in shared.items())
            best[number] = max(found, default=0.0)
        for shingle in shingles:
            containing[shingle].append(number)
    return best


def ids_of_documents(store: TokenStore) -> Iterator[np.ndarray]:
    for index in range(store.num_shards):
        ids = store.map(index, "ids")
        offsets = store.map(index, "sentence_offsets")[store.map(index, "document_offsets")].tolist()
        yield from (ids[begin:end] for begin, end in itertools.pairwise(offsets))


def shingle_set(ids: np.ndarray) -> set[bytes]:
    """Return the different runs of `SHINGLE_TOKENS` ids of a document, as bytes."""
    content, width = ids.tobytes(), ids.itemsize
    last = max(0, len(ids) - SHINGLE_TOKENS)
    return {content[begin * width : (begin + SHINGLE_TOKENS) * width] for begin in range(last + 1)}


def table(similarities: dict[int, float], left_out: np.ndarray) -> list[dict[str, Any]]:
    """Return how many documents there are in each band of true similarity, and how many are left out."""
    gone = set(left_out.tolist())
    rows = []
    for low, high in itertools.pairwise(BANDS):
        inside = [number for number, value in similarities.items() if low <= value < high or value == high == 1.0]
        rows.append({"from": low, "to": high, "documents": len(inside), "left_out": sum(n in gone for n in inside)})
    return rows


def exactness(similarities: dict[int, float], left_out: np.ndarray, threshold: float) -> dict[str, Any]:
    """Return recall and false drops by true similarity."""
    gone = set(left_out.tolist())
    similar = [number for number, value in similarities.items() if value >= threshold]
    false = [similarities[number] for number in gone if similarities[number] < threshold]
    return {
        "recall": f"{sum(number in gone for number in similar)} of {len(similar)}",
        "false_drops": f"{len(false)} of {len(gone)}",
        "lowest_similarity_left_out": round(min((similarities[number] for number in gone), default=1.0), 3),
    }


def on_random_signatures(work: Path, number: int, threshold: float) -> dict[str, Any]:
    """Return time and memory of the comparison of many documents without near duplicates."""
    store = cast(TokenStore, Signatures(work, number))
    with atomic_folder(near_duplicates.signature_folder(store, 0)) as folder:
        signatures = np.lib.format.open_memmap(folder / "signatures.npy", "w+", np.uint32, (number, NUM_HASHES))
        for begin in range(0, number, 1 << 14):
            rows = signatures[begin : begin + (1 << 14)]
            rows[:] = stream(begin, "random signatures").integers(0, 2**32, rows.shape, dtype=np.uint32)
    tracemalloc.start()
    (gone, _), seconds = timed(lambda: find(store, threshold))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    shutil.rmtree(near_duplicates.signature_folder(store, 0))
    return {
        "random_documents": number,
        "random_left_out": len(gone),
        "random_cpu_seconds": seconds,
        "random_peak_bytes_per_document": round(peak / number, 1),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", required=True, help="one input, such as corpus.jsonl.gz")
    parser.add_argument("--work", type=Path, required=True, help="folder of what is made on the way")
    parser.add_argument("--passages", type=int, default=10_000)
    parser.add_argument("--words", type=int, default=300, help="words per passage")
    parser.add_argument("--planted", type=int, default=300, help="near duplicates for each share of replaced words")
    parser.add_argument("--threshold", type=float, default=0.8)
    parser.add_argument("--random-documents", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
