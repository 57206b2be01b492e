"""The documentation is true: its commands run as they stand; its flags, keys, paths and links exist.

Each page is run in order, block by block, in a folder prepared for it, by processes of its own. A block that cannot run
here has the reason in a comment before it, `<!-- not run: needs Slurm -->`; its commands must still parse.
"""

import gzip
import itertools
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import typer
import yaml

import mkdocs_hooks
from bert_pretrain.cli import app
from bert_pretrain.cli.options import key_flags
from bert_pretrain.config_file import load_config
from tests.conftest import call, one_sentence_a_line
from tests.pages import PAGES, PYTHON, ROOT, SHELL, Block, anchor, blocks, headings, links, prose, words

GROUP = typer.main.get_command(app)
ALL_BLOCKS = [block for page in PAGES for block in blocks(page)]

# What a page takes for granted: names of folders that earlier stages have made.
BEFOREHAND: dict[str, tuple[str, ...]] = {
    "README.md": ("runs/demo",),
    "data.md": ("data",),
    "training.md": ("run-a", "run-b"),
    "using.md": ("runs/demo",),
    "finetuning.md": ("run",),
    "python.md": ("data",),
}
QUICK = {"data.md"}
MODEL = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 64,
}  # fmt: skip
"""With as many layers as --pooling last4-mean needs."""


def is_run(block: Block) -> bool:
    return block.language in (SHELL, PYTHON) and not block.not_run


def pages_to_run() -> list[object]:
    """Return every page with something to run; the READMEs have the same blocks, so one of them is enough."""
    pages = [page for page in PAGES if any(map(is_run, blocks(page))) and page.name != "README.zh-CN.md"]
    return [
        pytest.param(page, id=page.name, marks=() if page.name in QUICK else pytest.mark.slow(reason="many processes"))
        for page in pages
    ]


@pytest.mark.parametrize("page", pages_to_run())
def test_the_blocks_of_a_page_run_as_they_stand(page: Path, workplace: Path, environment: dict[str, str]) -> None:
    for language, together in itertools.groupby(filter(is_run, blocks(page)), key=lambda block: block.language):
        program = ["bash", "-euo", "pipefail"] if language == SHELL else [sys.executable]
        # Blocks of Python that follow one another are one program, as in a notebook.
        text = "\n".join(block.text for block in together)
        done = subprocess.run(
            [*program, "-c", text], cwd=workplace, env=environment, capture_output=True, text=True, timeout=1800
        )
        assert done.returncode == 0, f"{page.name}\n{text}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"


@pytest.fixture
def workplace(page: Path, tmp_path: Path, english_documents, chinese_text: Path, request) -> Path:
    """A folder with small inputs of every kind that pages name, and what the page has beforehand."""
    folder = tmp_path / "work"
    (folder / "corpus").mkdir(parents=True)
    (folder / "scripts").symlink_to(ROOT / "scripts")
    for name, part in (("a", english_documents[0::2]), ("b", english_documents[1::2])):
        (folder / "corpus" / f"{name}.txt.gz").write_bytes(gzip.compress(one_sentence_a_line(part).encode()))
    (folder / "corpus.zh.txt").write_bytes(chinese_text.read_bytes())
    (folder / "corpus.vi.txt").write_text(one_sentence_a_line(vietnamese_documents()), encoding="utf-8")
    write_labelled_rows(folder)
    for name in BEFOREHAND.get(page.name, ()):
        (folder / name).parent.mkdir(exist_ok=True)
        made: Path = request.getfixturevalue("data_folder" if name == "data" else "trained")
        (folder / name).symlink_to(made if name in ("data", "runs/demo") else made / "train")
    return folder


def vietnamese_documents() -> list[list[str]]:
    """Documents of short sentences made from every combination of a few words."""
    words = (
        ("Tôi", "Bạn", "Mẹ", "Em"),
        ("thích", "đọc", "mua", "tìm"),
        ("sách", "báo", "thơ"),
        ("mỗi ngày", "ở nhà"),
    )
    sentences = [f"{' '.join(chosen)}." for chosen in itertools.product(*words)]
    return [sentences[start : start + 8] for start in range(0, 88, 2)]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Where `bert-pretrain` and `python` are this checkout and this interpreter."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, program in (("bert-pretrain", f"{sys.executable} -m bert_pretrain"), ("python", sys.executable)):
        (programs / name).write_text(f'#!/bin/sh\nexec {program} "$@"\n')
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, data_folder: Path) -> Path:
    """A folder laid out as `run` does, `data` and `train`, with a very small model after three steps."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "data").symlink_to(data_folder)
    settings = [f"--set=model.{key}={value}" for key, value in MODEL.items()]
    settings += ["--set=train.max_steps=3", "--set=train.global_batch_size=8"]
    call("train", "--data", data_folder, "--output", folder / "train", *settings)
    return folder


def write_labelled_rows(folder: Path) -> None:
    """Write the few rows of each task that the page on fine-tuning names."""
    for name, count in (("reviews.csv", 40), ("unseen.csv", 8)):
        rows = (f"the {'good' if i % 2 else 'bad'} function number {i},{i % 2}\n" for i in range(count))
        (folder / name).write_text("text,label\n" + "".join(rows), encoding="utf-8")
    for name, count in (("sts-train.csv", 40), ("sts-dev.csv", 8)):
        pairs = (f"main\tmade\t2012\t{i}\t{i % 6}\tItem {i} is here.\tItem {i % 6} is here.\n" for i in range(count))
        (folder / name).write_text("".join(pairs), encoding="utf-8")
    sentence = "Anna\tB-PER\nsings\tO\nin\tO\nNew\tB-LOC\nYork\tI-LOC\n"
    for name, count in (("names.conll", 24), ("dev.conll", 6)):
        (folder / name).write_text("\n".join([sentence] * count), encoding="utf-8")
    for name, count in (("train-v2.0.json", 24), ("dev-v2.0.json", 6)):
        contexts = [f"The value of item {i} is stored in the list." for i in range(count)]
        paragraphs = [
            {
                "context": text,
                "qas": [
                    {"id": f"{text}a", "question": "Where is it stored?",
                     "answers": [{"text": "the list", "answer_start": text.index("the list")}]},
                    {"id": f"{text}b", "question": "Who sang?", "answers": [], "is_impossible": True},
                ],
            }
            for text in contexts
        ]  # fmt: skip
        squad = {"version": "v2.0", "data": [{"title": "items", "paragraphs": paragraphs}]}
        (folder / name).write_text(json.dumps(squad), encoding="utf-8")


def test_the_readmes_lead_to_every_page_and_command() -> None:
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in links(ROOT / "README.md")}
    assert [page.name for page in PAGES[1:] if page not in linked] == []
    text = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")
    assert [name for name in GROUP.commands if f"| `{name}` |" not in text] == []
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"docs/{page.name}" not in text] == []
    # A line end inside a sentence shows as a blank.
    assert re.findall(r"[\u4e00-\u9fff，、；]\n[\u4e00-\u9fff]", text) == []


def check_command(command: list[str]) -> None:
    """Parse a command as the program would, its configuration too, without running it."""
    name, *rest = command
    if name.startswith("-"):
        assert name in {"--help", *(spelling for option in GROUP.params for spelling in option.opts)}
        return
    assert name in GROUP.commands, f"there is no command '{name}'"
    given = GROUP.commands[name].make_context(name, rest).params
    source = given.get("config")
    # A file is the reader's own, and `auto` makes its own.
    preset = None if str(source).endswith(".yaml") or (name, source) == ("run", "auto") else source
    names = ("steps", "learning_rate", "batch_size", "teacher", "device", "time")
    values = {flag: given.get(flag) if name in ("train", "run") else None for flag in names}
    of_all_stages = values.pop("time") if name == "run" else None
    flags = key_flags(**values)
    if of_all_stages:
        flags["time"] = ("--time", of_all_stages)
    load_config(preset, given.get("settings") or [], flags, with_phases=name == "run")


@pytest.mark.parametrize("block", [block for block in ALL_BLOCKS if block.commands], ids=str)
def test_every_command_in_a_block_parses_with_its_configuration(block: Block) -> None:
    for command in block.commands:
        check_command(command)


@pytest.mark.parametrize("name", list(GROUP.commands))
def test_the_help_of_every_command_has_an_example_that_parses(name: str) -> None:
    paragraphs = [" ".join(part.split()) for part in (GROUP.commands[name].help or "").split("\n\n")]
    examples = [part.removeprefix("Example: bert-pretrain ") for part in paragraphs if part.startswith("Example:")]
    assert examples
    for example in examples:
        assert example.startswith(name)
        check_command(words(example))


def test_what_a_reader_types_is_marked_as_shell() -> None:
    typed = re.compile(r"^(bert-pretrain|torchrun|python|make|pip) ", re.MULTILINE)
    assert [str(block) for block in ALL_BLOCKS if not block.language and typed.search(block.text)] == []


@pytest.mark.parametrize(
    "block", [block for block in ALL_BLOCKS if block.language == "yaml" and not block.not_run], ids=str
)
def test_every_configuration_shown_is_one(block: Block, tmp_path: Path) -> None:
    assert isinstance(yaml.safe_load(block.text), dict)
    path = tmp_path / "shown.yaml"
    path.write_text(block.text, encoding="utf-8")
    load_config(path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_and_heading_that_a_page_names_exists(page: Path) -> None:
    missing = []
    for link in links(page):
        if link.startswith(("http://", "https://")):
            continue
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (heading and heading not in map(anchor, headings(target))):
            missing.append(link)
    named = re.findall(r"`((?:scripts|docs|tests|configs|bert_pretrain)/[\w./-]+)`", prose(page))
    missing += [path for path in named if not (ROOT / path).exists()]
    assert missing == []


def test_the_site_has_every_page_and_follows_links_to_the_root() -> None:
    named = re.findall(r"[\w.]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2])
    pages = [page.name for page in (ROOT / "docs").glob("*.md")]
    assert sorted(named) == sorted([*pages, *mkdocs_hooks.PAGES.values()])

    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="using.md"))
    text = "[a](../RESULTS.md#x) [b](data.md) [c](../bert_pretrain/rng.py) [d](#x)\n```\n[e](../RESULTS.md)\n```\n"
    made = "[a](results.md#x) [b](data.md) c (`bert_pretrain/rng.py`) [d](#x)\n```\n[e](../RESULTS.md)\n```\n"
    assert mkdocs_hooks.on_page_markdown(text, page) == made


def test_the_lines_that_repair_wikitext_repair_it(tmp_path: Path) -> None:
    (block,) = (block for block in blocks(ROOT / "docs" / "cleaning.md") if "wiki.train.tokens" in block.text)
    text = " The <unk> is where a = b = c in English . \n"
    path = tmp_path / "wiki.train.tokens"
    path.write_text(f" \n = Robert Boulter = \n \n{text} \n = = Career = = \n \n = = = 2000 – 2005 = = = \n{text}")
    subprocess.run(["bash", "-e", "-c", block.text], cwd=tmp_path, check=True)
    assert [line for line in path.read_text().splitlines() if line.strip()] == [
        text.replace("<unk>", "").rstrip("\n")
    ] * 2


def test_code_and_documents_are_written_in_plain_words() -> None:
    """Words that make a reader stop: write a number's name, "each", "next to", "again", "must"."""
    banned = re.compile(
        r"\b(so many|whatever|of which|anew|shall|as ever|beside|learnt|goes on|is told|all the same|let go|mend|misfit"
        r"|clings|rehears\w*|lies|by itself is|thereby|whereby|wherein|thereof)\b(?!_)",
        re.IGNORECASE,
    )
    files = [*PAGES, ROOT / "RESULTS.md", ROOT / "CHANGELOG.md", *(ROOT / "configs").glob("*.yaml")]
    files += [path for folder in ("bert_pretrain", "scripts") for path in (ROOT / folder).rglob("*.py")]
    found = [
        f"{path.name}: {line.strip()}"
        for path in files
        for line in path.read_text().splitlines()
        if banned.search(line)
    ]
    assert found == []
