"""Commands as processes of their own, forked from one that has imported everything, and faults planted in them.

Importing torch takes seconds, a tiny command parts of one. The fork has its own process id, session, descriptors and
signal handlers, and exits with the code that the command line would have. Nothing of the package may have run before
the fork: no thread of torch or pyarrow may exist. Linux only.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import os
import pkgutil
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
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
_REMOUNT, _DETACH = 32, 2
_HANDLED = (signal.SIGINT, signal.SIGTERM)
_libc = ctypes.CDLL(None, use_errno=True)


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
    """A process and the files of its standard output and standard error."""

    pid: int
    output: Path
    errors: Path
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
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
        self.seconds = time.monotonic() - self.began
        return True

    def send(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if not self.wait(0):
            os.kill(self.pid, number)

    def end(self) -> None:
        """Kill what is left of the process and of those it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait(5.0)

    def stdout(self) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")

    def stderr(self) -> str:
        return self.errors.read_text(encoding="utf-8", errors="replace")


def fork(
    function: Action,
    folder: Path,
    logs: Path,
    *,
    plant: Action | None = None,
    environment: Mapping[str, str] = {},
) -> Child:
    """Call a function in a fork that runs in a folder, after `plant` has planted a fault; `logs` plus an ending."""
    child = Child(0, logs.with_suffix(".out"), logs.with_suffix(".err"))
    for path in (child.output, child.errors):
        path.write_bytes(b"")
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)  # until the handlers are those of a new process
    child.pid = os.fork()
    if child.pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        return child
    code = 70
    try:
        os.setsid()
        _redirect(child)
        os.chdir(folder)
        os.environ.update(environment)
        if plant is not None:
            plant()
        code = _call(function)
    finally:
        os._exit(code)


def command_line(arguments: Sequence[str]) -> Action:
    """Return what runs `bert-pretrain ARGUMENTS` in a fork."""

    def run() -> None:
        from bert_pretrain import __main__, cli
        from bert_pretrain.cli import loading

        sys.argv = ["bert-pretrain", *arguments]
        sys.modules["__main__"] = __main__  # what spawned workers import
        loading.STARTED = time.monotonic()
        cli.main()

    return run


def _redirect(child: Child) -> None:
    for number in _HANDLED:
        signal.signal(number, signal.SIG_DFL)  # the command line installs its own
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
    for descriptor, path in ((0, Path(os.devnull)), (1, child.output), (2, child.errors)):
        opened = os.open(path, os.O_RDONLY if descriptor == 0 else os.O_WRONLY)
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
    except BaseException as error:
        traceback.print_exc()
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:  # as the interpreter says it
        print(f"Exception ignored in: {sys.stdout}\n{type(error).__name__}: {error}", file=sys.stderr)
        return 120
    return code if isinstance(code, int) else int(code is not None)


def at_file_event(folder: Path, number: int, action: Action, *, log: Path | None = None) -> Action:
    """Return a plant that calls an action at the n-th time that Python opens, renames or removes a file of a folder.

    The same number is the same moment in every run. With `log` the number of events is written there at the end.
    """

    def plant() -> None:
        count = 0
        acting = threading.local()

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal count
            if event not in EVENTS or getattr(acting, "now", False) or not arguments:
                return
            path = arguments[0]
            if not isinstance(path, str | bytes | os.PathLike):
                return
            if not os.path.abspath(os.fsdecode(path)).startswith(str(folder)):
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


def kill_at(folder: Path, event: int, number: int = signal.SIGKILL) -> Action:
    """Return a plant by which the process sends itself a signal at its n-th file event."""
    return at_file_event(folder, event, lambda: os.kill(os.getpid(), number))


def limit(name: str, value: int) -> Action:
    """Return a plant that sets a limit of the process, such as RLIMIT_NOFILE; memory counts from what is in use."""

    def plant() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most = value + (used if name == "RLIMIT_AS" else 0)
        resource.setrlimit(getattr(resource, name), (most, most))  # the hard one too, which a command might raise to

    return plant


@functools.cache
def may_mount() -> bool:
    """Whether this process may mount file systems."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(OSError), small_disk(Path(folder)):
        return True
    return False


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a file system in memory over an empty folder."""
    _mount(folder, 0, "size=1g")
    try:
        yield
    finally:
        _libc.umount2(str(folder).encode(), _DETACH)


def remount(folder: Path, options: str = "size=1g") -> None:
    """Change the size of such a file system."""
    _mount(folder, _REMOUNT, options)


def _mount(folder: Path, flags: int, options: str) -> None:
    if _libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", flags, options.encode()):
        raise OSError(ctypes.get_errno(), "mount")
