"""Baselines from word counts. They need no neural network and take seconds."""

import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from bert_pretrain.text.normalization import mostly_without_blanks, words_pattern


def fit_and_predict_tfidf(
    train: Sequence[Sequence[str]], labels: Sequence[Any], rows: Sequence[Sequence[str]], classes: Sequence[str]
) -> np.ndarray:
    """Fit a linear model on TF-IDF features of the training rows, and return its predictions for `rows`.

    Each row has one or two texts. The features are words or, for text without spaces between words (such as Chinese or
    Thai), characters and character bigrams. With `classes`, fits a logistic regression (one per class if labels are
    lists) and returns probabilities, (rows, classes); a class without training rows has probability 0. If `classes` is
    empty, fits a ridge regression and returns numbers, (rows,).
    """
    from scipy import sparse
    from sklearn.dummy import DummyClassifier
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.multiclass import OneVsRestClassifier

    sample = "".join(text for texts in train[:1000] for text in texts)
    bigrams = {"analyzer": "char", "ngram_range": (1, 2)}
    options = bigrams if mostly_without_blanks(sample) else {"token_pattern": words_pattern()}
    features = []
    train_columns, row_columns = zip(*train, strict=True), zip(*rows, strict=True)  # first texts, second texts
    for train_column, row_column in zip(train_columns, row_columns, strict=True):
        if any(train_column):  # second texts may all be empty
            vectorizer = TfidfVectorizer(**options)
            features.append((vectorizer.fit_transform(train_column), vectorizer.transform(row_column)))
    train_features, row_features = (sparse.hstack(columns).tocsr() for columns in zip(*features, strict=True))
    if not classes:
        return Ridge().fit(train_features, labels).predict(row_features)
    model = LogisticRegression(C=10.0, max_iter=1000)
    if isinstance(labels[0], list):
        truth = np.array([[name in label for name in classes] for label in labels])
        with warnings.catch_warnings(action="ignore"):  # about classes that no row or every row has
            return np.asarray(OneVsRestClassifier(model).fit(train_features, truth).predict_proba(row_features))
    if len(set(labels)) == 1:
        model = DummyClassifier()
    model.fit(train_features, labels)
    probabilities = np.zeros((len(rows), len(classes)))
    probabilities[:, [classes.index(name) for name in model.classes_]] = model.predict_proba(row_features)
    return probabilities


def most_frequent_tags(
    train: Sequence[tuple[Sequence[str], Sequence[str]]], rows: Sequence[Sequence[str]], default: str
) -> list[list[str]]:
    """Tag each word with its most frequent tag in the training rows, or with `default` if the word is unknown."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for words, tags in train:
        for word, tag in zip(words, tags, strict=True):
            counts[word][tag] += 1
    best = {word: tag_counts.most_common(1)[0][0] for word, tag_counts in counts.items()}
    return [[best.get(word, default) for word in words] for words in rows]


def is_clearly_better(score: float, baseline: float, num_rows: int, *, num_errors: float = 2.0) -> bool:
    """Return whether a score exceeds a baseline by more than `num_errors` standard errors of the baseline.

    The standard error is that of a proportion of `num_rows` rows; the baseline is clipped to [0, 1] for it.
    """
    share = min(1.0, max(0.0, baseline))
    return score - baseline > num_errors * (share * (1.0 - share) / num_rows) ** 0.5
