"""The output bias may start at the frequencies of the tokens."""

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from bert_pretrain.config import Config
from bert_pretrain.examples.shards import DataFolder
from bert_pretrain.train.output_bias import UNSEEN_COUNT, unigram_bias
from bert_pretrain.train.run import train


def test_the_bias_is_the_logarithm_of_the_shares_before_masking(data_folder: Path) -> None:
    data = DataFolder.open(data_folder)
    tokenizer = data.tokenizer()
    bias = unigram_bias(data, tokenizer)
    assert bias.shape == (tokenizer.vocab_size,)
    assert bias.exp().sum().item() == pytest.approx(1.0, abs=1e-4)
    rows = pq.read_table(data_folder / data.shards("train")[0].path).to_pylist()
    counts: Counter[int] = Counter()
    for row in rows:
        ids = list(row["input_ids"])
        for position, original in zip(row["masked_lm_positions"], row["masked_lm_ids"], strict=True):
            ids[position] = original
        counts.update(ids)
    for special in (tokenizer.cls_id, tokenizer.sep_id, tokenizer.pad_id):
        del counts[special]
    assert counts[tokenizer.mask_id] == 0
    total = sum(counts.values()) + UNSEEN_COUNT * tokenizer.vocab_size
    for token, count in counts.most_common(20):
        assert bias[token].item() == pytest.approx(math.log((count + UNSEEN_COUNT) / total), abs=1e-4)
    assert bias[tokenizer.cls_id] == bias[tokenizer.mask_id] == bias.min()


@pytest.mark.parametrize("mlm_bias", ["zeros", "unigram"])
def test_a_run_starts_near_the_entropy_of_the_tokens_with_it(
    mlm_bias: str, tiny: Callable[..., Config], data_folder: Path, tmp_path: Path
) -> None:
    train(tiny(max_steps=1, mlm_bias=mlm_bias), data_folder, tmp_path / "run")
    first = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0]
    data = DataFolder.open(data_folder)
    uniform = math.log(data.tokenizer().vocab_size)
    bias = unigram_bias(data, data.tokenizer()).double()
    entropy = -(bias.exp() * bias).sum().item()
    loss = float(json.loads(first)["validation_mlm_loss"])
    expected = uniform if mlm_bias == "zeros" else entropy
    assert uniform - entropy > 0.5
    assert loss == pytest.approx(expected, abs=0.35)
    assert torch.isfinite(bias).all()
