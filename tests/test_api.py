"""The calls for notebooks: cheap to import, equal to `transformers` from the same folder, and as their page shows."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import bert_pretrain
from bert_pretrain.config_file import load_config
from bert_pretrain.errors import ConfigError
from bert_pretrain.train.run import train

PAGE = Path(__file__).parent.parent / "docs" / "python.md"
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TRAIN = {"max_steps": 3, "global_batch_size": 8, "precision": "fp32", "device": "cpu"}


@pytest.fixture(scope="module")
def model_folder(data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_pretrain.pretrain(data_folder, tmp_path_factory.mktemp("api") / "run", model=SIZES, train=TRAIN)


def test_importing_the_package_loads_no_heavy_library() -> None:
    code = (
        "import sys, bert_pretrain; assert bert_pretrain.__version__; "
        "print([name for name in ('torch', 'numpy', 'pyarrow', 'pydantic', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="nothing_like_that"):
        _ = bert_pretrain.nothing_like_that


def test_training_from_python_is_the_command(model_folder: Path, data_folder: Path, tmp_path: Path) -> None:
    settings = [f"model.{key}={value}" for key, value in SIZES.items()]
    settings += [f"train.{key}={value}" for key, value in TRAIN.items()]
    other = train(load_config(settings=settings), data_folder, tmp_path / "run")
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (model_folder, other))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_names_of_folders_may_be_texts(model_folder: Path, data_folder: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    options = {"model": SIZES, "train": TRAIN, "init_from": str(model_folder)}
    assert bert_pretrain.pretrain(str(data_folder), str(again), **options) == again / "model"


def test_a_data_folder_gives_its_examples(data_folder: Path) -> None:
    data = bert_pretrain.load_data(data_folder)
    splits = data.dataset()
    assert {name: len(split) for name, split in splits.items()} == {
        name: data.rows(name) for name in ("train", "validation")
    }
    tokenizer = data.tokenizer()
    assert tokenizer.decode(splits["validation"][0]["input_ids"]).startswith("[CLS]")


def test_hidden_states_and_logits_are_those_of_transformers(model_folder: Path) -> None:
    from transformers import AutoModelForPreTraining, AutoTokenizer

    texts = ["A module.", "The value of an [MASK] is [MASK] value, or [SEP] not.", ""]
    model = bert_pretrain.load_model(model_folder, device="cpu")
    theirs, tokenizer = (x.from_pretrained(model_folder) for x in (AutoModelForPreTraining, AutoTokenizer))
    sequences = [model.add_special_tokens(model.tokenizer.encode_text(text)) for text in texts]
    with model.running():
        together = model.network.encode(*model.pack(sequences))
        logits_together = model.network.decode(model.network.mlm_head(together))
    assert not together.requires_grad
    lengths = [len(sequence) for sequence in sequences]
    for text, hidden, logits in zip(texts, together.split(lengths), logits_together.split(lengths), strict=True):
        # Raw text is never a special token here.
        batch = tokenizer(text.replace("[SEP]", "[ SEP ]").replace("[MASK]", "[ MASK ]"), return_tensors="pt")
        with torch.inference_mode():
            expected = theirs(**batch, output_hidden_states=True)
        torch.testing.assert_close(hidden, expected.hidden_states[-1][0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logits, expected.prediction_logits[0], atol=1e-5, rtol=1e-5)


def test_mistakes_name_what_was_given(model_folder: Path, data_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        bert_pretrain.pretrain(data_folder, tmp_path / "run", train={"max_stepz": 3})
    assert caught.value.where == "train['max_stepz']"
    with pytest.raises(ConfigError, match="must be a local folder"):
        bert_pretrain.pretrain("s3://bucket/data", tmp_path / "run")
    with pytest.raises(ConfigError) as caught:
        bert_pretrain.load_model(model_folder, device="gpu")
    assert caught.value.where == "device"


def test_the_page_does_what_it_says(
    data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").symlink_to(data_folder)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
        exec(block, names)
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    printed = capsys.readouterr().out.splitlines()
    # The first line counts examples, and the topics of pydoc differ from one Python to another.
    assert [line for line in shown.splitlines()[1:] if line not in printed] == []
