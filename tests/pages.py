"""The pages of the documentation, taken apart: fenced blocks with the reason why one is not run, commands, links."""

import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELL, PYTHON = "bash", "python"

_BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^>]+) -->\s*)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_HERE_DOCUMENT = re.compile(r"<<'(\w+)'.*?^\1$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"(?:^|[\s(])(?:bert-pretrain|-m bert_pretrain)\s+(\S.*)")
_ENDS_OF_A_COMMAND = {"|", "||", "&", "&&", ";", ">", ">>", "<"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str | None
    """Why the tests do not run it; None where they do."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @cached_property
    def commands(self) -> list[list[str]]:
        """The words of each call of bert-pretrain in it, without the program's name."""
        if self.language == PYTHON:
            return []
        lines = _HERE_DOCUMENT.sub("", self.text.replace("\\\n", " ")).splitlines()
        return [words(found[1]) for line in lines if (found := _COMMAND.search(line))]


def words(line: str) -> list[str]:
    """Return the words of one shell command, up to the operator or comment that ends it."""
    taken = []
    for word in shlex.split(line, comments=True):
        if word in _ENDS_OF_A_COMMAND:
            break
        taken.append(word)
    return taken


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start("language")) + 1, found["language"], found["text"], found["reason"])
        for found in _BLOCK.finditer(text)
    ]


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))


def links(page: Path) -> list[str]:
    """Return where a page's links lead, in order."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


def headings(page: Path) -> list[str]:
    """Return a page's headings, with the marks of their level."""
    return re.findall(r"^#+ .*$", prose(page), re.MULTILINE)


def anchor(heading: str) -> str:
    """Return the name by which GitHub links to a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower())
    return kept.replace(" ", "-")
