"""A baseline from word counts, without a network: it takes seconds on the same rows."""

import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from bert_pretrain.text.normalization import mostly_without_blanks, words_pattern

REGULARIZATION = 10.0
"""C of the logistic regression."""


def predict_from_words(
    train: Sequence[Sequence[str]], labels: Sequence[Any], rows: Sequence[Sequence[str]], classes: Sequence[str]
) -> np.ndarray:
    """Return what a linear model of TF-IDF weights predicts for rows of one or two texts.

    Where text has no blanks between words, such as Chinese or Thai, characters and pairs of them are counted instead
    of words. Without classes, labels are numbers and so are predictions, (rows,). With them these are probabilities,
    (rows, classes); a class that no training row has gets 0. Labels that are lists of classes have a model for each.
    """
    from scipy import sparse
    from sklearn.dummy import DummyClassifier
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.multiclass import OneVsRestClassifier

    beginning = "".join(text for texts in train[:1000] for text in texts)
    pairs = {"analyzer": "char", "ngram_range": (1, 2)}
    options = pairs if mostly_without_blanks(beginning) else {"token_pattern": words_pattern()}
    counts = []
    for texts, others in zip(zip(*train, strict=True), zip(*rows, strict=True), strict=True):
        if any(texts):  # second texts may all be empty
            vectorizer = TfidfVectorizer(**options)
            counts.append((vectorizer.fit_transform(texts), vectorizer.transform(others)))
    known, new = (sparse.hstack(columns).tocsr() for columns in zip(*counts, strict=True))
    if not classes:
        return Ridge().fit(known, labels).predict(new)
    if isinstance(labels[0], list):
        truth = np.array([[name in label for name in classes] for label in labels])
        with warnings.catch_warnings(action="ignore"):  # of classes that no row has, or every one
            each = OneVsRestClassifier(LogisticRegression(C=REGULARIZATION, max_iter=1000)).fit(known, truth)
            return np.asarray(each.predict_proba(new))
    is_one_class = len(set(labels)) == 1
    model = DummyClassifier() if is_one_class else LogisticRegression(C=REGULARIZATION, max_iter=1000)
    model.fit(known, labels)
    found = np.zeros((len(rows), len(classes)))
    found[:, [classes.index(name) for name in model.classes_]] = model.predict_proba(new)
    return found


def most_frequent_tags(
    train: Sequence[tuple[Sequence[str], Sequence[str]]], rows: Sequence[Sequence[str]], default: str
) -> list[list[str]]:
    """Return for each word of the rows the tag that it has most often in training, `default` for an unknown word."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for words, tags in train:
        for word, tag in zip(words, tags, strict=True):
            counts[word][tag] += 1
    best = {word: found.most_common(1)[0][0] for word, found in counts.items()}
    return [[best.get(word, default) for word in words] for words in rows]


def is_clearly_better(score: float, baseline: float, num_rows: int, *, errors: float = 2.0) -> bool:
    """Whether a score, between 0 and 1, is more than `errors` standard errors of a share above a baseline."""
    share = min(1.0, max(0.0, baseline))
    return score - baseline > errors * (share * (1.0 - share) / num_rows) ** 0.5
