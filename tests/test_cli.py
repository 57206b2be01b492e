"""The command line: answers at once, whole in 80 columns, completes, and names the flag that was meant."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bert_pretrain.cli import app
from bert_pretrain.cli.options import KEYS_OF_FLAGS
from bert_pretrain.config_keys import keys_of

HEAVY = ("torch", "datasets", "transformers", "pyarrow", "numpy", "tokenizers")
COMMANDS = (
    "vocab", "make-data", "train", "run", "config", "inspect", "evaluate", "fill-mask", "embed", "report", "finetune",
    "predict",
)  # fmt: skip


@pytest.mark.parametrize("module", ["typer", "bert_pretrain.vocab.run"])
def test_ctrl_c_while_the_program_is_imported_is_one_line(tmp_path: Path, module: str) -> None:
    code = f"""
import builtins, os, runpy, signal, sys
ordinary, sys.argv = builtins.__import__, ["bert-pretrain", "vocab", "t", "--output", "o"]
def interrupt(name, *rest, **options):
    if name == {module!r}:
        os.kill(os.getpid(), signal.SIGINT)
    return ordinary(name, *rest, **options)
builtins.__import__ = interrupt
runpy.run_module("bert_pretrain", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 130
    assert re.fullmatch(r"interrupted; .*\n", done.stderr)
    assert not list(tmp_path.iterdir())


COMPLETE = {
    "": set(COMMANDS),
    "tr": {"train"},
    "train --con": {"--config"},
    "train --config ba": {"base", "base-chinese"},
    "run ti": {"tiny"},
    "run tiny,pa": {"tiny,paper"},
}


@pytest.mark.parametrize(
    ("shell", "words"), [*(("bash", words) for words in COMPLETE), ("zsh", "run ti"), ("fish", "train --con")]
)
def test_a_shell_completes_commands_flags_and_presets_without_heavy_libraries(shell: str, words: str) -> None:
    line = f"bert-pretrain {words}"
    asked = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    done = run_main([], env={**os.environ, **asked, "_BERT_PRETRAIN_COMPLETE": f"complete_{shell}"})
    offered = done.stdout.removeprefix("_arguments '*: :((")
    assert {re.match(r"[\w,-]+", line.lstrip('"'))[0] for line in offered.splitlines() if line} == COMPLETE[words]
    assert done.stderr.splitlines()[-1] == "[]"


def test_completion_is_written_for_the_program_whoever_starts_it(command_line) -> None:
    # By itself typer looks which shell has called it, and here none may have.
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    for shell in ("bash", "zsh", "fish"):
        script = command_line("--show-completion", shell, env=environment).stdout
        assert "_BERT_PRETRAIN_COMPLETE" in script
        assert "-m" not in script.split()


def test_all_stages_at_once_are_refused_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    (tmp_path / "a.txt").write_text("One.\nTwo.\n")
    result = CliRunner().invoke(app, ["run", "tiny", str(tmp_path / "a.txt"), "--output", str(tmp_path / "o")])
    assert result.exit_code == 2
    assert "torchrun" in result.stderr
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, "passive 1000"),
        ({"OMP_WAIT_POLICY": "active"}, "active None"),
        ({"GOMP_SPINCOUNT": "5"}, "passive 5"),
    ],
)
def test_threads_soon_sleep_while_they_wait_unless_the_user_says_otherwise(own: dict[str, str], expected: str) -> None:
    # OpenMP reads the variables when torch is loaded, which must not have happened before.
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    environment = {name: value for name, value in os.environ.items() if name not in names} | own
    run = run_main(["--version"], f"atexit.register(lambda: print(*map(os.environ.get, {names})))", env=environment)
    assert (run.stdout.splitlines()[-1], run.stderr) == (expected, "[]\n")


def run_main(arguments: list[str], before: str = "", **options: object) -> "subprocess.CompletedProcess[str]":
    """Run the program in a process of its own; its last line of standard error names the heavy libraries loaded."""
    code = f"""
import atexit, os, sys
{before}
atexit.register(lambda: print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr))
from bert_pretrain.cli import main
sys.argv = ["bert-pretrain", *{arguments!r}]
main()
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **options)


@pytest.mark.parametrize("name", ["--version", None, *COMMANDS])
def test_help_is_whole_in_80_columns_and_loads_no_heavy_libraries(name: str | None) -> None:
    done = run_main([name, "--help"] if name in COMMANDS else [name or "--help"], env={**os.environ, "COLUMNS": "80"})
    assert (done.returncode, done.stderr) == (0, "[]\n")
    if name == "--version":
        return
    shown, group = done.stdout, typer.main.get_command(app)
    command = group.commands[name] if name else group
    texts = [command.help, *(parameter.help for parameter in command.params)]
    texts += [] if name else [each.help.partition("\n")[0] for each in group.commands.values()]
    missing = [text for text in texts if text and "".join(text.split()) not in "".join(shown.split())]
    assert missing == []
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if re.search(r"--[\w-]*-$", line)]  # a flag cut at its hyphen
    examples = re.findall(r"(Example: (?:.+\n)+)", shown)
    assert [example for example in examples if example.count("\n") > 1] == []
    assert bool(examples) == bool(name)


WRONG = {
    "train --max-steps 5": "--steps",
    "train --train.max_steps=5": "--steps",
    "train --lr 5": "--learning-rate",
    "train --epochs 2": "--set train.max_epochs=VALUE",
    "train --outptu x": "--output",
    "run tiny --max-seq-length 8": "--set data.max_seq_length=VALUE",
    "vocab --size 8": "--vocab-size",
    "finetune classify m --lr 1": "--learning-rate",
    "fill-mask m x --topk 3": "--top-k",
    "vocab": "",
    "vocab a.txt": "--output",
    "make-data a --output b": "--vocab",
    "vocab a --output b -x": "-x",
    "nosuch": "nosuch",
}


@pytest.mark.parametrize("call", WRONG)
def test_a_wrong_call_exits_with_2_and_names_the_flag_that_was_meant(call: str) -> None:
    result = CliRunner().invoke(app, call.split())
    assert (result.exit_code, type(result.exception)) == (2, SystemExit)
    assert result.stderr.strip()
    assert WRONG[call] in result.stderr
    assert set(KEYS_OF_FLAGS.values()) <= {key.dotted for key in keys_of()}
