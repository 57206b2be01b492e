"""Layers are compiled once, without graph breaks, for any number of tokens, sequences and masked positions."""

from pathlib import Path

from tests.cuda.conftest import Pretended


def test_nothing_is_compiled_after_the_first_step(pretended: Pretended, small_data: Path) -> None:
    found = pretended("compiled.compilations", small_data)
    # The embeddings, one of the layers, the masked-language-model head and the softmax.
    assert found["graphs"] == [4, 4, 4]
    assert found["waits"] == []
    tokens, sequences, masked = zip(*found["shapes"], strict=True)
    assert min(len(set(sizes)) for sizes in (tokens, sequences, masked)) > 1
