"""The commands of the README, the wheel, the source distribution and the lock file."""

import gzip
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import transformers

from tests.conftest import call
from tests.pages import ROOT, blocks


def test_commands_of_the_readme_make_a_loadable_model(english_text, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("corpus").mkdir()
    Path("corpus/a.txt.gz").write_bytes(gzip.compress(english_text.read_bytes()[:200_000]))
    block = next(each for each in blocks(ROOT / "README.md") if each.commands and each.commands[0][0] == "vocab")
    assert [command[0] for command in block.commands] == ["vocab", "make-data", "train"]
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    extra = {"vocab": ["--set=vocab.size=1000"], "make-data": []}
    extra["train"] = [f"--set=model.{key}={value}" for key, value in sizes.items()]
    extra["train"] += ["--set=train.max_steps=2", "--set=train.global_batch_size=4"]
    for command in block.commands:
        # Expand the glob as a shell does.
        words = ["corpus/a.txt.gz" if "*" in word else word for word in command]
        call(*words, *extra[command[0]])
    model, info = transformers.AutoModelForPreTraining.from_pretrained("run/model", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.hidden_size == 32


def test_wheel_has_only_package_and_presets_and_runs(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        page = archive.read(metadata).decode()
        archive.extractall(tmp_path / "installed")
    packaged = {name for name in names if ".dist-info/" not in name}
    assert packaged == tracked("bert_pretrain") | {f"bert_pretrain/{name}" for name in tracked("configs")}
    assert "bert_pretrain/py.typed" in names
    address = re.search(r"^Project-URL: Repository, (https://\S+)$", page, re.MULTILINE)[1]
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert len(links) > 20
    assert {link for link in links if not link.startswith((address, "https://", "#"))} == set()
    script = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); from bert_pretrain import config_file, cli; "
        "assert 'installed' in config_file.__file__; "
        "assert config_file.load_config('large').model.hidden_size == 1024; cli.main()"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "installed"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert "make-data" in done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a folder with the wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("built")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, check=True)
    return folder


def test_lock_file_has_versions_of_constraints_and_hashes() -> None:
    """Update it with: scripts/lock.sh."""

    def versions(name: str) -> dict[str, str]:
        pins = re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
        return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in pins}

    constraints, locked = versions("constraints.txt"), versions("requirements.lock")
    assert {name: locked.get(name) for name in constraints} == {**constraints, "torch": None}
    blocks = re.split(r"^(?=[a-z])", (ROOT / "requirements.lock").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    assert [block for block in blocks if not re.search(r"--hash=sha256:[0-9a-f]{64}", block)] == []


def tracked(*folders: str) -> set[str]:
    """Return all files in folders of the repository, without caches."""
    paths = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in paths if "__pycache__" not in path.parts}


def test_source_distribution_has_all_sources_and_tests(built: Path) -> None:
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    single = "pyproject.toml README.md README.zh-CN.md RESULTS.md LICENSE .gitignore PKG-INFO Makefile Dockerfile"
    single += " mkdocs.yml CITATION.cff .pre-commit-config.yaml constraints.txt requirements.lock hatch_build.py"
    single += " mkdocs_hooks.py CHANGELOG.md CONTRIBUTING.md SECURITY.md"
    assert names == tracked("bert_pretrain", "configs", "scripts", "tests", "docs") | set(single.split())
