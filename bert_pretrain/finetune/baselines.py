"""What words alone tell, without a network: a baseline in seconds, from the same rows."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from bert_pretrain.text.sentences import count_letters

REGULARIZATION = 10.0
"""C of the logistic regression."""


def predict_from_words(
    train: Sequence[Sequence[str]], labels: Sequence[Any], rows: Sequence[Sequence[str]], classes: Sequence[str]
) -> np.ndarray:
    """Return what a linear model of TF-IDF weights predicts for rows of one or two texts.

    Where most letters are Chinese, characters and pairs of them are counted instead of words. Without classes,
    labels are numbers and so are predictions, (rows,). With them these are probabilities, (rows, classes); a class
    that no training row has gets 0.
    """
    from scipy import sparse
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression, Ridge

    sample = "".join(text for texts in train[:1000] for text in texts)
    ideographs, letters = count_letters(sample)
    is_chinese = 2 * ideographs > letters
    words, characters = {"token_pattern": r"\w+|[^\w\s]"}, {"analyzer": "char", "ngram_range": (1, 2)}
    counts = []
    for own, others in zip(zip(*train, strict=True), zip(*rows, strict=True), strict=True):
        if not any(own):
            continue  # second texts, all of them empty
        vectorizer = TfidfVectorizer(**(characters if is_chinese else words))
        counts.append((vectorizer.fit_transform(own), vectorizer.transform(others)))
    known, new = (sparse.hstack(columns).tocsr() for columns in zip(*counts, strict=True))
    if not classes:
        return Ridge().fit(known, labels).predict(new)
    found = np.zeros((len(rows), len(classes)))
    if len(set(labels)) == 1:
        found[:, classes.index(labels[0])] = 1.0
        return found
    model = LogisticRegression(C=REGULARIZATION, max_iter=1000).fit(known, labels)
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


def is_clearly_better(score: float, baseline: float, num_rows: int) -> bool:
    """Whether a score, between 0 and 1, is more than two standard errors of a share above a baseline."""
    share = float(np.clip(baseline, 0.0, 1.0))
    return score - baseline > 2.0 * float(np.sqrt(share * (1.0 - share) / num_rows))
