"""Random streams depend only on seed, purpose and coordinates, and never change."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_pretrain.rng import Permutation, stream, torch_seed


@given(
    st.integers(1, 3000) | st.sampled_from([2**bits + delta for bits in (2, 8, 15, 16, 17) for delta in (-1, 0, 1)]),
    st.integers(-(2**40), 2**40),
)
def test_permutation_contains_every_element_once(size: int, seed: int) -> None:
    indices = np.arange(size).reshape(1, size)
    values = Permutation(size, seed, "test")(indices)
    assert values.shape == indices.shape
    assert np.array_equal(indices[0], np.arange(size))
    assert np.array_equal(np.sort(values[0]), indices[0])


def test_permutation_is_random_and_not_empty() -> None:
    values = Permutation(10_000, 5, "mix")(np.arange(10_000))
    assert abs(np.corrcoef(values, np.arange(10_000))[0, 1]) < 0.05
    assert (values != np.arange(10_000)).mean() > 0.99
    assert not np.array_equal(values, Permutation(10_000, 6, "mix")(np.arange(10_000)))
    with pytest.raises(ValueError, match="at least one"):
        Permutation(0, 1, "none")


def test_streams_depend_only_on_seed_purpose_and_coordinates() -> None:
    names = [
        (1, "mask", {"shard": 1}),
        (2, "mask", {"shard": 1}),
        (1, "pairs", {"shard": 1}),
        (1, "mask", {"shard": 2}),
    ]
    names += [(1, "mask", {"copy": 1}), (1, "mask", {}), (11, "mask", {}), (1, "mask", {"shard": 1, "copy": 1})]
    drawn = {int(stream(seed, purpose, **where).integers(0, 2**63)) for seed, purpose, where in names}
    assert len(drawn) == len(names)
    assert int(stream(1, "mask", copy=1, shard=1).integers(0, 2**63)) in drawn


@given(size=st.integers(2**40, 2**62), start=st.integers(0, 2**39))
def test_permutation_of_billions_of_elements(size: int, start: int) -> None:
    values = Permutation(size, 1, "huge")(np.arange(start, start + 100))
    assert len(set(values.tolist())) == 100
    assert ((values >= 0) & (values < size)).all()


def test_golden_values_never_change() -> None:
    """All existing data folders depend on these numbers."""
    drawn = stream(12345, "mask", split="train", shard=7).integers(0, 2**32, 4)
    assert drawn.tolist() == [3644587887, 2448836080, 1778442017, 75987852]
    assert Permutation(1000, 12345, "split")(np.arange(8)).tolist() == [343, 352, 423, 96, 400, 344, 557, 578]
    assert torch_seed(12345, "dropout", step=3) == 8233449036653702328
