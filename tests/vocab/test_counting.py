"""Counting of chunks in bounded memory."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_pretrain.vocab import counting
from bert_pretrain.vocab.counting import Counts

WORDS = st.lists(st.integers(0, 60).map(lambda number: f"w{number}".encode()), max_size=80)


@pytest.mark.parametrize(("most", "value"), [("MAX_DISTINCT", 16), ("MAX_DISTINCT_BYTES", 48)])
@given(batches=st.lists(WORDS, max_size=8))
def test_counts_are_within_the_reported_undercount(most: str, value: int, batches: list[list[bytes]]) -> None:
    truth = Counter(word for batch in batches for word in batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, most, value)
        counts = Counts()
        for batch in batches:
            counts.add(Counts(training=Counter(batch)))
    assert (len(counts.training) if value == 16 else sum(map(len, counts.training))) <= value
    assert counts.training.total() + counts.dropped_occurrences == truth.total()
    assert all(
        counts.training[word] <= count <= counts.training[word] + counts.undercount for word, count in truth.items()
    )
