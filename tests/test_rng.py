"""Random streams: a function of seed, purpose and coordinates alone, and the same for ever."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_pretrain.rng import Permutation, stream, torch_seed


@given(size=st.integers(1, 3000), seed=st.integers(-(2**40), 2**40))
def test_a_permutation_holds_every_element_once(size: int, seed: int) -> None:
    values = Permutation(size, seed, "test")(np.arange(size))
    assert np.array_equal(np.sort(values), np.arange(size))


@pytest.mark.parametrize("size", [2**bits + delta for bits in (2, 8, 15, 16, 17) for delta in (-1, 0, 1)])
def test_a_permutation_is_one_at_the_edges_of_powers_of_two(size: int) -> None:
    assert np.array_equal(np.sort(Permutation(size, 3, "edge")(np.arange(size))), np.arange(size))


@given(size=st.integers(2**40, 2**62), start=st.integers(0, 2**39))
def test_a_permutation_of_billions_needs_no_table(size: int, start: int) -> None:
    values = Permutation(size, 1, "huge")(np.arange(start, start + 100))
    assert len(set(values.tolist())) == 100
    assert ((values >= 0) & (values < size)).all()


def test_a_permutation_mixes() -> None:
    values = Permutation(10_000, 5, "mix")(np.arange(10_000))
    assert abs(np.corrcoef(values, np.arange(10_000))[0, 1]) < 0.05
    assert (values != np.arange(10_000)).mean() > 0.99
    assert not np.array_equal(values, Permutation(10_000, 6, "mix")(np.arange(10_000)))


def test_a_permutation_keeps_the_shape_and_the_argument() -> None:
    indices = np.arange(12).reshape(3, 4)
    values = Permutation(12, 5, "shape")(indices)
    assert values.shape == (3, 4)
    assert np.array_equal(indices, np.arange(12).reshape(3, 4))


def test_an_empty_permutation_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Permutation(0, 1, "none")


def test_streams_do_not_depend_on_the_order_of_calls_or_coordinates() -> None:
    first = stream(1, "mask", shard=2, copy=3).integers(0, 1000, 5)
    stream(1, "mask", shard=9).random(100)
    assert np.array_equal(first, stream(1, "mask", copy=3, shard=2).integers(0, 1000, 5))


def test_every_part_of_a_streams_name_matters() -> None:
    names = [
        (1, "mask", {"shard": 1}),
        (2, "mask", {"shard": 1}),
        (1, "pairs", {"shard": 1}),
        (1, "mask", {"shard": 2}),
    ]
    names += [(1, "mask", {"copy": 1}), (1, "mask", {}), (11, "mask", {}), (1, "mask", {"shard": 1, "copy": 1})]
    drawn = {int(stream(seed, purpose, **where).integers(0, 2**63)) for seed, purpose, where in names}
    assert len(drawn) == len(names)


def test_golden_values_never_change() -> None:
    """Every data folder ever written depends on these numbers."""
    assert stream(12345, "mask", split="train", shard=7).integers(0, 2**32, 4).tolist() == GOLDEN_INTEGERS
    assert Permutation(1000, 12345, "split")(np.arange(8)).tolist() == GOLDEN_PERMUTATION
    assert torch_seed(12345, "dropout", step=3) == GOLDEN_TORCH_SEED


GOLDEN_INTEGERS = [3644587887, 2448836080, 1778442017, 75987852]
GOLDEN_PERMUTATION = [343, 352, 423, 96, 400, 344, 557, 578]
GOLDEN_TORCH_SEED = 8233449036653702328
