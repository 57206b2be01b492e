"""Counting chunks in bounded memory: what is dropped is the rarest, and told."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_pretrain.config_file import load_config
from bert_pretrain.text.sources import resolve
from bert_pretrain.text.text_files import ByteRange
from bert_pretrain.vocab import counting
from bert_pretrain.vocab.counting import Counts, count_groups

WORDS = st.lists(st.integers(0, 60).map(lambda number: f"w{number}".encode()), max_size=80)


@given(batches=st.lists(WORDS, max_size=8))
def test_no_count_is_off_by_more_than_is_told(batches: list[list[bytes]]) -> None:
    truth = Counter(word for batch in batches for word in batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "MAX_DISTINCT", 16)
        counts = Counts()
        for batch in batches:
            counts.add(Counts(learned=Counter(batch)))
    assert len(counts.learned) <= 16
    assert counts.learned.total() + counts.dropped_occurrences == truth.total()
    assert all(
        counts.learned[word] <= count <= counts.learned[word] + counts.undercount for word, count in truth.items()
    )


def test_a_table_that_is_emptied_on_the_way_counts_the_same(english_text, monkeypatch) -> None:
    config = load_config()
    (source,) = resolve([str(english_text)], config.data)
    whole = count_groups([(0, [ByteRange(source)])], config)
    flushes, add = [], Counts.add
    monkeypatch.setattr(counting, "_BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr(Counts, "add", lambda self, other: (flushes.append(1), add(self, other))[1])
    monkeypatch.setattr(counting, "MAX_DISTINCT", 2 * len(whole.learned) // 3)
    monkeypatch.setattr(Counts, "_prune", lambda self: None)
    pieces = count_groups([(0, [ByteRange(source)])], config)
    assert len(flushes) > 2
    assert (pieces.learned, pieces.held_out, pieces.documents) == (whole.learned, whole.held_out, whole.documents)
