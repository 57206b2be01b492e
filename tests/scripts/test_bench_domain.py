"""The bench of continuing on a domain: what a masked word costs, and the whole of it once."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch

from bert_pretrain.config import ModelConfig
from bert_pretrain.config_file import load_config
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.huggingface import save_model
from bert_pretrain.text.tokenizer import Tokenizer
from scripts import bench_domain


@pytest.fixture
def model(vocab_folder: Path, tmp_path: Path) -> Path:
    tokenizer = Tokenizer.load(vocab_folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    network = BertForPreTraining(ModelConfig(**sizes, initializer_range=0.2), tokenizer.vocab_size)
    network.initialize(1)
    (tmp_path / "model").mkdir()
    save_model(network, tmp_path / "model", tokenizer)
    return tmp_path / "model"


def test_a_masked_word_costs_what_transformers_makes_of_its_pieces(model: Path) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    words = ["the", "interpreter", "xylophonist", "returns", "zq"]
    masked = [0, 2]
    tokenizer = AutoTokenizer.from_pretrained(model)
    pieces = [tokenizer.encode(word, add_special_tokens=False) for word in words]
    assert len(pieces[2]) > 2
    shown = [[tokenizer.mask_token_id] * len(ids) if index in masked else ids for index, ids in enumerate(pieces)]
    ids = [tokenizer.cls_token_id, *(piece for word in shown for piece in word), tokenizer.sep_token_id]
    with torch.no_grad():
        shares = AutoModelForMaskedLM.from_pretrained(model)(torch.tensor([ids])).logits[0].log_softmax(-1)
    costs = []
    for index in masked:
        begin = 1 + sum(map(len, pieces[:index]))
        costs.append(-sum(float(shares[begin + offset, piece]) for offset, piece in enumerate(pieces[index])))
    config = load_config(settings=["train.device=cpu", "train.precision=fp32"])
    found = bench_domain._measure(model, [bench_domain.Window(words, masked)], {"xylophonist"}, config)
    assert found["words"] == 2
    assert found["nats_per_word"] == pytest.approx(sum(costs) / 2, abs=1e-4)
    assert found["nats_per_byte_of_word"] == pytest.approx(sum(costs) / len("thexylophonist"), abs=1e-4)
    assert found["nats_per_new_word"] == pytest.approx(costs[1], abs=1e-4)


def test_windows_fit_both_vocabularies_and_mask_known_words_alone(vocab_folder: Path, tmp_path: Path) -> None:
    old = Tokenizer.load(vocab_folder)
    tokens = list(old.tokens)
    tokens[1:3] = ["xylophonist", "☃"]
    held_out = tmp_path / "held-out.jsonl"
    text = "The Xylophonist ☃ returns, and the interpreter raises an error. " * 30
    held_out.write_text(json.dumps({"text": text}) + "\n")
    windows = list(bench_domain._cut_windows(held_out, old, old.with_tokens(tokens), 32))
    words = [word for window in windows for word in window.words]
    assert words == old.backend.normalizer.normalize_str(text).replace(",", " ,").replace(".", " .").split()
    for window in windows:
        for tokenizer in (old, old.with_tokens(tokens)):
            assert len(tokenizer.encode_text(" ".join(window.words))) <= 30
        assert len(window.masked) == round(0.15 * len(window.words))
        assert "☃" not in [window.words[index] for index in window.masked]


@pytest.mark.slow
def test_the_whole_bench_runs_and_says_what_was_gained(
    model: Path, english_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--base", model, "--domain", english_text, "--work", tmp_path / "work", "--steps", "20", "--batch", "16"]
    monkeypatch.setattr(sys, "argv", ["bench_domain.py", *map(str, command)])
    bench_domain.main()
    assert "after 20 steps, extended vocabulary" in capsys.readouterr().out
    rows = json.loads((tmp_path / "work" / "domain.json").read_text())["rows"]
    assert set(rows) == {"before", "own", "extended"}
    assert rows["own"]["nats_per_word"] < rows["before"]["nats_per_word"]
    assert all(row["words"] == rows["before"]["words"] > 100 for row in rows.values())
    assert all(math.isfinite(row["nats_per_masked_token"]) for row in rows.values())
    bench_domain.main()
    assert "up to date" in capsys.readouterr().out
