"""Every promise of the documentation names the tests that prove it, and these exist."""

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "promises.md"
ROWS = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
PROMISES = [row.strip("| ").split(" | ") for row in ROWS if row != "| promise | test |"]


@lru_cache
def names_in(path: str) -> set[str]:
    """Return the names of the test functions of a file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_the_page_has_promises_and_no_other_tables() -> None:
    assert len(PROMISES) > 40
    assert all(len(cells) == 2 for cells in PROMISES)
    assert len({promise for promise, _ in PROMISES}) == len(PROMISES)


@pytest.mark.parametrize("cells", PROMISES, ids=[cells[0][:60] for cells in PROMISES])
def test_a_promise_names_tests_that_exist(cells: list[str]) -> None:
    promise, proof = cells
    assert re.fullmatch(r"`[\w/]+\.py::\w+`(, `[\w/]+\.py::\w+`)*", proof), promise
    for path, name in re.findall(r"`([\w/.]+)::(\w+)`", proof):
        assert name in names_in(path), f"{path} has no {name}"
