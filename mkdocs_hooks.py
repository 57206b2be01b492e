"""A hook of mkdocs: the pages at the root of the repository join those of docs/, and links are made to fit.

A link to a file that is no page, such as a module, becomes its name: where the repository is hosted is not known here.
"""

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
PAGES = {
    "README.md": "index.md",
    "README.zh-CN.md": "index.zh.md",
    "RESULTS.md": "results.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Of the repository -> of the site."""
_BLOCK_OR_LINK = re.compile(r"^```.*?^```|(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)", re.MULTILINE | re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages at the root."""
    from mkdocs.structure.files import File

    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links between docs/ and the root."""
    sources = {name: source for source, name in PAGES.items()}
    folder = ROOT if page.file.src_uri in sources else ROOT / "docs"

    def rewritten(found: re.Match[str]) -> str:
        return found[0] if found[0].startswith("```") else _link(found, folder)

    return _BLOCK_OR_LINK.sub(rewritten, markdown)


def _link(found: re.Match[str], folder: Path) -> str:
    image, text, target, anchor = found.groups("")
    if not target or re.match(r"[a-z]+:", target):
        return f"{image}[{text}]({target}{anchor})"
    path = os.path.relpath(folder / target, ROOT)
    inside = path.removeprefix("docs/")
    if path in PAGES or inside != path:
        return f"{image}[{text}]({PAGES.get(path, inside)}{anchor})"
    return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"
