"""Command line: fast help in 80 columns, shell completion, and messages for wrong options."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bert_pretrain.cli import app
from tests.conftest import REPOSITORY, call

HEAVY = ("torch", "datasets", "transformers", "pyarrow", "numpy", "tokenizers")
COMMANDS = (
    "vocab", "make-data", "train", "run", "config", "inspect", "evaluate", "fill-mask", "embed", "report", "finetune",
    "predict",
)  # fmt: skip


def test_ctrl_c_during_the_imports_of_a_command_prints_one_line(tmp_path: Path) -> None:
    code = """
import builtins, os, runpy, signal, sys
original, sys.argv = builtins.__import__, ["bert-pretrain", "vocab", "t", "--output", "o"]
def interrupt(name, *rest, **options):
    if name == "bert_pretrain.vocab.run":
        os.kill(os.getpid(), signal.SIGINT)
    return original(name, *rest, **options)
builtins.__import__ = interrupt
runpy.run_module("bert_pretrain", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 130
    assert re.fullmatch(r"interrupted; .*\n", done.stderr)
    assert not list(tmp_path.iterdir())


COMPLETE = {
    "": set(COMMANDS),
    "train --con": {"--config"},
    "train --config ba": {"base", "base-chinese"},
    "run ti": {"tiny"},
    "run tiny,pa": {"tiny,paper"},
}


def test_completion_script_names_the_program() -> None:
    # typer would detect the calling shell, and there may be none here.
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    for shell in ("bash", "fish"):
        command = [sys.executable, "-m", "bert_pretrain", "--show-completion", shell]
        script = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        assert "_BERT_PRETRAIN_COMPLETE" in script
        assert "-m" not in script.split()


OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
WAITS: list[tuple[dict[str, str], str]] = [  # variables set by the user, and the values that OpenMP gets
    ({}, "passive 1000"),
    ({"OMP_WAIT_POLICY": "active"}, "active None"),
    ({"GOMP_SPINCOUNT": "5"}, "passive 5"),
]


@pytest.fixture(scope="module")
def printed() -> dict[str, tuple[str, str]]:
    """Return the output and the exit code with OpenMP variables of several calls, made in one process."""
    calls: dict[str, tuple[list[str], dict[str, str]]] = {
        **{f"help {name}": ([name, "--help"], {"COLUMNS": "80"}) for name in COMMANDS},
        "help ": (["--help"], {"COLUMNS": "80"}),
        **{f"waits {variables}": (["--version"], variables) for variables, _ in WAITS},
    }
    for words in COMPLETE:
        variables = {"COMP_WORDS": f"bert-pretrain {words}", "COMP_CWORD": str(len(words.split(" ")))}
        calls[f"complete {words}"] = [], {**variables, "_BERT_PRETRAIN_COMPLETE": "complete_bash"}
    program = f"""
import os, sys
from bert_pretrain.cli import main
before = {{name: value for name, value in os.environ.items() if name not in {OPENMP}}}
for arguments, variables in {list(calls.values())}:
    os.environ.clear()
    os.environ.update({{**before, **variables}})
    sys.argv = ["bert-pretrain", *arguments]
    try:
        main()
    except SystemExit as error:
        print("\\f", error.code, *map(os.environ.get, {OPENMP}), end="\\f")
print([name for name in {HEAVY} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    *parts, heavy = done.stdout.split("\f")
    assert (heavy, done.stderr) == ("[]\n", "")
    return dict(zip(calls, zip(parts[::2], parts[1::2], strict=True), strict=True))


def test_shell_completes_commands_flags_and_presets(printed: dict[str, tuple[str, str]]) -> None:
    assert {words: set(printed[f"complete {words}"][0].split()) for words in COMPLETE} == COMPLETE


def test_openmp_waits_passively_unless_the_user_sets_it(printed: dict[str, tuple[str, str]]) -> None:
    assert [printed[f"waits {variables}"][1] for variables, _ in WAITS] == [f" 0 {expected}" for _, expected in WAITS]


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_is_complete_in_80_columns(printed: dict[str, tuple[str, str]], name: str) -> None:
    shown, group = printed[f"help {name}"][0], typer.main.get_command(app)
    command = group.commands[name] if name else group
    texts = [command.help, *(parameter.help for parameter in command.params)]
    texts += [] if name else [each.help.partition("\n")[0] for each in group.commands.values()]
    assert [text for text in texts if text and "".join(text.split()) not in "".join(shown.split())] == []
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if re.search(r"--[\w-]*-$", line)]  # a flag cut at its hyphen
    examples = re.findall(r"(Example: (?:.+\n)+)", shown)
    assert [example for example in examples if example.count("\n") > 1] == []
    assert bool(examples) == bool(name)


WRONG = {
    "train --max-steps 5": "--steps",
    "train --lr 5": "--lr",
    "train --outptu x": "--output",
    "vocab --size 8": "--vocab-size",
    "fill-mask m x --topk 3": "--top-k",
    "vocab": "",
    "vocab a.txt": "--output",
    "make-data a --output b": "--vocab",
    "vocab a --output b -x": "-x",
    "nosuch": "nosuch",
}


@pytest.mark.parametrize("call", WRONG)
def test_wrong_call_exits_with_2_and_names_the_flag(call: str) -> None:
    result = CliRunner().invoke(app, call.split())
    assert (result.exit_code, type(result.exception)) == (2, SystemExit)
    assert result.stderr.strip()
    assert WRONG[call] in result.stderr


LATIN = os.fsdecode(b"caf\xe9")


@pytest.mark.parametrize(
    "words",
    [
        "vocab a.txt --output LATIN",
        "make-data a.txt --vocab vocab --output LATIN",
        "make-data a.txt --vocab vocab --output data --store LATIN",
        "train --data data --output LATIN",
        "run tiny a.txt --output LATIN",
        "train --data data --output run --init-from LATIN",
        "finetune classify model --train a.csv --output LATIN",
        "embed model a.txt --output LATIN.parquet",
        "evaluate LATIN --text a.txt",
    ],
)
def test_path_that_is_not_utf8_is_refused_before_the_work(words: str, monkeypatch, tmp_path: Path, data_folder) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(data_folder)
    (tmp_path / "vocab").mkdir()
    assert "is not UTF-8" in call(*words.replace("LATIN", LATIN).split(), code=2).output
    assert not list(tmp_path.glob(f"*{LATIN}*"))


def test_outputs_are_written_in_a_folder_that_is_not_utf8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, english_text: Path, vocab_folder: Path, bert_folder: Path
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    (tmp_path / LATIN).mkdir()
    monkeypatch.chdir(tmp_path / LATIN)
    Path(f"{LATIN}.txt").symlink_to(english_text)
    Path("lines.txt").write_text("One word.\nTwo words.\n")
    for words in (
        ["make-data", f"{LATIN}.txt", "--vocab", vocab_folder, "--output", "data", "--workers", "1"],
        ["embed", bert_folder, "lines.txt", "--output", "vectors.parquet"],
    ):
        subprocess.run([sys.executable, "-m", "bert_pretrain", *words], env=environment, check=True)
    assert {path.name for path in Path().iterdir()} >= {"data", "vectors.parquet"}
