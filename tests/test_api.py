"""The Python API: fast to import, with the same results as the commands, and as documented."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import bert_pretrain
from bert_pretrain.api import _config
from bert_pretrain.config_file import load_config
from bert_pretrain.errors import UserError
from bert_pretrain.train.run import train

PAGE = Path(__file__).parent.parent / "docs" / "python.md"
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TRAIN = {"max_steps": 3, "global_batch_size": 8, "precision": "fp32", "device": "cpu"}


@pytest.fixture(scope="module")
def model_folder(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_pretrain.pretrain(data_folder, tmp_path_factory.mktemp("api") / "run", model=SIZES, train=TRAIN)


def test_import_is_light_and_lists_public_names() -> None:
    heavy = ("torch", "numpy", "pyarrow", "pydantic", "datasets")
    code = f"import sys, bert_pretrain; print(bert_pretrain.__version__, [x for x in {heavy} if x in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{bert_pretrain.__version__} []\n"
    with pytest.raises(AttributeError, match="nothing_like_that"):
        _ = bert_pretrain.nothing_like_that
    public = ["__version__", "build_data", "build_vocab", "load_data", "load_model", "load_tokenizer", "pretrain"]
    assert dir(bert_pretrain) == public
    assert all(hasattr(bert_pretrain, name) for name in public)


def test_pretrain_equals_train_command(model_folder: Path, data_folder: Path, tmp_path: Path) -> None:
    settings = [f"model.{key}={value}" for key, value in SIZES.items()]
    settings += [f"train.{key}={value}" for key, value in TRAIN.items()]
    other = train(load_config(settings=settings), data_folder, tmp_path / "run")
    api_weights, command_weights = (load_file(folder / "model.safetensors") for folder in (model_folder, other))
    assert all(torch.equal(api_weights[name], command_weights[name]) for name in command_weights)
    again, options = tmp_path / "again", {"model": SIZES, "train": TRAIN, "init_from": str(model_folder)}
    assert bert_pretrain.pretrain(str(data_folder), str(again), **options) == again / "model"


def test_none_unsets_a_key_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("train: {warmup_steps: 100, eval_examples: 50, max_steps: 200}\n")
    config = _config(tmp_path / "a.yaml", train={"warmup_steps": None, "eval_examples": None, "seed": 3}).train
    assert (config.warmup_steps, config.eval_examples, config.max_steps, config.seed) == (None, None, 200, 3)


def test_load_data_returns_examples(data_folder: Path) -> None:
    data = bert_pretrain.load_data(data_folder)
    splits = data.dataset()
    assert {name: len(split) for name, split in splits.items()} == {name: data.rows(name) for name in splits}
    assert data.tokenizer().decode(splits["validation"][0]["input_ids"]).startswith("[CLS]")


def test_build_vocab_and_build_data_equal_commands(
    english_text: Path, vocab_folder: Path, data_folder: Path, tmp_path: Path
) -> None:
    keys = {"max_seq_length": 64, "dupe_factor": 2, "examples_per_shard": 1024, "validation_fraction": 0.1}
    vocab = bert_pretrain.build_vocab(english_text, tmp_path / "vocab", vocab={"size": 3000}, workers=1)
    data = bert_pretrain.build_data([str(english_text)], str(vocab), tmp_path / "data", data=keys, workers=1)
    assert bert_pretrain.load_tokenizer(vocab).hash == bert_pretrain.load_tokenizer(vocab_folder).hash
    assert bert_pretrain.load_data(data).content_hash == bert_pretrain.load_data(data_folder).content_hash


MISTAKES: dict[str, Callable[[Path, Path], object]] = {
    "folder": lambda data, new: bert_pretrain.load_tokenizer("nosuch"),
    "MODEL": lambda data, new: bert_pretrain.load_model("nosuch"),
    "device": lambda data, new: bert_pretrain.load_model("nosuch", device="tpu"),
    "nosuch.txt": lambda data, new: bert_pretrain.build_vocab("nosuch.txt", new),
    "vocab['size']": lambda data, new: bert_pretrain.build_vocab("a", new, vocab={"size": 3}),
    "--vocab": lambda data, new: bert_pretrain.build_data("a.txt", "nosuch", new),
    "store": lambda data, new: bert_pretrain.build_data("a.txt", data, new, store="s3://bucket/store"),
    "--data": lambda data, new: bert_pretrain.pretrain("nosuch", new),
    "--init-from": lambda data, new: bert_pretrain.pretrain(data, new, "tiny", init_from="nosuch"),
    "--carry-optimizer": lambda data, new: bert_pretrain.pretrain(data, new, "tiny", carry_optimizer=True),
    "train['max_stepz']": lambda data, new: bert_pretrain.pretrain(data, new, train={"max_stepz": 3}),
}


@pytest.mark.parametrize("where", MISTAKES)
def test_mistake_names_argument(where: str, data_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        MISTAKES[where](data_folder, tmp_path / "new")
    assert caught.value.where == where
    assert caught.value.remedy


def test_examples_in_documentation_run(data_folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "data").symlink_to(data_folder)
    monkeypatch.chdir(tmp_path)
    exec("".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)), {})
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    printed = capsys.readouterr().out.splitlines()
    # The first line counts examples, which differ here.
    assert [line for line in shown.splitlines()[1:] if line not in printed] == []
