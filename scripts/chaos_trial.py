"""The commands of a campaign with their inputs, and a trial: a command in a fresh folder under a fault, and a verdict.

Every command runs in a folder of the same path, because manifests record paths. What a clock decides is left out of the
comparison: times, rates and what is drawn from them; everything else is compared byte by byte.
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

SAME, MESSAGE, UNCHECKED = "same", "message", "unchecked"
LOST, SILENT, TRACEBACK, HANG = "lost", "silent", "traceback", "hang"
DEFECTS = (LOST, SILENT, TRACEBACK, HANG)
VERDICTS = (SAME, MESSAGE, UNCHECKED, *DEFECTS)
HANG_SECONDS = 150.0
RANKS_SECONDS = 20.0
"""Other ranks get this long to end after a SIGTERM; torchrun kills them then, too."""
USER_FILES = ("text", "tiny.yaml", "lines.txt", "pairs.jsonl", "rows.jsonl")
"""Inputs without a checksum: what is damaged there, but can be read, cannot be told from what was meant."""
WRITERS = {"vocab": "vocab", "data": "make-data", "run": "train", "model": "train", "tuned": "finetune classify"}
NOT_READ_BACK = re.compile(r"\.(png|md|html|log|yaml)$|(^|/)\.|^all/data/.*\.parquet$")
"""For readers, and caches; of finished outputs, `run` reads the shards' footers alone, and `train` no checkpoint."""
VOLATILE_FILES = ("time.json", "checksums.json", "manifest.partial.json", ".lock", "training_args.bin")
"""Clocks and sums of files that hold some, and what a finished output may or may not have."""
VOLATILE_KEYS = re.compile(
    r"second|^time$|_time|time_|runtime|per_s$|tokens_per|mfu|flops_per|memory|wait_share|host|pid|date|sha256|^bytes$"
)
_QUANTITY = r"\d[\d,.]*( ?(d|h|min|ms|s|seconds?|minutes?|tokens/s|MB|GB|GFLOPS|TFLOPS|it/s|/s|%))\b"
VOLATILE_TEXT = re.compile(rf"{_QUANTITY}( {_QUANTITY})*")
CHECKPOINT = re.compile(r"checkpoints/step-\d+/")
KEPT_ASIDE = re.compile(r"(^|/)broken-|\.old-\d|(^|/)\.token-store(/|$)")
"""Damaged checkpoints and old outputs, which commands move aside; the token store is a cache."""
TINY = """\
vocab: {size: 400, unused_tokens: 9, min_frequency: 1}
data: {max_seq_length: 32, dupe_factor: 2, examples_per_shard: 64, validation_fraction: 0.2}
model:
  {hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32, max_position_embeddings: 64}
train: {global_batch_size: 16, max_steps: 12, save_every: 4, eval_every: 6, log_every: 2, keep_checkpoints: 2}
"""


@dataclass(frozen=True)
class Command:
    """A command of the campaign."""

    name: str
    line: str
    outputs: tuple[str, ...] = ()
    prints_result: bool = False
    """Whether its standard output is compared, too."""
    checks: tuple[str, ...] = ()
    """Flags with which a finished output is checked whole."""
    ranks: int = 1
    """Processes that train together."""
    share: float = 1.0
    """How often it is drawn; commands that take long are drawn less often."""

    @property
    def arguments(self) -> tuple[str, ...]:
        return tuple(shlex.split(self.line))

    @property
    def needs(self) -> tuple[str, ...]:
        """Files and folders that are copied from the prepared ones."""
        return tuple(w for w in self.arguments[1:] if w in (*USER_FILES, *WRITERS) and w not in self.outputs)


_TRAIN, _TUNING = "train --data data --output run --config tiny.yaml", "--output tuned --batch-size 16"
COMMANDS = (
    Command("vocab", "vocab text --output vocab --config tiny.yaml --workers 1", ("vocab",)),
    Command(
        "vocab --extend",
        "vocab text --output more --extend model --config tiny.yaml --add-tokens 5 --workers 1",
        ("more",),
    ),
    Command(
        "make-data",
        "make-data text --vocab vocab --output data --config tiny.yaml --workers 1",
        ("data",),
        checks=("--verify",),
    ),
    Command("train", _TRAIN, ("run",)),
    Command("train (2 ranks)", _TRAIN, ("run",), ranks=2),
    Command("train --init-from", f"{_TRAIN} --init-from model --set train.max_steps=8", ("run",)),
    Command("run", "run tiny.yaml text --output all --workers 1", ("all",), share=0.5),
    Command("inspect", "inspect data --stats --html page.html --workers 1", ("page.html",), prints_result=True),
    Command("evaluate --data", "evaluate model --data data --json found.json", ("found.json",)),
    Command("score", "evaluate model --text lines.txt --output scores.jsonl", ("scores.jsonl",)),
    Command("evaluate --pairs", "evaluate model --pairs pairs.jsonl --json found.json", ("found.json",)),
    Command("fill-mask", "fill-mask model 'the [MASK] of a river' --json", prints_result=True),
    Command("embed", "embed model lines.txt --output vectors.npy", ("vectors.npy",)),
    Command(
        "finetune classify",
        f"finetune classify model --train rows.jsonl --epochs 2 --max-length 24 {_TUNING}",
        ("tuned",),
    ),
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

    def lines_of(rows: Sequence[object]) -> str:
        return "".join(json.dumps(row) + "\n" for row in rows)

    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("\n\n".join(documents("\n")) + "\n")
    records = lines_of([{"text": text} for text in documents(" ")])
    (folder / "text" / "b.jsonl.gz").write_bytes(gzip.compress(records.encode(), mtime=0))
    pq.write_table(pa.table({"text": documents(" ")}), folder / "text" / "c.parquet")
    (folder / "tiny.yaml").write_text(TINY)
    (folder / "lines.txt").write_text("".join(sentence() + "\n" for _ in range(12)))
    pairs = [{"sentence_good": sentence(6), "sentence_bad": sentence(6)} for _ in range(6)]
    (folder / "pairs.jsonl").write_text(lines_of(pairs))
    rows = [{"text": sentence(), "label": "abc"[number % 3]} for number in range(60)]
    (folder / "rows.jsonl").write_text(lines_of(rows))


# ── what a command has written ──


def copy(path: Path, target: Path) -> None:
    """Copy a file or a folder."""
    if path.is_dir():
        shutil.copytree(path, target, symlinks=True)
    else:
        shutil.copy2(path, target)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def files_of(path: Path) -> list[Path]:
    """Return a file, or the files of a folder, in a fixed order."""
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file() and not file.is_symlink()) if path.is_dir() else []


def digest(folder: Path, outputs: Sequence[str]) -> dict[str, str]:
    """Return hashes of the files of outputs, by path; without what depends on a clock."""
    found = {}
    for file in (file for output in outputs for file in files_of(folder / output)):
        name = file.relative_to(folder).as_posix()
        if file.name not in VOLATILE_FILES and not KEPT_ASIDE.search(name):
            found[name] = hashlib.sha256(_comparable(file)).hexdigest()
    checkpoints = {match.group() for name in found if (match := CHECKPOINT.search(name))}
    for old in sorted(checkpoints)[:-1]:  # which ones are kept depends on where a run was interrupted
        found = {name: value for name, value in found.items() if old not in name}
    return found


def _comparable(file: Path) -> bytes:
    """Return the bytes of a file without what depends on a clock."""
    content = file.read_bytes()
    if file.suffix == ".png":
        return b""  # it has times on its axes; that it exists is compared
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
    """Return a text without durations, rates and sizes."""
    return VOLATILE_TEXT.sub("", text)


def _without_times(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_times(item) for key, item in value.items() if not VOLATILE_KEYS.search(key)}
    return [_without_times(item) for item in value] if isinstance(value, list) else value


# ── trials ──


class Defect(Exception):
    """A defect that a fault has found."""

    def __init__(self, verdict: str, detail: str) -> None:
        super().__init__(detail)
        self.verdict = verdict


@dataclass(frozen=True)
class Reference:
    """An undisturbed run of a command."""

    digest: dict[str, str]
    stdout: str
    seconds: float
    num_events: int
    num_bytes: int
    """Bytes of its output."""


@dataclass
class Bench:
    """The prepared inputs, the references, and the folder in which all commands run."""

    folder: Path
    references: dict[str, Reference] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now, self.base, self.logs = (self.folder / name for name in ("now", "base", "logs"))
        for folder in (self.now, self.base, self.logs):
            folder.mkdir(parents=True)

    def prepare(self, names: Sequence[str]) -> None:
        """Write the inputs, run every command undisturbed, and keep what others need."""
        child = fork(lambda: write_inputs(self.base), self.base, self.logs / "inputs")
        child.wait(HANG_SECONDS)
        if child.code:
            raise RuntimeError(child.stderr())
        for name in names:
            self._prepare(next(command for command in COMMANDS if command.name == name))

    def _prepare(self, command: Command) -> None:
        if command.name in self.references:
            return
        self.prepare_writers(command)
        trial, count = Trial(self, command, random.Random(0)), self.logs / "events"
        trial.reset()
        children = trial.start(at_file_event(self.now, -1, lambda: None, log=count))
        trial.wait(children)
        if any(child.code for child in children):
            raise RuntimeError(f"{command.name} fails undisturbed:\n{children[0].stderr()}")
        self.references[command.name] = Reference(
            digest(self.now, command.outputs),
            without_times(children[0].stdout()),
            children[0].seconds,
            int(count.read_text()),
            sum(file.stat().st_size for file in trial.written()),
        )
        shutil.copytree(self.now, self.finished(command), symlinks=True)
        for output in command.outputs:
            if WRITERS.get(output) == command.name:
                copy(self.now / output, self.base / output)
                if output == "run":
                    copy(self.now / "run" / "model", self.base / "model")

    def prepare_writers(self, command: Command) -> None:
        """Run the commands first that write what a command needs."""
        writers = {WRITERS[need] for need in command.needs if need in WRITERS}
        for writer in (one for one in COMMANDS if one.name in writers):
            self._prepare(writer)

    def finished(self, command: Command) -> Path:
        """The folder after an undisturbed run."""
        return self.folder / "finished" / command.name.replace(" ", "_")


@dataclass
class Trial:
    """A command under a fault; every random choice comes from `draw`."""

    bench: Bench
    command: Command
    draw: random.Random
    log: list[dict[str, Any]] = field(default_factory=list)
    checks: bool = False
    """Whether the command is to check a finished output whole."""

    def __post_init__(self) -> None:
        self.now = self.bench.now

    @property
    def reference(self) -> Reference:
        return self.bench.references[self.command.name]

    def reset(self, *, finished: bool = False) -> None:
        """Empty the folder and put the inputs there, or what an undisturbed run has left."""
        for path in self.now.iterdir():
            remove(path)
        if finished:
            shutil.copytree(self.bench.finished(self.command), self.now, symlinks=True, dirs_exist_ok=True)
            return
        for name in self.command.needs:
            copy(self.bench.base / name, self.now / name)

    def written(self) -> list[Path]:
        """Return the files that are no inputs."""
        inputs = {self.now / name for name in self.command.needs}
        return [file for file in files_of(self.now) if not inputs & {file, *file.parents} and file.name != ".lock"]

    def event(self) -> int:
        """Draw the number of a file event of the command."""
        return self.draw.randint(1, self.reference.num_events)

    def start(self, plant: Action | None = None, *, rank: int = 0) -> list[Child]:
        """Start the command, or its ranks; one gets the fault."""
        size, address = self.command.ranks, {}
        if size > 1:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
            address |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        run = command_line(self.command.arguments + (self.command.checks if self.checks else ()))
        return [
            fork(
                run,
                self.now,
                self.bench.logs / f"{len(self.log)}-{number}",
                plant=plant if number == rank else None,
                environment={**address, "RANK": str(number), "LOCAL_RANK": str(number)} if size > 1 else {},
            )
            for number in range(size)
        ]

    def wait(self, children: Sequence[Child]) -> None:
        """Wait for all processes; when one of several ranks fails, end the others as torchrun does."""
        end = time.monotonic() + HANG_SECONDS
        running, is_stopping = list(children), False
        while running and time.monotonic() < end:
            one = running.pop(0)
            if not one.wait(0.1 if running else end - time.monotonic()):
                running.append(one)
            elif one.code and self.command.ranks > 1 and not is_stopping:
                is_stopping, end = True, time.monotonic() + RANKS_SECONDS
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
        """Check how a process has ended: with one of the exit codes, and with one message if it is 1 or 2."""
        errors, code = child.stderr(), child.code
        last = next((line[:200] for line in reversed(errors.splitlines()) if line.strip()), "no output")
        if re.search(r"Traceback \(most recent call last\)|Exception ignored in", errors + child.stdout()):
            raise Defect(TRACEBACK, last)
        if code not in codes:
            raise Defect(TRACEBACK if code and code not in (1, 2) else LOST, f"exit {code}: {last}")
        num_messages = len(re.findall(r"(?:^|\]\s*)error: ", errors, re.MULTILINE))  # perhaps behind a progress bar
        if code == 2 and num_messages != 1:
            raise Defect(TRACEBACK, f"{num_messages} messages: {last}")

    def run(self, codes: Sequence[int] = (0,), plant: Action | None = None) -> Child:
        """Run the command to its end and judge it; of several ranks return the first."""
        children = self.start(plant)
        self.wait(children)
        self.judge(children[0], codes)
        return children[0]

    def differences(self, child: Child) -> list[str]:
        """Return the outputs that differ from those of the undisturbed run."""
        found, expected = digest(self.now, self.command.outputs), self.reference.digest
        names = [name for name in sorted({*found, *expected}) if found.get(name) != expected.get(name)]
        if self.command.prints_result and without_times(child.stdout()) != self.reference.stdout:
            names.append("standard output")
        return names

    def repeat(self) -> str:
        """Run the command undisturbed; its outputs must be those of the undisturbed run."""
        child = self.run((0, 1, 2))
        if child.code:
            message = next((line for line in child.stderr().splitlines() if line.startswith("error:")), "no message")
            raise Defect(LOST, f"the same command is refused: {message[:300]}")
        if differences := self.differences(child):
            raise Defect(SILENT, f"other bytes after the repeat: {', '.join(differences[:4])}")
        return SAME
