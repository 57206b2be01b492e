"""Outputs do not depend on batches, and texts are read as far as a model is trained unless `--max-length` says more."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from bert_pretrain.errors import ConfigError, DataError, InputError
from bert_pretrain.model.sequences import Bert, open_bert, sequences_of
from bert_pretrain.tools.embed import embed
from bert_pretrain.tools.fill_mask import fill_mask
from bert_pretrain.tools.score import score_pairs, score_texts
from bert_pretrain.train.evaluation import evaluate
from tests.tools.test_embed import CPU

TEXT = "the " * 30


@pytest.fixture
def trained_for_12(make_bert: Callable[..., Path], tmp_path: Path) -> Path:
    """A model with 64 positions that this package has trained on examples of 12 tokens, and texts of 32 tokens."""
    folder = make_bert(max_position_embeddings=64)
    (folder / "checksums.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pretraining": {"max_seq_length": 12}}))
    (tmp_path / "a.txt").write_text(f"{TEXT}\n")
    return folder


def test_untrained_positions_are_read_only_on_request(trained_for_12: Path, tmp_path: Path, capsys) -> None:
    text, vectors = str(tmp_path / "a.txt"), tmp_path / "v.parquet"
    for max_length, number in ((None, 12), (20, 20)):
        assert score_texts(trained_for_12, [text], config=CPU, max_length=max_length)["tokens"] == number - 2
        embed(trained_for_12, [text], vectors, config=CPU, level="token", max_length=max_length)
        assert len(pq.read_table(vectors)["tokens"][0]) == number
        shown = capsys.readouterr()
        assert shown.out.count(f"1 texts longer than {number} tokens") == 2
        assert shown.err.count("--max-length is 20, but the model is trained for 12") == (
            0 if max_length is None else 2
        )
    with pytest.raises(ConfigError, match="64 positions"):
        embed(trained_for_12, [text], vectors, config=CPU, max_length=65)


def test_what_cannot_be_truncated_is_refused(trained_for_12: Path, data_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="trained for 12"):
        fill_mask(trained_for_12, f"{TEXT} [MASK]", config=CPU.train)
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"sentence_good": TEXT, "sentence_bad": "the"}))
    with pytest.raises(InputError, match="trained for 12"):
        score_pairs(trained_for_12, [str(pairs)], config=CPU)
    assert score_pairs(trained_for_12, [str(pairs)], config=CPU, max_length=40)[0]["pairs"] == 1
    with pytest.raises(InputError, match="trained for 12"):
        evaluate(trained_for_12, data_folder, config=CPU.train)
    assert evaluate(trained_for_12, data_folder, config=CPU.train, max_length=64)["examples"]


@pytest.fixture(scope="module")
def bert(bert_folder: Path) -> Bert:
    return open_bert(bert_folder, CPU.train)


@pytest.mark.parametrize("per_token", [True, False])
def test_outputs_are_in_order_and_do_not_depend_on_batches(bert: Bert, per_token: bool) -> None:
    generator = np.random.default_rng(0)
    ids = [generator.integers(5, 1000, size) for size in (3, 30, 7, 7, 2, 19)]
    types = [[0] * 2 + [1] * (len(each) - 2) for each in ids]
    sequences = sequences_of(ids, types)
    counts = sequences.lengths if per_token else np.ones_like(sequences.lengths)
    finished: list[int] = []

    def outputs(batch_tokens: int) -> np.ndarray:
        def head(packed, batch) -> torch.Tensor:
            hidden = bert.network.encode(packed)
            return hidden if per_token else bert.network.pooler(hidden, packed.cu_seqlens)

        return bert.run(sequences, head, counts, finished.extend, batch_tokens)

    one_by_one = []
    with bert.running():
        for row, row_types in zip(ids, types, strict=True):
            packed = bert.pack([row], [row_types])
            hidden = bert.network.encode(packed)
            one_by_one.append(hidden if per_token else bert.network.pooler(hidden, packed.cu_seqlens))
    for batch_tokens in (1, 20, 1000):
        np.testing.assert_allclose(outputs(batch_tokens), torch.cat(one_by_one), atol=1e-5)
    assert sorted(finished) == sorted(list(range(6)) * 3)


def test_outputs_that_overflow_are_an_error(bert: Bert) -> None:
    with pytest.raises(DataError, match="not finite"):
        bert.run(sequences_of([[2, 3]]), lambda packed, batch: torch.tensor([1e39]), np.array([1]))
