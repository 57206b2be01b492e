"""The imports of the package, read from its source: no cycles, and who may know whom."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import bert_pretrain

PACKAGE = Path(bert_pretrain.__file__).parent
STAGES = {"vocab", "make_data", "train"}
BELOW_STAGES = {"text", "io", "examples", "model", "report"}
ABOVE_STAGES = {"inspect", "plan", "tools", "finetune"}
MAX_FILES_OF_TRAINING = 60
ON_DEMAND = {("bert_pretrain.examples.shards", "bert_pretrain.examples.padded")}
"""The one import against the order: `DataFolder.loader` makes padded batches, which need torch."""


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in PACKAGE.rglob("*.py")}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the modules of the package that a module imports, anywhere but for types."""
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node):
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        yield from imported(node)


# The package itself, which has the version and, on demand, the Python API, is no part of the structure.
IMPORTS = {
    name: {
        found
        for found in imported(ast.parse(path.read_text(encoding="utf-8")))
        if found in MODULES and found not in (name, "bert_pretrain") and (name, found) not in ON_DEMAND
    }
    for name, path in MODULES.items()
    if name != "bert_pretrain"
}


def folder_of(module: str) -> str:
    """Return the folder of a module; a file beside the folders stands for itself."""
    return module.split(".")[1]


FOLDERS: dict[str, set[str]] = {}
for module, others in IMPORTS.items():
    FOLDERS.setdefault(folder_of(module), set()).update(map(folder_of, others))
    FOLDERS[folder_of(module)] -= {folder_of(module)}


def test_neither_files_nor_folders_import_each_other_in_a_circle() -> None:
    TopologicalSorter(IMPORTS).prepare()
    TopologicalSorter(FOLDERS).prepare()


def test_stages_know_each_other_only_through_files_and_what_is_below_knows_no_stage() -> None:
    for folder in STAGES | BELOW_STAGES:
        assert not FOLDERS[folder] & (STAGES | ABOVE_STAGES | {"cli", "pipeline", "api"}), folder
    for folder in ABOVE_STAGES:
        assert not FOLDERS[folder] & {"cli", "pipeline", "api"}, folder
    assert [folder for folder, found in FOLDERS.items() if "cli" in found] == ["__main__"]


def test_training_loads_few_files_and_none_of_what_comes_after_it() -> None:
    code = "import sys, bert_pretrain.train.run; print(*(name for name in sys.modules if name.startswith('bert_pre')))"
    loaded = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    assert len(loaded) <= MAX_FILES_OF_TRAINING
    assert not {folder_of(name) for name in loaded if name in IMPORTS} & (ABOVE_STAGES | {"vocab", "make_data"})
