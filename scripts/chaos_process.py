"""Commands as processes of their own, forked from one that has imported everything, with faults planted in them.

Importing torch takes seconds, a tiny command parts of one. The fork has its own process id, session, descriptors and
signal handlers, and leaves with the exit code that the command line would have. Nothing of the package may have run
before the fork: no thread of torch or pyarrow may exist. Linux only.
"""

import atexit
import contextlib
import gc
import importlib
import os
import pkgutil
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Action = Callable[[], object]

LIBRARIES = (
    "pandas",
    "pyarrow.parquet",
    "transformers.models.bert.modeling_bert",
    "matplotlib.figure",
    "sklearn.metrics",
)
EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link")
KILL_GRACE_SECONDS = 5.0
_HANDLED = (signal.SIGINT, signal.SIGTERM)


def import_packages(names: Sequence[str] = ("bert_pretrain",), libraries: Sequence[str] = LIBRARIES) -> None:
    """Import packages, with all their modules, and libraries; raises when that has started a thread."""
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"ARROW_DEFAULT_MEMORY_POOL": "system", "HF_HUB_OFFLINE": "1"}
    for name in names:
        for module in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
            importlib.import_module(module.name)
    for name in libraries:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    threads = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    if len([name for name in threads if name != "jemalloc_bg_thd"]) > 1:  # jemalloc starts its own again after a fork
        raise RuntimeError(f"imports have started threads: {threads}")
    gc.collect()
    gc.freeze()  # a child that collects garbage would copy all pages of the parent


@dataclass
class Child:
    """A process that was started, and what it has said."""

    pid: int
    output: Path
    errors: Path
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None
    code: int | None = None
    """The exit code, minus the signal's number where one has ended it; None while it runs."""

    def wait(self, seconds: float) -> bool:
        """Return whether the process has ended within this time."""
        if self.code is not None:
            return True
        descriptor = os.pidfd_open(self.pid)
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if not poll.poll(max(0.0, seconds) * 1000):
                return False
        finally:
            os.close(descriptor)
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.ended = time.monotonic()
        return True

    def age(self) -> float:
        """Return for how many seconds the process has run."""
        return (self.ended or time.monotonic()) - self.began

    def send(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if not self.wait(0):
            os.kill(self.pid, number)

    def end(self) -> None:
        """Kill what is left of the process and of those it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait(KILL_GRACE_SECONDS)

    def stdout(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace") if self.output.exists() else ""

    def stderr(self) -> str:
        return self.errors.read_text(encoding="utf-8", errors="replace") if self.errors.exists() else ""


@dataclass(frozen=True)
class Launcher:
    """Starts commands in one folder; `logs` gets what they say."""

    folder: Path
    logs: Path

    def _child(self, name: str) -> Child:
        child = Child(0, self.logs / f"{name}.out", self.logs / f"{name}.err")
        for path in (child.output, child.errors):
            path.unlink(missing_ok=True)
        return child

    def fork(
        self, function: Action, name: str, *, plant: Action | None = None, environment: Mapping[str, str] | None = None
    ) -> Child:
        """Call a function in a fork, after `plant` has planted a fault there."""
        child = self._child(name)
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)  # until the handlers are those of a new process
        child.pid = os.fork()
        if child.pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        else:
            code = 70
            try:
                os.setsid()
                _redirect(child)
                os.chdir(self.folder)
                os.environ.update(environment or {})
                if plant is not None:
                    plant()
                code = _call(function)
            finally:
                os._exit(code)
        return child

    def command(
        self,
        arguments: Sequence[str],
        name: str,
        *,
        plant: Action | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Start `bert-pretrain ARGUMENTS` in a fork."""

        def run() -> None:
            from bert_pretrain import __main__, cli
            from bert_pretrain.cli import loading

            sys.argv = ["bert-pretrain", *arguments]
            sys.modules["__main__"] = __main__  # what spawned workers import
            loading._STARTED = time.monotonic()
            cli.main()

        return self.fork(run, name, plant=plant, environment=environment)

    def execute(self, arguments: Sequence[str], name: str, environment: Mapping[str, str] | None = None) -> Child:
        """Start `python -m bert_pretrain ARGUMENTS` anew, from the start of the interpreter."""
        child = self._child(name)
        command = [sys.executable, "-m", "bert_pretrain", *arguments]
        with child.output.open("wb") as output, child.errors.open("wb") as errors:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        child.pid = process.pid
        process.returncode = 0  # `Child.wait` reaps it, not Popen
        return child


def _redirect(child: Child) -> None:
    for number in _HANDLED:
        signal.signal(number, signal.SIG_DFL)  # the command line installs its own
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
    for descriptor, path in ((0, Path(os.devnull)), (1, child.output), (2, child.errors)):
        opened = os.open(path, os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    # New objects: those of the parent may hold text, or be a test's.
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115


def _call(function: Action) -> int:
    """Call the function as the interpreter runs a program, and return its exit code."""
    code: object = 0
    try:
        function()
    except SystemExit as leaving:
        code = leaving.code
    except KeyboardInterrupt:
        traceback.print_exc()
        code = 130
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:  # as the interpreter says it
        print(f"Exception ignored in: {sys.stdout}\n{type(error).__name__}: {error}", file=sys.stderr)
        return 120
    return code if isinstance(code, int) else int(code is not None)


# Faults that are planted in the process itself.


def at_file_event(folder: Path, number: int, action: Action, *, log: Path | None = None) -> Action:
    """Return a plant that calls an action at the n-th time that Python opens, renames or removes a file of a folder.

    The same number is the same moment in every run. With `log` the number of events is written there at the end.
    """

    def plant() -> None:
        root, count = str(folder), 0
        acting = threading.local()

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal count
            if event not in EVENTS or getattr(acting, "now", False) or not arguments:
                return
            path = arguments[0]
            if not isinstance(path, str | bytes | os.PathLike):
                return
            if not os.path.abspath(os.fsdecode(path)).startswith(root):
                return
            count += 1
            if count == number:
                acting.now = True
                action()
                acting.now = False

        sys.addaudithook(hook)
        if log is not None:
            atexit.register(lambda: log.write_text(str(count)))

    return plant


def limits(**values: int) -> Action:
    """Return a plant that sets limits of the process: `limits(RLIMIT_NOFILE=30)`; memory counts from what is in use."""

    def plant() -> None:
        for name, value in values.items():
            if name == "RLIMIT_AS":
                value += int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            kind = getattr(resource, name)
            resource.setrlimit(kind, (value, value))  # the hard one too, which a command might raise its own to

    return plant


def jumping_clock(after_calls: int, seconds: float, *, monotonic: bool) -> Action:
    """Return a plant that moves the clock by some seconds after so many readings."""

    def plant() -> None:
        calls = 0

        def jumping(clock: Callable[[], float]) -> Callable[[], float]:
            def read() -> float:
                nonlocal calls
                calls += 1
                return clock() + (seconds if calls > after_calls else 0.0)

            return read

        time.time = jumping(time.time)
        if monotonic:  # as after a suspended machine: forward only
            time.monotonic, time.perf_counter = jumping(time.monotonic), jumping(time.perf_counter)

    return plant


def closed_pipe(after_bytes: int) -> Action:
    """Return a plant that makes the standard output a pipe whose reader leaves after so many bytes, or a closed one."""

    def plant() -> None:
        if after_bytes < 0:
            os.close(1)
            sys.stdout = None  # as the interpreter leaves it
            return
        reading, writing = os.pipe()
        if os.fork() == 0:
            os.close(writing)
            left = after_bytes
            while left > 0 and (found := os.read(reading, left)):
                left -= len(found)
            os._exit(0)
        os.close(reading)
        os.dup2(writing, 1)
        os.close(writing)

    return plant
