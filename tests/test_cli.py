"""The command line: answers at once, speaks in three parts of every mistake, and survives being stopped or killed."""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bert_pretrain.cli import app
from bert_pretrain.cli.options import KEYS_OF_FLAGS
from bert_pretrain.config_file import load_config
from bert_pretrain.config_keys import keys_of
from bert_pretrain.make_data.run import make_data

HEAVY = ("torch", "datasets", "transformers", "pyarrow", "numpy", "tokenizers")
COMMANDS = (
    "vocab", "make-data", "train", "run", "config", "inspect", "evaluate", "fill-mask", "embed", "report", "finetune",
    "predict",
)  # fmt: skip


def test_help_and_version_load_no_heavy_libraries() -> None:
    code = f"""
import contextlib, sys
from bert_pretrain.cli import main
for arguments in (["--help"], ["--version"], *([command, "--help"] for command in {COMMANDS!r})):
    sys.argv = ["bert-pretrain", *arguments]
    try:
        main()
    except SystemExit as leaving:
        assert not leaving.code
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
    assert result.stdout.count("Usage: bert-pretrain") == 1 + len(COMMANDS)


@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_help_is_whole_in_80_columns(name: str | None) -> None:
    group = typer.main.get_command(app)
    shown = CliRunner().invoke(app, [name, "--help"] if name else ["--help"], terminal_width=78).stdout
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


WRONG_FLAGS = {
    "train --max-steps 5": "--steps",
    "train --train.max_steps=5": "--steps",
    "train --lr 5": "--learning-rate",
    "train --bs 5": "--batch-size",
    "train --epochs 2": "--set train.max_epochs=VALUE",
    "train --outptu x": "--output",
    "run tiny --max-seq-length 8": "--set data.max_seq_length=VALUE",
    "vocab --size 8": "--vocab-size",
    "finetune classify m --lr 1": "--learning-rate",
    "fill-mask m x --topk 3": "--top-k",
}


@pytest.mark.parametrize("call", WRONG_FLAGS)
def test_an_unknown_flag_is_answered_with_the_one_that_was_meant(call: str) -> None:
    result = CliRunner().invoke(app, call.split())
    assert result.exit_code == 2
    assert result.stderr.rstrip().endswith(f"; did you mean {WRONG_FLAGS[call]}?")


def test_every_key_that_a_flag_stands_for_is_one() -> None:
    assert set(KEYS_OF_FLAGS.values()) <= {key.dotted for key in keys_of()}


@pytest.mark.parametrize("module", ["typer", "bert_pretrain.vocab.run"])
def test_ctrl_c_while_the_program_is_imported_is_one_line(tmp_path: Path, module: str) -> None:
    """Ctrl-C comes with the import of a library, or of our own module by the command."""
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
    code = f"""
import sys
from bert_pretrain.cli import main
try:
    main()
finally:
    print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    environment = {**os.environ, **asked, "_BERT_PRETRAIN_COMPLETE": f"complete_{shell}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    offered = done.stdout.removeprefix("_arguments '*: :((")
    assert {re.match(r"[\w,-]+", line.lstrip('"'))[0] for line in offered.splitlines() if line} == COMPLETE[words]
    assert done.stderr.strip().splitlines()[-1] == "[]"


def test_completion_is_written_for_the_program_whoever_starts_it(command_line) -> None:
    # By itself typer looks which shell has called it, and here none may have.
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    for shell in ("bash", "zsh", "fish"):
        script = command_line("--show-completion", shell, env=environment).stdout
        assert "_BERT_PRETRAIN_COMPLETE" in script
        assert "-m" not in script.split()


@pytest.mark.parametrize(
    "arguments", ["vocab", "vocab a.txt", "nosuch", "make-data a --output b", "vocab a --output b -x"]
)
def test_a_wrong_call_exits_with_2_and_no_traceback(arguments: str) -> None:
    result = CliRunner().invoke(app, arguments.split())
    assert (result.exit_code, type(result.exception)) == (2, SystemExit)
    assert result.stderr.strip()


SETTINGS = ["data.max_seq_length=32", "data.dupe_factor=4", "data.examples_per_shard=256"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, english_text: Path, vocab_folder: Path) -> dict[str, str]:
    """The files of a run that nothing disturbed."""
    output = tmp_path_factory.mktemp("reference") / "data"
    return digests(make_data(load_config(settings=SETTINGS), [str(english_text)], vocab_folder, output, workers=1))


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def start(english_text: Path, vocab_folder: Path, output: Path, workers: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "bert_pretrain", "make-data", str(english_text), "--vocab", str(vocab_folder)]
    command += ["--output", str(output), "--workers", str(workers)]
    command += [item for setting in SETTINGS for item in ("--set", setting)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 180
    while not condition() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("number", "code", "word", "workers"),
    [(signal.SIGINT, 130, "interrupted", 2), (signal.SIGTERM, 143, "terminated", 1)],
)
def test_a_stopped_run_says_how_to_go_on_and_goes_on(
    tmp_path: Path,
    english_text: Path,
    vocab_folder: Path,
    reference,
    number: signal.Signals,
    code: int,
    word: str,
    workers: int,
) -> None:
    output = tmp_path / "data"
    for _ in range(5):  # until the signal comes before a fast command, seen late by a busy machine, is done
        shutil.rmtree(output, ignore_errors=True)
        process = start(english_text, vocab_folder, output, workers)
        wait_for(lambda: len(list(output.glob("train/[0-9]*.parquet"))) >= 3, process)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=180)
        if process.returncode != 0:
            break
    assert process.returncode == code, stderr
    assert word in stderr
    assert "Traceback" not in stderr
    assert not (output / "manifest.json").exists()
    again = start(english_text, vocab_folder, output, workers)
    _, stderr = again.communicate(timeout=180)
    assert again.returncode == 0, stderr
    assert digests(output) == reference


def test_all_stages_at_once_are_refused_under_torchrun(
    english_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = CliRunner().invoke(app, ["run", "tiny", str(english_text), "--output", str(tmp_path / "o")])
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
    # In a process of its own: OpenMP reads the variables when torch is loaded, which must not have happened before.
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    program = (
        "import atexit, os, sys\n"
        f"atexit.register(lambda: print(*map(os.environ.get, {names}), 'torch' in sys.modules))\n"
        "from bert_pretrain.cli import main\nsys.argv = ['bert-pretrain', '--version']\nmain()"
    )
    environment = {name: value for name, value in os.environ.items() if name not in names} | own
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == f"{expected} False"


def test_the_help_of_finetune_groups_the_flags_by_task() -> None:
    shown = CliRunner().invoke(app, ["finetune", "--help"]).output
    sections = {line[:-1]: place for place, line in enumerate(shown.splitlines()) if re.fullmatch(r"\w+:", line)}
    flags = {word: place for place, line in enumerate(shown.splitlines()) for word in line.split()[:1]}
    assert sections["Options"] < flags["--epochs"] < sections["classify"] < flags["--pair-field"]
    assert sections["tag"] < flags["--tags-field"] < sections["answer"] < flags["--stride"]


def test_a_bar_of_fractions_that_ends_above_its_total_is_silent() -> None:
    code = """
import sys
from bert_pretrain import cli
from bert_pretrain.io.pool import progress_bar
def work(**_):
    with progress_bar(total=1) as bar:
        bar.update(1.2)
cli.app = work
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    assert "it/s" in done.stderr
    assert "Warning" not in done.stderr
