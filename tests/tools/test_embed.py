"""`embed` writes the vectors of `transformers`, in the order of the input, for every input format."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from bert_pretrain.config import Config, DataConfig, TrainConfig
from bert_pretrain.errors import ConfigError, DataError, InputError, OutputError
from bert_pretrain.tools import texts as texts_module
from bert_pretrain.tools.embed import POOLINGS, embed
from bert_pretrain.tools.texts import Texts, is_empty
from tests.train.conftest import make_tokenizer

CPU = Config(train=TrainConfig(device="cpu", precision="fp32"))
LONGEST = 40


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory, sentences: list[str]) -> Path:
    path = tmp_path_factory.mktemp("texts") / "sentences.txt"
    path.write_text("\n".join(sentences) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def theirs(bert_folder: Path, sentences: list[str]) -> list[Any]:
    """Outputs of `AutoModel` and tokens for each sentence."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(bert_folder))
    model = AutoModel.from_pretrained(str(bert_folder), attn_implementation="eager").eval()
    outputs = []
    for sentence in sentences:
        encoded = tokenizer(sentence, truncation=True, max_length=LONGEST, return_tensors="pt")
        with torch.no_grad():
            output = model(**encoded, output_hidden_states=True)
        outputs.append((output, tokenizer.convert_ids_to_tokens(encoded["input_ids"][0])))
    return outputs


def their_vectors(output: Any, pooling: str) -> torch.Tensor:
    """Return the token vectors of a sentence, (tokens, size), or its pooled output, (1, size)."""
    last_four = output.hidden_states[-4:]
    if pooling == "pooler":
        return output.pooler_output
    if pooling == "last4-mean":
        return torch.stack(last_four).mean(dim=0)[0]
    return torch.cat(last_four, dim=-1)[0] if pooling == "last4-concat" else output.last_hidden_state[0]


def embedded(model: Path, texts: Path, output: Path, **options: Any) -> dict[str, list[Any]]:
    """Return the columns of the Parquet file that `embed` writes."""
    embed(model, [str(texts)], output, config=CPU, **options)
    return pq.read_table(output).to_pydict()


@pytest.mark.parametrize(("level", "pooling"), [(level, each) for level, all_ in POOLINGS.items() for each in all_])
def test_vectors_equal_transformers(bert_folder, text_file, sentences, theirs, tmp_path, level, pooling) -> None:
    options = {"level": level, "pooling": pooling, "batch_tokens": 128}
    ours = embedded(bert_folder, text_file, tmp_path / "v.parquet", **options)
    assert (ours["text"], ours["row"]) == (sentences, list(range(1, len(sentences) + 1)))
    for number, (output, tokens) in enumerate(theirs):
        expected = their_vectors(output, pooling)
        if level == "token":
            assert ours["tokens"][number] == tokens
        else:
            expected = expected[0] if pooling in ("cls", "pooler") else expected.mean(dim=0)
        vector = ours["embeddings" if level == "token" else "embedding"][number]
        np.testing.assert_allclose(vector, expected.numpy(), atol=1e-5)
    if level == "sentence":
        embed(bert_folder, [str(text_file)], tmp_path / "v.npy", config=CPU, **options)
        matrix = np.load(tmp_path / "v.npy", mmap_mode="r")
        assert matrix.dtype == np.float32
        assert np.array_equal(matrix, np.array(ours["embedding"], dtype=np.float32))


def test_vectors_do_not_depend_on_batches_and_groups(bert_folder, text_file, tmp_path, monkeypatch) -> None:
    for level, name in (("sentence", "embedding"), ("token", "embeddings")):
        a = embedded(bert_folder, text_file, tmp_path / "a.parquet", level=level)
        with monkeypatch.context() as patched:
            patched.setattr(texts_module, "GROUP_TEXTS", 7)
            patched.setattr("bert_pretrain.tools.embed.BLOCK_BYTES", 8000)
            b = embedded(bert_folder, text_file, tmp_path / "b.parquet", level=level, batch_tokens=50)
        groups = [pq.ParquetFile(tmp_path / f"{name}.parquet").num_row_groups for name in "ab"]
        assert groups[0] < groups[1]
        for one, other in zip(a.pop(name), b.pop(name), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
        assert a == b


def test_texts_are_read_from_every_input_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from datasets import Dataset

    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo \n\nthr\xe9e " + "é".encode() * 20)
    (tmp_path / "b.jsonl").write_text('{"body": "four"}\n\n{"body": ""}\n{"body": "five\\nlines"}\n')
    (tmp_path / "c.csv").write_text('id,body\n1,six\n2,"seven\neight"\n')
    pq.write_table(pa.table({"body": ["nine", None]}), tmp_path / "d.parquet")
    Dataset.from_dict({"body": ["ten"]}).save_to_disk(tmp_path / "e")
    inputs = [str(tmp_path / name) for name in ("a.txt", "b.jsonl", "c.csv", "d.parquet", "e")]
    texts = Texts(inputs, DataConfig(text_field="body"), make_tokenizer(), skip_empty=True)
    found = list(texts)
    words = ["one", "two ", "thr\ufffde " + "é" * 20, "four", "five\nlines", "six", "seven\neight", "nine", "ten"]
    assert [text.text for text in found] == words
    assert texts.num_texts == len(words)
    assert "1 blank lines, 3 empty texts skipped, 1 invalid utf8 characters" in capsys.readouterr().out
    assert found[2].where == f"{tmp_path}/a.txt: line 4"
    assert found[4].where == f"{tmp_path}/b.jsonl: record 3"


@pytest.mark.parametrize(("text", "tokens"), [("\u200b \ufeff", []), ("\U0001fae8", ["\U0001fae8"]), ("\u0301", [])])
def test_a_text_is_empty_if_it_has_no_tokens(text: str, tokens: list[str]) -> None:
    words = BertPreTokenizer().pre_tokenize_str(BertNormalizer(strip_accents=True).normalize_str(text))
    assert [word for word, _ in words] == tokens
    assert is_empty(text, make_tokenizer()) == (not tokens)


@pytest.mark.parametrize("empty", [" \u200b\ufeff", "\x01", "\ufe0f\u0301"])  # characters that the tokenizer removes
def test_empty_texts_are_skipped_or_refused_and_the_old_file_stays(bert_folder, tmp_path, capsys, empty) -> None:
    path = tmp_path / "a.txt"
    path.write_text(f"the first\n{empty}\nthe third\n")
    (tmp_path / "v.parquet").write_bytes(b"before")
    with pytest.raises(InputError, match="empty") as refused:
        embed(bert_folder, [str(path)], tmp_path / "v.parquet", config=CPU)
    assert refused.value.where == f"{path}: line 2"
    assert (tmp_path / "v.parquet").read_bytes() == b"before"
    assert {found.name for found in tmp_path.iterdir()} == {"v.parquet", "a.txt"}
    assert embedded(bert_folder, path, tmp_path / "v.parquet", skip_empty=True)["row"] == [1, 3]
    assert "1 empty texts skipped" in capsys.readouterr().out


def test_outputs_that_are_not_files_are_errors(bert_folder: Path, text_file: Path, tmp_path: Path) -> None:
    (tmp_path / "v.parquet").mkdir()
    os.mkfifo(tmp_path / "v.npy")
    for name, what in (("v.parquet", "is a folder"), ("v.npy", "not a regular file")):
        with pytest.raises(OutputError, match=what):
            embed(bert_folder, [str(text_file)], tmp_path / name, config=CPU)


def test_unsuitable_models_are_refused(make_bert: Callable[..., Path], text_file: Path, tmp_path: Path) -> None:
    def attempt(model: Path, pooling: str | None = "mean") -> None:
        embed(model, [str(text_file)], tmp_path / "v.npy", config=CPU, pooling=pooling)

    bare = make_bert(num_hidden_layers=3)
    with pytest.raises(ConfigError, match="the model has 3"):
        attempt(bare, "last4-mean")
    (bare / "checksums.json").unlink()
    tensors = load_file(bare / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".pooler." not in name and not name.startswith("cls.")}
    save_file(kept, bare / "model.safetensors")
    attempt(bare)
    (bare / "modules.json").write_text("[]")
    with pytest.raises(ConfigError, match="sentence-transformers"):
        attempt(bare, None)
    attempt(bare)
    with pytest.raises(DataError, match="pooler"):
        attempt(bare, "pooler")
    with (bare / "vocab.txt").open("a") as file:
        file.write("onemore\n")
    (bare / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="3000 tokens, the vocabulary 3001"):
        attempt(bare)
