"""Write the documentation that ships inside Python as a corpus: about two megabytes of real English on any machine.

One document a line of JSON: each topic of `pydoc`, and for each module of the standard library its docstrings in the
order of the source. Modules are parsed, not imported, so nothing of theirs runs.

    python scripts/pydoc_corpus.py data/pydoc.jsonl
"""

import argparse
import ast
import inspect
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics

SKIPPED = {"site-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
LEAST_CHARACTERS = 200


def documents() -> Iterator[str]:
    """Yield the text of every topic and of every module's docstrings."""
    for name in sorted(topics.topics):
        yield topics.topics[name].strip()
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if not SKIPPED.intersection(path.relative_to(library).parts):
            yield "\n\n".join(docstrings(path))


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and functions, without indentation."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield inspect.cleandoc(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("output", type=Path, nargs="?", default=Path("data/pydoc.jsonl"))
    output: Path = parser.parse_args().output
    output.parent.mkdir(parents=True, exist_ok=True)
    texts = [text for text in dict.fromkeys(documents()) if len(text) >= LEAST_CHARACTERS]
    temporary = output.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    temporary.replace(output)
    print(
        f"{output}: {len(texts)} documents, {sum(map(len, texts)) / 1e6:.1f} MB, from Python {sys.version.split()[0]}"
    )


if __name__ == "__main__":
    main()
