"""Write the documentation that ships with Python as a corpus of about 2 MB of English.

Each line of JSON is one document: a topic of `pydoc`, or all docstrings of a module of the standard library. Modules
are parsed, not imported.

    python scripts/pydoc_corpus.py data/pydoc.jsonl
"""

import ast
import inspect
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics

from measure import parser_of

SKIPPED = {"site-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}
DOCUMENTED_NODES = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def documents() -> Iterator[str]:
    for name in sorted(topics.topics):
        yield topics.topics[name].strip()
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if not SKIPPED.intersection(path.relative_to(library).parts):
            yield "\n\n".join(docstrings(path))


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and its functions, without indentation."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED_NODES) and (text := ast.get_docstring(node)):
            yield inspect.cleandoc(text)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("output", type=Path, nargs="?", default=Path("data/pydoc.jsonl"))
    output: Path = parser.parse_args().output
    output.parent.mkdir(parents=True, exist_ok=True)
    texts = [text for text in dict.fromkeys(documents()) if len(text) >= 200]
    temporary = output.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    temporary.replace(output)
    print(
        f"{output}: {len(texts)} documents, {sum(map(len, texts)) / 1e6:.1f} MB, from Python {sys.version.split()[0]}"
    )


if __name__ == "__main__":
    main()
