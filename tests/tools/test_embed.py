"""`embed` gives what `transformers` gives from the same folder, in the order of the input, from every kind of input."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from bert_pretrain.config import Config, TrainConfig
from bert_pretrain.errors import ConfigError, DataError, InputError
from bert_pretrain.tools import texts as texts_module
from bert_pretrain.tools.embed import POOLINGS, embed
from bert_pretrain.tools.texts import Texts

CPU = Config(train=TrainConfig(device="cpu", precision="fp32"))
LONGEST = 40


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory, sentences: list[str]) -> Path:
    path = tmp_path_factory.mktemp("texts") / "sentences.txt"
    path.write_text("\n".join(sentences) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def theirs(bert_folder: Path, sentences: list[str]) -> list[Any]:
    """What `AutoModel` gives for each sentence alone."""
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


def features_of_theirs(output: Any, pooling: str) -> torch.Tensor:
    """Return the vectors of one sentence's tokens, (tokens, size), or its pooled output, (1, size)."""
    last_four = output.hidden_states[-4:]
    if pooling == "pooler":
        return output.pooler_output
    if pooling == "last4-mean":
        return torch.stack(last_four).mean(dim=0)[0]
    return torch.cat(last_four, dim=-1)[0] if pooling == "last4-concat" else output.last_hidden_state[0]


def read(path: Path) -> dict[str, list[Any]]:
    return pq.read_table(path).to_pydict()


@pytest.mark.parametrize("pooling", POOLINGS["sentence"])
def test_a_sentence_has_the_vector_of_transformers(
    bert_folder: Path, text_file: Path, sentences: list[str], theirs: list[Any], tmp_path: Path, pooling: str
) -> None:
    output = tmp_path / "v.parquet"
    embed(bert_folder, [str(text_file)], output, config=CPU, pooling=pooling, batch_tokens=128)
    ours = read(output)
    assert ours["text"] == sentences
    assert ours["row"] == list(range(1, len(sentences) + 1))
    for vector, (found, _) in zip(ours["embedding"], theirs, strict=True):
        features = features_of_theirs(found, pooling)
        expected = features[0] if pooling in ("cls", "pooler") else features.mean(dim=0)
        np.testing.assert_allclose(vector, expected.numpy(), atol=1e-5)
    embed(bert_folder, [str(text_file)], tmp_path / "v.npy", config=CPU, pooling=pooling, batch_tokens=128)
    matrix = np.load(tmp_path / "v.npy", mmap_mode="r")
    assert matrix.dtype == np.float32
    assert np.array_equal(matrix, np.array(ours["embedding"], dtype=np.float32))


@pytest.mark.parametrize("pooling", POOLINGS["token"])
def test_every_token_has_the_vector_of_transformers(
    bert_folder: Path, text_file: Path, theirs: list[Any], tmp_path: Path, pooling: str
) -> None:
    output = tmp_path / "v.parquet"
    embed(bert_folder, [str(text_file)], output, config=CPU, level="token", pooling=pooling, batch_tokens=128)
    ours = read(output)
    for tokens, vectors, (found, their_tokens) in zip(ours["tokens"], ours["embeddings"], theirs, strict=True):
        assert tokens == their_tokens
        np.testing.assert_allclose(vectors, features_of_theirs(found, pooling).numpy(), atol=1e-5)


def test_vectors_do_not_depend_on_batches_and_groups(
    bert_folder: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for level in POOLINGS:
        embed(bert_folder, [str(text_file)], tmp_path / "a.parquet", config=CPU, level=level)
        with monkeypatch.context() as patched:
            patched.setattr(texts_module, "GROUP_TEXTS", 7)
            patched.setattr("bert_pretrain.tools.embed.BLOCK_BYTES", 8000)
            embed(bert_folder, [str(text_file)], tmp_path / "b.parquet", config=CPU, level=level, batch_tokens=50)
        groups = [pq.ParquetFile(tmp_path / f"{name}.parquet").num_row_groups for name in "ab"]
        assert groups[0] < groups[1]
        a, b = read(tmp_path / "a.parquet"), read(tmp_path / "b.parquet")
        name = "embedding" if level == "sentence" else "embeddings"
        for one, other in zip(a.pop(name), b.pop(name), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
        assert a == b


def test_texts_come_from_every_kind_of_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from datasets import Dataset

    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo \n\nthr\xe9e " + "é".encode() * 20)
    (tmp_path / "b.jsonl").write_text('{"body": "four"}\n\n{"body": ""}\n{"body": "five\\nlines"}\n')
    (tmp_path / "c.csv").write_text('id,body\n1,six\n2,"seven\neight"\n')
    pq.write_table(pa.table({"body": ["nine", None]}), tmp_path / "d.parquet")
    Dataset.from_dict({"body": ["ten"]}).save_to_disk(tmp_path / "e")
    inputs = [str(tmp_path / name) for name in ("a.txt", "b.jsonl", "c.csv", "d.parquet", "e")]
    texts = Texts(inputs, "body", skip_empty=True)
    found = list(texts)
    words = ["one", "two ", "thr\ufffde " + "é" * 20, "four", "five\nlines", "six", "seven\neight", "nine", "ten"]
    assert [text.text for text in found] == words
    assert texts.number == len(words)
    assert "1 blank lines, 3 empty texts skipped, 1 invalid utf8 characters" in capsys.readouterr().out
    assert found[2].where == f"{tmp_path}/a.txt: line 4"
    assert found[4].where == f"{tmp_path}/b.jsonl: record 3"


def test_longer_texts_are_truncated_and_counted(
    bert_folder: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    embed(bert_folder, [str(text_file)], tmp_path / "v.parquet", config=CPU, level="token", max_length=5)
    tokens = read(tmp_path / "v.parquet")["tokens"]
    assert max(map(len, tokens)) == 5
    assert all(found[-1] == "[SEP]" for found in tokens)
    embed(bert_folder, [str(text_file)], tmp_path / "w.parquet", config=CPU, level="token")
    longer = sum(len(found) > 5 for found in read(tmp_path / "w.parquet")["tokens"])
    assert f"{longer:,} texts longer than 5 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("empty", [" \u200b\ufeff", "\x01"])  # of which nothing is left for a model
def test_empty_texts_are_left_out_or_refused_by_row_and_leave_the_file_of_before(
    bert_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], empty: str
) -> None:
    path = tmp_path / "a.txt"
    path.write_text(f"the first\n{empty}\nthe third\n")
    (tmp_path / "v.parquet").write_bytes(b"before")
    with pytest.raises(InputError, match="empty") as refused:
        embed(bert_folder, [str(path)], tmp_path / "v.parquet", config=CPU)
    assert refused.value.where == f"{path}: line 2"
    assert (tmp_path / "v.parquet").read_bytes() == b"before"
    assert {found.name for found in tmp_path.iterdir()} == {"v.parquet", "a.txt"}
    embed(bert_folder, [str(path)], tmp_path / "v.parquet", config=CPU, skip_empty=True)
    assert read(tmp_path / "v.parquet")["row"] == [1, 3]
    assert "1 empty texts skipped" in capsys.readouterr().out


def test_models_that_do_not_fit_are_refused(make_bert: Callable[..., Path], text_file: Path, tmp_path: Path) -> None:
    def attempt(model: Path, pooling: str = "mean") -> None:
        embed(model, [str(text_file)], tmp_path / "v.npy", config=CPU, pooling=pooling)

    bare = make_bert(num_hidden_layers=3)
    with pytest.raises(ConfigError, match="the model has 3"):
        attempt(bare, "last4-mean")
    (bare / "checksums.json").unlink()
    tensors = load_file(bare / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".pooler." not in name and not name.startswith("cls.")}
    save_file(kept, bare / "model.safetensors")
    attempt(bare)
    with pytest.raises(DataError, match="pooler"):
        attempt(bare, "pooler")
    with (bare / "vocab.txt").open("a") as file:
        file.write("onemore\n")
    (bare / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="3000 tokens, the vocabulary 3001"):
        attempt(bare)


def test_a_folder_of_sentence_transformers_needs_the_name_of_a_pooling(
    bert_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(bert_folder, tmp_path / "m")
    (folder / "modules.json").write_text("[]")
    with pytest.raises(ConfigError, match="sentence-transformers"):
        embed(folder, [str(text_file)], tmp_path / "v.npy", config=CPU)
    embed(folder, [str(text_file)], tmp_path / "v.npy", config=CPU, pooling="mean")
