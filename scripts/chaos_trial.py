"""Commands for fault injection with their inputs, and trials: a command runs in a fresh folder with a fault.

All commands run in the same path, because manifests record paths. Outputs are compared byte by byte, without times,
speeds and plots of them.
"""

import gzip
import hashlib
import json
import random
import re
import shlex
import shutil
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos_process import Action, Child, at_file_event, command_line, fork
from measure import append_rows

SAME, MESSAGE, UNCHECKED = "same", "message", "unchecked"
LOST, SILENT, TRACEBACK, HANG = "lost", "silent", "traceback", "hang"
DEFECTS = (LOST, SILENT, TRACEBACK, HANG)
VERDICTS = (SAME, MESSAGE, UNCHECKED, *DEFECTS)
HANG_SECONDS = 150.0
RANKS_SECONDS = 20.0  # between SIGTERM and SIGKILL of the other ranks when one has failed, as in torchrun
USER_FILES = ("text", "tiny.yaml", "lines.txt", "pairs.jsonl", "rows.jsonl")  # inputs without a checksum
WRITERS = {"vocab": "vocab", "data": "make-data", "run": "train", "model": "train", "tuned": "finetune classify"}
# Output files that no command reads: files for people, caches, and shards (a finished `run` reads only their footers).
NOT_READ_BACK = re.compile(r"\.(png|md|html|log|yaml)$|(^|/)\.|^all/data/.*\.parquet$")
# Files with times, checksums of such files, and files that a finished output may lack.
VOLATILE_FILES = ("time.json", "checksums.json", "manifest.partial.json", ".lock", "training_args.bin")
VOLATILE_KEYS = re.compile(
    r"second|^time$|_time|time_|^warmup_start$|runtime|per_s$|tokens_per|mfu|flops_per|memory|wait_share|host|pid|date"
    r"|sha256|^bytes$"
)
_QUANTITY = r"\d[\d,.]*( ?(d|h|min|ms|s|seconds?|minutes?|tokens/s|MB|GB|GFLOPS|TFLOPS|it/s|/s|%))\b"
VOLATILE_TEXT = re.compile(rf"{_QUANTITY}( {_QUANTITY})*")
# Damaged checkpoints and old outputs, which commands rename; the token store, which is a cache.
NOT_COMPARED = re.compile(r"(^|/)broken-|\.old-\d|(^|/)\.token-store(/|$)")
TINY_CONFIG = """\
vocab: {size: 400, unused_tokens: 9, min_frequency: 1}
data: {max_seq_length: 32, dupe_factor: 2, examples_per_shard: 64, validation_fraction: 0.2}
model:
  {hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32, max_position_embeddings: 64}
train: {global_batch_size: 16, max_steps: 12, save_every: 4, eval_every: 6, log_every: 2, keep_checkpoints: 2}
"""


@dataclass(frozen=True)
class Command:
    """A command to test."""

    name: str
    line: str
    outputs: tuple[str, ...] = ()
    prints_result: bool = False  # the standard output is compared as well
    verify_flags: tuple[str, ...] = ()  # added when a finished output is damaged
    ranks: int = 1
    share: float = 1.0  # weight with which it is drawn, lower for slow commands

    @property
    def arguments(self) -> tuple[str, ...]:
        return tuple(shlex.split(self.line))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Files and folders to copy from the prepared ones."""
        return tuple(w for w in self.arguments[1:] if w in (*USER_FILES, *WRITERS) and w not in self.outputs)


_CONFIG, _TRAIN = "--config tiny.yaml --workers 1", "train --data data --output run --config tiny.yaml"
_FINETUNE = "finetune classify model --train rows.jsonl --epochs 2 --max-length 24 --output tuned --batch-size 16"
COMMANDS = (
    Command("vocab", f"vocab text --output vocab {_CONFIG}", ("vocab",)),
    Command(
        "make-data", f"make-data text --vocab vocab --output data {_CONFIG}", ("data",), verify_flags=("--verify",)
    ),
    Command("train", _TRAIN, ("run",)),
    Command("vocab --extend", f"vocab text --output more --extend model --add-tokens 5 {_CONFIG}", ("more",)),
    Command("train (2 ranks)", _TRAIN, ("run",), ranks=2),
    Command("train --init-from", f"{_TRAIN} --init-from model --set train.max_steps=8", ("run",)),
    Command("run", "run tiny.yaml text --output all --workers 1", ("all",), share=0.5),
    Command("inspect", "inspect data --stats --html page.html --workers 1", ("page.html",), prints_result=True),
    Command("evaluate --data", "evaluate model --data data --json metrics.json", ("metrics.json",)),
    Command("score", "evaluate model --text lines.txt --output scores.jsonl", ("scores.jsonl",)),
    Command("evaluate --pairs", "evaluate model --pairs pairs.jsonl --json metrics.json", ("metrics.json",)),
    Command("fill-mask", "fill-mask model 'the [MASK] of a river' --json", prints_result=True),
    Command("embed", "embed model lines.txt --output vectors.npy", ("vectors.npy",)),
    Command("finetune classify", _FINETUNE, ("tuned",)),
    Command("predict", "predict tuned rows.jsonl --output predictions.jsonl", ("predictions.jsonl",)),
    Command("report", "report run --output curves.png", ("curves.png", "curves.html")),
)


def write_inputs(folder: Path) -> None:
    """Write a corpus in several formats, a configuration, and rows for fine-tuning and evaluation."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw = random.Random(13)
    syllables = [a + b for a in "bdfklmnprst" for b in "aeiou"]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 3))) for _ in range(300)] + ["the", "of", "a", "river"]

    def sentence(count: int | None = None) -> str:
        return " ".join(draw.choices(words, k=count or draw.randint(5, 12))) + "."

    def documents(separator: str) -> list[str]:
        return [separator.join(sentence() for _ in range(draw.randint(3, 9))) for _ in range(40)]

    text = folder / "text"
    text.mkdir()
    (text / "a.txt").write_text("\n\n".join(documents("\n")) + "\n")
    records = "\n".join(json.dumps({"text": document}) for document in documents(" "))
    (text / "b.jsonl.gz").write_bytes(gzip.compress(records.encode(), mtime=0))
    pq.write_table(pa.table({"text": documents(" ")}), text / "c.parquet")
    (folder / "tiny.yaml").write_text(TINY_CONFIG)
    (folder / "lines.txt").write_text("".join(sentence() + "\n" for _ in range(12)))
    pairs = [{"sentence_good": sentence(6), "sentence_bad": sentence(6)} for _ in range(6)]
    append_rows(folder / "pairs.jsonl", pairs)
    rows = [{"text": sentence(), "label": "abc"[number % 3]} for number in range(60)]
    append_rows(folder / "rows.jsonl", rows)


# ── outputs ──


def copy(path: Path, target: Path) -> None:
    if path.is_dir():
        shutil.copytree(path, target, symlinks=True)
    else:
        shutil.copy2(path, target)


def files_of(path: Path) -> list[Path]:
    """Return a file, or the sorted files of a folder."""
    files = [path, *path.rglob("*")]
    return sorted(file for file in files if file.is_file() and not file.is_symlink())


def digest(folder: Path, outputs: Sequence[str]) -> dict[str, str]:
    """Return the hashes of the files in outputs, by path, without times and speeds."""
    hashes = {}
    for file in (file for output in outputs for file in files_of(folder / output)):
        name = file.relative_to(folder).as_posix()
        if file.name not in VOLATILE_FILES and not NOT_COMPARED.search(name):
            hashes[name] = hashlib.sha256(_comparable(file)).hexdigest()
    checkpoints = {match.group() for name in hashes if (match := re.search(r"checkpoints/step-\d+/", name))}
    for old in sorted(checkpoints)[:-1]:  # which old checkpoints exist depends on where a run was interrupted
        hashes = {name: value for name, value in hashes.items() if old not in name}
    return hashes


def _comparable(file: Path) -> bytes:
    """Return the content of a file without times and speeds."""
    content = file.read_bytes()
    if file.suffix == ".png":
        return b""  # plots have times on their axes
    if file.suffix in (".json", ".jsonl"):
        try:
            lines = content.decode().splitlines() if file.suffix == ".jsonl" else [content.decode()]
            return "\n".join(json.dumps(_without_times(json.loads(line))) for line in lines).encode()
        except (ValueError, RecursionError):
            return content
    if file.suffix in (".md", ".html", ".txt") and file.name != "vocab.txt":
        return without_times(content.decode(errors="replace")).encode()
    return content


def without_times(text: str) -> str:
    return VOLATILE_TEXT.sub("", text)


def _without_times(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_times(item) for key, item in value.items() if not VOLATILE_KEYS.search(key)}
    return [_without_times(item) for item in value] if isinstance(value, list) else value


# ── trials ──


class Defect(Exception):
    """A defect of the package."""

    def __init__(self, verdict: str, detail: str) -> None:
        super().__init__(detail)
        self.verdict = verdict


@dataclass(frozen=True)
class Reference:
    """The result of a command without a fault."""

    digest: dict[str, str]
    stdout: str
    seconds: float
    num_events: int
    num_bytes: int  # of the outputs


class Bench:
    """The prepared inputs, the references, and the folder in which all commands run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.references: dict[str, Reference] = {}
        self.current, self.inputs, self.logs = (folder / name for name in ("current", "inputs", "logs"))
        for each in (self.current, self.inputs, self.logs):
            each.mkdir(parents=True)

    def prepare(self, names: Sequence[str]) -> None:
        """Write the inputs, run every command without a fault, and copy outputs that are inputs of others."""
        child = fork(lambda: write_inputs(self.inputs), self.inputs, self.logs / "inputs")
        child.wait(HANG_SECONDS)
        if child.code:
            raise RuntimeError(child.stderr())
        needed = set(names)
        for command in reversed(COMMANDS):  # a command is after those whose outputs it reads
            if command.name in needed:
                needed.update(WRITERS[name] for name in command.inputs if name in WRITERS)
        for command in COMMANDS:
            if command.name in needed:
                self._prepare(command)

    def _prepare(self, command: Command) -> None:
        trial, count = Trial(self, command, random.Random(0)), self.logs / "events"
        trial.reset()
        children = trial.start(at_file_event(self.current, -1, lambda: None, log=count))
        trial.wait(children)
        if any(child.code for child in children):
            raise RuntimeError(f"{command.name} fails without a fault:\n{children[0].stderr()}")
        self.references[command.name] = Reference(
            digest(self.current, command.outputs),
            without_times(children[0].stdout()),
            children[0].seconds,
            int(count.read_text()),
            sum(file.stat().st_size for file in trial.written()),
        )
        shutil.copytree(self.current, self.finished(command), symlinks=True)
        for output in command.outputs:
            if WRITERS.get(output) == command.name:
                copy(self.current / output, self.inputs / output)
        if command.name == WRITERS["model"]:
            copy(self.current / "run" / "model", self.inputs / "model")

    def finished(self, command: Command) -> Path:
        """Return the copy of the folder after a run without a fault."""
        return self.folder / "finished" / command.name.replace(" ", "_")


@dataclass
class Trial:
    """A command with a fault. All random choices come from `draw`."""

    bench: Bench
    command: Command
    draw: random.Random
    log: list[dict[str, Any]] = field(default_factory=list)
    verifies: bool = False  # pass the command its `verify_flags`

    def __post_init__(self) -> None:
        self.folder = self.bench.current

    @property
    def reference(self) -> Reference:
        return self.bench.references[self.command.name]

    def reset(self, *, finished: bool = False) -> None:
        """Empty the folder and copy the inputs into it, or with `finished` the files of a finished run."""
        shutil.rmtree(self.folder, ignore_errors=True)  # a mounted folder is emptied, and cannot be removed
        self.folder.mkdir(exist_ok=True)
        if finished:
            shutil.copytree(self.bench.finished(self.command), self.folder, symlinks=True, dirs_exist_ok=True)
            return
        for name in self.command.inputs:
            copy(self.bench.inputs / name, self.folder / name)

    def written(self) -> list[Path]:
        """Return the files that the command has written."""
        inputs = {self.folder / name for name in self.command.inputs}
        return [file for file in files_of(self.folder) if not inputs & {file, *file.parents} and file.name != ".lock"]

    def draw_event(self) -> int:
        return self.draw.randint(1, self.reference.num_events)

    def start(self, plant: Action | None = None, *, rank: int = 0) -> list[Child]:
        """Start all ranks of the command, and plant a fault in one of them."""
        ranks = self.command.ranks
        run = command_line(self.command.arguments + (self.command.verify_flags if self.verifies else ()))
        environment: dict[str, str] = {}
        if ranks > 1:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = str(probe.getsockname()[1])
            environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
        children = []
        for number in range(ranks):
            if ranks > 1:
                environment |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(number))
            planted, logs = plant if number == rank else None, self.bench.logs / f"{len(self.log)}-{number}"
            children.append(
                fork(
                    run,
                    self.folder,
                    logs,
                    plant=planted,
                    environment=environment,
                )
            )
        return children

    def wait(self, children: Sequence[Child]) -> None:
        """Wait for all processes. If one of several ranks fails, end the others as torchrun does."""
        end = time.monotonic() + HANG_SECONDS
        running, is_stopping = list(children), False
        while running and time.monotonic() < end:
            child = running.pop(0)
            if not child.wait(0.1 if running else end - time.monotonic()):
                running.append(child)
            elif child.code and self.command.ranks > 1 and not is_stopping:
                is_stopping = True
                end = time.monotonic() + RANKS_SECONDS
                for other in running:
                    other.send(signal.SIGTERM)
        if is_stopping:
            for child in running:
                child.end()
        hanging = [child for child in children if child.code is None]
        for child in children:
            said = [*child.stdout().splitlines()[-3:], *child.stderr().splitlines()[-12:]]
            self.log.append({"code": "hang" if child in hanging else child.code, "said": said})
            child.end()
        if hanging:
            raise Defect(HANG, f"no end after {HANG_SECONDS:g} s")

    def judge(self, child: Child, codes: Sequence[int]) -> None:
        """Check that a process has ended with one of the exit codes, without a traceback, and with one error if 2."""
        errors, code = child.stderr(), child.code
        last = next((line[:200] for line in reversed(errors.splitlines()) if line.strip()), "no output")
        if re.search(r"Traceback \(most recent call last\)|Exception ignored in", errors + child.stdout()):
            raise Defect(TRACEBACK, last)
        if code not in codes:
            raise Defect(TRACEBACK if code and code not in (1, 2) else LOST, f"exit {code}: {last}")
        num_messages = len(re.findall(r"(?:^|\]\s*)error: ", errors, re.MULTILINE))  # may follow a progress bar
        if code == 2 and num_messages != 1:
            raise Defect(TRACEBACK, f"{num_messages} messages: {last}")

    def run(self, codes: Sequence[int] = (0,), plant: Action | None = None) -> Child:
        """Run the command, check how it ends, and return its first rank."""
        children = self.start(plant)
        self.wait(children)
        self.judge(children[0], codes)
        return children[0]

    def differences(self, child: Child) -> list[str]:
        """Return the names of outputs that differ from the reference."""
        hashes, expected = digest(self.folder, self.command.outputs), self.reference.digest
        names = [name for name in sorted({*hashes, *expected}) if hashes.get(name) != expected.get(name)]
        if self.command.prints_result and without_times(child.stdout()) != self.reference.stdout:
            names.append("standard output")
        return names

    def repeat(self) -> str:
        """Run the command without a fault, and compare its outputs with the reference."""
        child = self.run((0, 1, 2))
        if child.code:
            message = next((line for line in child.stderr().splitlines() if line.startswith("error:")), "no message")
            raise Defect(LOST, f"the repeated command fails: {message[:300]}")
        if differences := self.differences(child):
            raise Defect(SILENT, f"the repeated command wrote other bytes: {', '.join(differences[:4])}")
        return SAME
