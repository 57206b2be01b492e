"""Layers are compiled once, without graph breaks, for any number of tokens, sequences and masked positions."""

from pathlib import Path

import pytest

from tests.cuda.conftest import Pretended


@pytest.mark.parametrize("checkpointing", [True, False])
def test_nothing_is_compiled_after_the_first_step(pretended: Pretended, small_data: Path, checkpointing: bool) -> None:
    found = pretended("compiled.compilations", small_data, checkpointing)
    # The embeddings, one of the layers, the masked-language-model head and the softmax.
    assert found["graphs"] == [4, 4, 4]
    assert found["waits"] == []
    assert found["gradients"] == ["torch.float32"]
    # In three steps of two layers; compiled layers cast by themselves only where they are computed twice.
    assert found["casts"] == (342 if checkpointing else 174)
    tokens, sequences, masked = zip(*found["shapes"], strict=True)
    assert min(len(set(sizes)) for sizes in (tokens, sequences, masked)) > 1
