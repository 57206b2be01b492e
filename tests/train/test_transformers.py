"""Model folders of this package and of `transformers` give equal outputs in both, in every layout.

The checks run with the installed version and, in a slow test, with transformers 4.57 in a separate environment.
"""

import itertools
import json
import os
import site
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bert_pretrain.config import TrainConfig
from bert_pretrain.model.bert import Packed
from bert_pretrain.model.huggingface import load_model
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.tools.fill_mask import fill_mask
from tests.train import transformers_side

SIDE = Path(transformers_side.__file__)
PINNED = (
    *("transformers==4.57.6", "huggingface_hub==0.36.0", "tokenizers==0.22.2"),
    *("requests==2.32.5", "urllib3==2.5.0", "charset_normalizer==3.4.4", "idna==3.11", "certifi==2025.10.5"),
)
CPU = TrainConfig(device="cpu", precision="fp32")
TEXTS = ("wa wb wc [MASK] we", "xa xb [MASK] xd xe xf")


@torch.no_grad()
def compute(folder: Path, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the outputs of our model of a folder for padded inputs: (tokens, …) without padding, (sequences, …)."""
    model = load_model(folder).model
    real = inputs["attention_mask"].bool()
    lengths = real.sum(1).tolist()
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in lengths])
    packed = Packed(inputs["input_ids"][real], inputs["token_type_ids"][real], positions, bounds, max(lengths))
    hidden = model.encode(packed)
    pooled = model.pooler(hidden, bounds)
    words = model.decode(model.mlm_head(hidden))
    return {"hidden": hidden, "pooled": pooled, "words": words, "pairs": model.nsp_head(pooled)}


def expect(folder: Path, expected: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    inputs = transformers_side.random_inputs(10, tokenizer.vocab_size)
    save_file({**inputs, **compute(folder, inputs)}, expected.with_suffix(".safetensors"))
    texts = ("wa wb, Xc!", "ya unknown za")
    ids = {text: [tokenizer.cls_id, *tokenizer.encode_text(text), tokenizer.sep_id] for text in texts}
    known = {token: index for index, token in enumerate(tokenizer.tokens)}
    answers = {
        text: [(known[token], share) for token, share in fill_mask(folder, text, top_k=3, config=CPU)[0]]
        for text in TEXTS
    }
    expected.with_suffix(".json").write_text(json.dumps({"ids": ids, "answers": answers}))


@pytest.mark.parametrize("name", ["model", "checkpoints/step-00000008"])
def test_every_class_tokenizer_and_pipeline_open_every_model_folder(finished: Path, tmp_path: Path, name: str) -> None:
    expect(finished / name, tmp_path / "expected")
    transformers_side.check_folder(finished / name, tmp_path / "expected")


FRESH = {
    "pretraining": (),
    "masked": ("pooler.", "nsp_head."),
    "pairs": ("mlm_head.",),
    "bare": ("mlm_head.", "nsp_head."),
    "unpooled": ("pooler.", "mlm_head.", "nsp_head."),
    "classifier": ("mlm_head.", "nsp_head."),
}


def check_layouts(target: Path) -> None:
    """Open folders of `transformers`: missing weights are initialized and listed; all other outputs are equal."""
    for layout, storage in itertools.product(FRESH, ("parts", "pickles")):
        folder, expected = target / f"{layout} {storage}", load_file(target / f"{layout}.safetensors")
        loaded = load_model(folder)
        assert all(any(name.startswith(part) for name in loaded.missing) for part in FRESH[layout])
        assert all(name.startswith(FRESH[layout] or ("nothing",)) for name in loaded.missing)
        assert sorted(loaded.unused) == (["classifier.bias", "classifier.weight"] if layout == "classifier" else [])
        found = compute(folder, expected)
        for name in expected.keys() & found.keys():
            transformers_side.close(found[name], expected[name])
        assert len(list(folder.glob("*-of-*"))) > 1


def test_every_layout_of_theirs_computes_the_same_here(tmp_path: Path) -> None:
    transformers_side.save_layouts(tmp_path)
    check_layouts(tmp_path)


@pytest.fixture(scope="module")
def python_4_57(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with transformers 4.57; all but what it pins comes from this one's packages."""
    folder = tmp_path_factory.mktemp("env") / "env"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    done = subprocess.run(
        [python, "-m", "pip", "install", "-q", "--no-deps", *PINNED], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"pip cannot install {PINNED[0]}: {done.stderr.strip()[-200:]}")
    (packages,) = (folder / "lib").glob("python*/site-packages")
    # After its own packages in the order of search, so that the pinned ones win.
    (packages / "all_else.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return python


@pytest.mark.slow
def test_both_ways_with_transformers_4_57(python_4_57: Path, finished: Path, tmp_path: Path) -> None:
    def side(*arguments: object) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [str(python_4_57), str(SIDE), *map(str, arguments)]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "transformers 4.57." in done.stdout
        assert not transformers.__version__.startswith("4.57")
        return done.stdout

    for name in ("model", "checkpoints/step-00000008"):
        expect(finished / name, tmp_path / "expected")
        assert "the same numbers" in side("open", finished / name, tmp_path / "expected")
    side("save", tmp_path / "theirs")
    check_layouts(tmp_path / "theirs")
