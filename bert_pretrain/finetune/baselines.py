"""Baselines from word counts. They need no neural network and take seconds."""

import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from bert_pretrain.text.normalization import mostly_without_blanks, words_pattern


def fit_and_predict_tfidf(
    train: Sequence[Sequence[str]],
    labels: Sequence[Any],
    rows: Sequence[Sequence[str]],
    classes: Sequence[str],
) -> np.ndarray:
    """Fit a linear model on TF-IDF features of the training rows, and return its predictions for `rows`.

    Each row has one or two texts. The features are words or, for text without spaces between words (such as Chinese or
    Thai), characters and character bigrams. With `classes`, each label is a list of them: fits a logistic regression
    per class and returns probabilities, (rows, classes); a class without training rows has probability 0. If `classes`
    is empty, fits a ridge regression and returns numbers, (rows,).
    """
    from sklearn.compose import ColumnTransformer
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.pipeline import make_pipeline

    sample = "".join(text for texts in train[:1000] for text in texts)
    bigrams = {"analyzer": "char", "ngram_range": (1, 2)}
    options = bigrams if mostly_without_blanks(sample) else {"token_pattern": words_pattern()}
    columns = [index for index, texts in enumerate(zip(*train, strict=True)) if any(texts)]  # all may be empty
    features = ColumnTransformer([(str(index), TfidfVectorizer(**options), index) for index in columns])
    train_texts, texts = np.array(train, dtype=object), np.array(rows, dtype=object)
    if not classes:
        return make_pipeline(features, Ridge()).fit(train_texts, labels).predict(texts)
    truth = np.array([[name in label for name in classes] for label in labels])
    model = make_pipeline(features, OneVsRestClassifier(LogisticRegression(C=10.0, max_iter=1000)))
    with warnings.catch_warnings(action="ignore"):  # about classes that no row or every row has
        return model.fit(train_texts, truth).predict_proba(texts)


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


def is_clearly_better(
    score: float,
    baseline: float,
    num_rows: int,
    *,
    num_errors: float = 2.0,
) -> bool:
    """Return whether a score exceeds a baseline by more than `num_errors` standard errors of the baseline.

    The standard error is that of a proportion of `num_rows` rows; the baseline is clipped to [0, 1] for it.
    """
    share = min(1.0, max(0.0, baseline))
    return score - baseline > num_errors * (share * (1.0 - share) / num_rows) ** 0.5
