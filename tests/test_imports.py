"""Imports inside the package have no cycles and follow its layers."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import bert_pretrain

PACKAGE = Path(bert_pretrain.__file__).parent
STAGES = {"vocab", "make_data", "train"}
BELOW_STAGES = {"text", "io", "examples", "model", "metrics", "report"}
ABOVE_STAGES = {"inspect", "plan", "tools", "finetune"}
MAX_FILES_OF_TRAINING = 65


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in PACKAGE.rglob("*.py")}


def imported(path: Path) -> Iterator[str]:
    """Yield all imports of a file, also those in functions and those for type checking."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


# Without the package itself, which has the version and imports the Python API on demand.
IMPORTS = {
    name: {module for module in imported(path) if module in MODULES and module not in (name, "bert_pretrain")}
    for name, path in MODULES.items()
    if name != "bert_pretrain"
}


def folder_of(module: str) -> str:
    """Return the folder of a module, or the name of a module outside the folders."""
    return module.split(".")[1]


FOLDERS: dict[str, set[str]] = {}
for module, others in IMPORTS.items():
    FOLDERS.setdefault(folder_of(module), set()).update(map(folder_of, others))
    FOLDERS[folder_of(module)] -= {folder_of(module)}


@pytest.mark.parametrize("imports", [IMPORTS, FOLDERS], ids=["files", "folders"])
def test_no_import_cycles(imports: dict[str, set[str]]) -> None:
    TopologicalSorter(imports).prepare()


def test_imports_follow_the_layers() -> None:
    for folder in STAGES | BELOW_STAGES:
        assert not FOLDERS[folder] & (STAGES | ABOVE_STAGES | {"cli", "pipeline", "api"}), folder
    for folder in ABOVE_STAGES:
        assert not FOLDERS[folder] & {"cli", "pipeline", "api"}, folder
    assert [folder for folder, others in FOLDERS.items() if "cli" in others] == ["__main__"]


def test_training_loads_few_files_and_no_other_stage() -> None:
    code = "import sys, bert_pretrain.train.run; print(*(name for name in sys.modules if name.startswith('bert_pre')))"
    loaded = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    assert len(loaded) <= MAX_FILES_OF_TRAINING
    assert not {folder_of(name) for name in loaded if name in IMPORTS} & (ABOVE_STAGES | {"vocab", "make_data"})
