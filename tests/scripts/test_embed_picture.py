"""The picture of document sources: a file to look at, and figures that tell sources from noise."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "embed_picture.py"


@pytest.mark.slow  # scikit-learn and matplotlib take seconds to import
def test_sources_of_unlike_words_are_told_apart(
    english_documents: list[list[str]],
    vocab_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from bert_pretrain.config import ModelConfig
    from bert_pretrain.model.bert import BertForPreTraining
    from bert_pretrain.model.huggingface import save_model
    from bert_pretrain.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(vocab_folder)
    sizes = ModelConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    network = BertForPreTraining(sizes, tokenizer.vocab_size)
    network.initialize(1)
    (tmp_path / "model").mkdir()
    save_model(network, tmp_path / "model", tokenizer)
    sentences = [document[0] for document in english_documents[:40]]
    (tmp_path / "prose.txt").write_text("\n".join(sentences) + "\n")
    (tmp_path / "digits.txt").write_text("\n".join("7 3 9 " * (5 + index % 9) for index in range(40)) + "\n")

    spec = importlib.util.spec_from_file_location("embed_picture", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    picture = tmp_path / "sources.png"
    files = [str(tmp_path / name) for name in ("model", "prose.txt", "digits.txt")]
    monkeypatch.setattr(sys, "argv", ["embed_picture.py", *files, "--output", str(picture), "--texts", "30"])
    module.main()
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    shares = dict(re.findall(r"^(this model|word counts|chance) +([\d.]+)%", shown, flags=re.MULTILINE))
    assert "60 texts of 2 sources" in shown
    assert float(shares["this model"]) > 95
    assert float(shares["chance"]) == 50
