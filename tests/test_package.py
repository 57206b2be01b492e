"""What a newcomer meets first: the README's three commands, and the wheel."""

import gzip
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import transformers

from bert_pretrain.config_file import preset_paths

ROOT = Path(__file__).parent.parent
SMALL = [
    f"--set=model.{key}={value}"
    for key, value in {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }.items()
] + ["--set=train.max_steps=2", "--set=train.global_batch_size=4"]


def readme_commands() -> list[list[str]]:
    """Return the first block of `bert-pretrain` commands of the README, in order."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    block = next(block for block in blocks if "bert-pretrain vocab" in block)
    return [shlex.split(line) for line in block.splitlines() if line.startswith("bert-pretrain")]


def test_the_three_commands_of_the_readme_make_a_model_that_opens(english_text: Path, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt.gz").write_bytes(gzip.compress(english_text.read_bytes()))
    commands = readme_commands()
    assert [command[1] for command in commands] == ["vocab", "make-data", "train"]
    for command in commands:
        extra = SMALL if command[1] == "train" else ["--set=vocab.size=1000"] if command[1] == "vocab" else []
        # As a shell would, let the program see the file names.
        words = [name for word in command[1:] for name in (["corpus/a.txt.gz"] if "*" in word else [word])]
        subprocess.run([sys.executable, "-m", "bert_pretrain", *words, *extra], cwd=tmp_path, check=True)
    model, info = transformers.AutoModelForPreTraining.from_pretrained(
        str(tmp_path / "run" / "model"), output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.hidden_size == 32


def test_the_wheel_holds_the_presets_and_runs(tmp_path: Path) -> None:
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            str(tmp_path),
            str(ROOT),
        ],
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    installed = {path.stem for path in (tmp_path / "installed" / "bert_pretrain" / "configs").glob("*.yaml")}
    assert installed == set(preset_paths())
    script = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); from bert_pretrain import config_file, cli; "
        "assert 'installed' in config_file.__file__; "
        "assert config_file.load_config('large').model.hidden_size == 1024; cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "installed"), "--help"],
        cwd=tmp_path, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert "make-data" in done.stdout
