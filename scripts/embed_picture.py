"""Draw what a model makes of documents from several sources: a point each in two dimensions, coloured by source.

A sanity check that a person can look at, with figures beside it: how often the nearest neighbour of a text, by the
cosine of their vectors, is of the same source (chance for comparison), and the silhouette. The same figures for plain
word counts and for the network with random weights say how much of it the pretraining has brought.

    python scripts/embed_picture.py runs/base/train/model novels.txt abstracts.txt peps.txt --output sources.png
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bert_pretrain import rng
from bert_pretrain.config import TrainConfig
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.folder import read_config
from bert_pretrain.model.huggingface import save_model
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.tools.embed import POOLINGS, embed
from bert_pretrain.tools.texts import Texts


def main() -> None:
    arguments = _arguments(sys.argv[1:])
    sources = [Path(name).name.partition(".")[0] for name in arguments.sources]
    texts, labels = _sample(arguments.sources, arguments.texts)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        random_network(Path(arguments.model), folder / "random")
        (folder / "texts.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
        vectors = {
            name: _embedded(model, folder, arguments.pooling)
            for name, model in (("this model", Path(arguments.model)), ("random weights", folder / "random"))
        }
    vectors["word counts"] = _word_counts(texts)
    shares = np.bincount(labels) / len(labels)
    print(f"\n{len(texts):,} texts of {len(sources)} sources, pooling {arguments.pooling}")
    print(f"{'':<16}{'nearest neighbour of the same source':>38}{'silhouette':>12}")
    for name, found in vectors.items():
        print(f"{name:<16}{_neighbour_accuracy(found, labels):>38.1%}{_silhouette(found, labels):>12.3f}")
    print(f"{'chance':<16}{float((shares**2).sum()):>38.1%}{0.0:>12.3f}")
    _draw(vectors["this model"], labels, sources, arguments.output, arguments.projection)
    print(f"picture: {arguments.output}")


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model folder")
    parser.add_argument("sources", nargs="+", help="a file of texts for each source, one a line or record")
    parser.add_argument("--output", type=Path, default=Path("sources.png"))
    parser.add_argument("--texts", type=int, default=400, help="of each source at most, drawn at random")
    parser.add_argument("--pooling", choices=POOLINGS["sentence"], default="mean")
    parser.add_argument("--projection", choices=("pca", "tsne"), default="tsne")
    return parser.parse_args(words)


def _sample(names: Sequence[str], most: int) -> tuple[list[str], np.ndarray]:
    """Return texts on one line each, and the number of the source of each."""
    chosen: list[str] = []
    labels: list[int] = []
    for number, name in enumerate(names):
        texts = [" ".join(text.text.split()) for text in Texts.open([name], "text", skip_empty=True)]
        drawn = rng.stream(0, "picture", source=number).permutation(len(texts))[:most]
        chosen += [texts[index] for index in drawn]
        labels += [number] * len(drawn)
    return chosen, np.array(labels)


def random_network(model: Path, folder: Path) -> None:
    """Write a model of the same sizes and vocabulary that has learnt nothing."""
    config, vocab_size = read_config(model, "MODEL")
    network = BertForPreTraining(config, vocab_size)
    network.initialize(0)
    folder.mkdir()
    save_model(network, folder, Tokenizer.load(model))


def _embedded(model: Path, folder: Path, pooling: str) -> np.ndarray:
    """Return the vectors of `texts.txt` in a scratch folder."""
    embed(model, [str(folder / "texts.txt")], folder / "v.npy", config=TrainConfig(precision="fp32"), pooling=pooling)
    return _unit(np.load(folder / "v.npy"))


def _word_counts(texts: Sequence[str]) -> np.ndarray:
    from sklearn.feature_extraction.text import TfidfVectorizer

    return np.asarray(TfidfVectorizer(max_features=2000).fit_transform(texts).toarray())


def _unit(vectors: np.ndarray) -> np.ndarray:
    """Return vectors without what all have in common, and of length 1."""
    centred = vectors - vectors.mean(axis=0)
    return centred / np.linalg.norm(centred, axis=1, keepdims=True).clip(1e-12)


def _neighbour_accuracy(vectors: np.ndarray, labels: np.ndarray) -> float:
    cosines = vectors @ vectors.T
    np.fill_diagonal(cosines, -np.inf)
    return float((labels[cosines.argmax(axis=1)] == labels).mean())


def _silhouette(vectors: np.ndarray, labels: np.ndarray) -> float:
    from sklearn.metrics import silhouette_score

    return float(silhouette_score(vectors, labels, metric="cosine"))


def _draw(vectors: np.ndarray, labels: np.ndarray, sources: Sequence[str], output: Path, projection: str) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    perplexity = min(30, (len(labels) - 1) / 3)
    tsne = TSNE(2, metric="cosine", init="pca", perplexity=perplexity, random_state=0)
    projector = PCA(2) if projection == "pca" else tsne
    points = projector.fit_transform(vectors)
    figure, axes = pyplot.subplots(figsize=(8, 6.5), layout="constrained")
    for number, name in enumerate(sources):
        chosen = points[labels == number]
        axes.scatter(chosen[:, 0], chosen[:, 1], s=10, alpha=0.7, linewidths=0, label=f"{name} ({len(chosen):,})")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.legend(loc="best", markerscale=2)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=130)


if __name__ == "__main__":
    main()
