"""Sentence vectors of a pretrained model before and after `finetune similarity`, and word counts.

It is trained on sentences, and on pairs of adjacent passages, both of plain text. The task is retrieval on documents
that training did not see: of two adjacent passages of a document, the second is to be found by the first among the
second passages of all documents. Prints a Markdown table. The same command again continues where it stopped.

    python scripts/bench_sentences.py CORPUS --model MODEL --work OUT --language en [--seeds 1 2 3]

CORPUS has a sentence per line and blank lines between documents. MODEL is to be pretrained on OUT/train.txt, which
`--split-only` writes.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from bench_learning import read_documents, split_corpus
from embed_picture import random_network

from bert_pretrain import rng
from bert_pretrain.config import TrainConfig
from bert_pretrain.finetune.classify import Example
from bert_pretrain.finetune.run import finetune
from bert_pretrain.finetune.settings import Settings
from bert_pretrain.finetune.similarity import Similarity
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.tools.embed import embed

PASSAGE_SENTENCES = 2
MAX_PAIRS = 4
"""Of each document."""
MIN_CHARACTERS = {"en": 40, "zh": 12}
"""Of a sentence to train on."""


def main() -> None:
    options = parse_arguments()
    texts = split_corpus(options.corpus, options.work)
    if options.split_only:
        return
    pairs = passage_pairs(texts[options.split], " " if options.language == "en" else "")
    rows = {"sentences": write_sentences(texts["train"], options), "pairs": write_pairs(texts["train"], options)}
    scores = {}
    random = options.work / "random"
    if not random.exists():
        random_network(options.model, random)
    ways: dict[str, Callable[[], np.ndarray]] = {
        "word counts (TF-IDF)": lambda: word_counts(passages_of(pairs), options.language),
        "random weights, mean": lambda: vectors_of(random, pairs, options.work),
        "pretrained, mean": lambda: vectors_of(options.model, pairs, options.work),
        "pretrained, mean, centred": lambda: centred(vectors_of(options.model, pairs, options.work)),
    }
    for name, make in ways.items():
        scores[name] = [retrieval(pairs, make(), options.model)]
    for kind, name in (("sentences", "trained on sentences"), ("pairs", "trained on adjacent passages")):
        tuned = [train(options, rows[kind], seed) for seed in options.seeds]
        scores[name] = [retrieval(pairs, vectors_of(folder, pairs, options.work), options.model) for folder in tuned]
    print("\n".join(table(scores, len(pairs))))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--model", type=Path, help="a pretrained folder")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--language", choices=tuple(MIN_CHARACTERS), default="en")
    parser.add_argument("--split", choices=("dev", "test"), default="test", help="documents that are retrieved")
    parser.add_argument("--split-only", action="store_true", help="only write OUT/train.txt and the other splits")
    parser.add_argument("--texts", type=int, default=2000, help="sentences, or pairs of passages, to train on")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()
    if options.model is None and not options.split_only:
        parser.error("--model is missing")
    return options


def passage_pairs(documents: Path, blank: str) -> list[Example]:
    """Return adjacent passages, evenly spread over each document."""
    pairs: list[Example] = []
    for document in read_documents(documents):
        lines = document.split("\n")
        size = 2 * PASSAGE_SENTENCES
        starts = range(0, len(lines) - size + 1, size)
        step = max(1, -(-len(starts) // MAX_PAIRS))
        for start in starts[::step]:
            first, second = (
                blank.join(lines[begin : begin + PASSAGE_SENTENCES]) for begin in (start, start + PASSAGE_SENTENCES)
            )
            pairs.append(Example(len(pairs), "", first, second, None))
    return pairs


def passages_of(pairs: list[Example]) -> list[str]:
    return list(dict.fromkeys(text for pair in pairs for text in (pair.text, str(pair.pair))))


def write_sentences(documents: Path, options: argparse.Namespace) -> Path:
    """Write some sentences of the training documents, drawn at random."""
    path: Path = options.work / f"sentences-{options.texts}.txt"
    if not path.exists():
        lines = documents.read_text(encoding="utf-8").splitlines()
        long = [line for line in lines if len(line) >= MIN_CHARACTERS[options.language]]
        drawn = rng.stream(0, "sentences").permutation(len(long))[: options.texts]
        path.write_text("\n".join(long[index] for index in drawn) + "\n", encoding="utf-8")
    return path


def write_pairs(documents: Path, options: argparse.Namespace) -> Path:
    """Write some pairs of adjacent passages of the training documents, drawn at random."""
    path: Path = options.work / f"pairs-{options.texts}.jsonl"
    if not path.exists():
        pairs = passage_pairs(documents, " " if options.language == "en" else "")
        drawn = rng.stream(0, "pairs").permutation(len(pairs))[: options.texts]
        rows = [{"text": pairs[index].text, "pair": pairs[index].pair} for index in drawn]
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def train(options: argparse.Namespace, rows: Path, seed: int) -> Path:
    pair_field = "pair" if rows.suffix == ".jsonl" else None
    settings = Settings(epochs=1, learning_rate=options.learning_rate, seed=seed, pair_field=pair_field)
    folder: Path = options.work / f"{rows.stem}-{options.learning_rate:g}-s{seed}"
    return finetune("similarity", options.model, train=str(rows), output=folder, settings=settings)


def vectors_of(model: Path, pairs: list[Example], work: Path) -> np.ndarray:
    """Return the vectors of all passages of the pairs, (passages, size)."""
    (work / "passages.txt").write_text("\n".join(passages_of(pairs)) + "\n", encoding="utf-8")
    embed(model, [str(work / "passages.txt")], work / "passages.npy", config=TrainConfig(precision="fp32"))
    return np.asarray(np.load(work / "passages.npy"))


def centred(vectors: np.ndarray) -> np.ndarray:
    return np.asarray(vectors - vectors.mean(axis=0))


def word_counts(passages: list[str], language: str) -> np.ndarray:
    """Return word counts, in Chinese counts of characters and pairs of characters, weighted by inverse frequency."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    analysis = {"analyzer": "char", "ngram_range": (1, 2)} if language == "zh" else {}
    return np.asarray(TfidfVectorizer(sublinear_tf=True, **analysis).fit_transform(passages).toarray())


def retrieval(pairs: list[Example], vectors: np.ndarray, model: Path) -> dict[str, float]:
    """Return the metrics of `finetune similarity` for vectors of all passages."""
    task = Similarity(Settings(), Tokenizer.load(model))
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-12)
    found = task.compare(pairs, dict(zip(passages_of(pairs), unit, strict=True)))
    return task.score(pairs, found)


def table(scores: dict[str, list[dict[str, float]]], count: int) -> list[str]:
    lines = [f"{count:,} pairs of passages", "", "| vectors | MRR | accuracy at 1 |", "|---|---|---|"]
    for name, runs in scores.items():
        cells = []
        for metric, form in (("mrr", "{:.3f}"), ("accuracy_at_1", "{:.1%}")):
            values = [run[metric] for run in runs]
            spread = f" ({form.format(min(values))}–{form.format(max(values))})" if len(values) > 1 else ""
            cells.append(form.format(float(np.mean(values))) + spread)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
