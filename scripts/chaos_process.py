"""Run commands in forks of a process that has imported everything, and plant faults in them.

Forking saves the import of torch, which takes longer than a tiny command. A fork has a new session, new descriptors
and default signal handlers, and exits with the code of the command line. The parent process must not run code of the
package before a fork, because threads of torch or pyarrow do not survive it. Linux only.
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
    "pandas", "pyarrow.parquet", "transformers.models.bert.modeling_bert", "matplotlib.figure", "sklearn.metrics",
)  # fmt: skip
_HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_libc = ctypes.CDLL(None, use_errno=True)


def import_packages(
    names: Sequence[str] = ("bert_pretrain",), libraries: Sequence[str] = LIBRARIES, torch_threads: int = 1
) -> None:
    """Import packages with all their modules, and libraries. Raises `RuntimeError` if that has started a thread.

    `torch_threads` is the number of threads of torch in every fork.
    """
    os.environ |= {
        "OMP_NUM_THREADS": str(torch_threads),
        "OPENBLAS_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    os.environ |= {"ARROW_DEFAULT_MEMORY_POOL": "system", "HF_HUB_OFFLINE": "1"}
    for name in names:
        for module in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
            importlib.import_module(module.name)
    for name in libraries:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    threads = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    if len([name for name in threads if name != "jemalloc_bg_thd"]) > 1:  # jemalloc restarts this one after a fork
        raise RuntimeError(f"imports have started threads: {threads}")
    gc.collect()
    gc.freeze()  # otherwise garbage collection in a child copies all pages of the parent


@dataclass
class Child:
    """A process, and the files with its standard output and standard error."""

    pid: int
    output: Path
    errors: Path
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    code: int | None = None  # exit code, or minus the number of the signal that ended it; None while it runs

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the process, and return whether it has ended."""
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
        if not self.wait(0):
            os.kill(self.pid, number)

    def end(self) -> None:
        """Kill the process and its child processes."""
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
    """Call `plant`, which plants a fault, and then `function` in a fork with the working directory `folder`.

    The standard streams are written to `logs` with the endings .out and .err.
    """
    child = Child(0, logs.with_suffix(".out"), logs.with_suffix(".err"))
    for path in (child.output, child.errors):
        path.write_bytes(b"")
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_SIGNALS)  # until the child has reset its signal handlers
    child.pid = os.fork()
    if child.pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED_SIGNALS)
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

    def run() -> None:
        from bert_pretrain import __main__, cli
        from bert_pretrain.cli import options

        sys.argv = ["bert-pretrain", *arguments]
        sys.modules["__main__"] = __main__  # which spawned workers import
        options.STARTED = time.monotonic()
        cli.main()

    return run


def _redirect(child: Child) -> None:
    for number in _HANDLED_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED_SIGNALS)
    for descriptor, path in ((0, Path(os.devnull)), (1, child.output), (2, child.errors)):
        opened = os.open(path, os.O_RDONLY if descriptor == 0 else os.O_WRONLY)
        os.dup2(opened, descriptor)
        os.close(opened)
    # New objects, because those of the parent may have text in their buffers, or be replaced by pytest.
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(  # noqa: SIM115
        2,
        "w",
        encoding="utf-8",
        closefd=False,
        buffering=1,
        errors="backslashreplace",
    )


def _call(function: Action) -> int:
    """Call a function as the interpreter runs a program, and return the exit code."""
    code: object = 0
    try:
        function()
    except SystemExit as exit_:
        code = exit_.code
    except BaseException as error:
        traceback.print_exc()
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:  # reported as by the interpreter
        print(f"Exception ignored in: {sys.stdout}\n{type(error).__name__}: {error}", file=sys.stderr)
        return 120
    return code if isinstance(code, int) else int(code is not None)


def at_file_event(folder: Path, number: int, action: Action, *, log: Path | None = None) -> Action:
    """Return a function that, called in a fork, calls `action` at file event `number` (from 1) in `folder`.

    A file event is an audit event of Python: a file is opened, renamed, truncated, linked or removed, or a folder is
    created or removed. The same number is the same moment in every run. At the end of the process, the number of events
    is written to `log`.
    """
    events = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link")

    def plant() -> None:
        count = 0
        in_action = threading.local()

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal count
            if event not in events or getattr(in_action, "value", False) or not arguments:
                return
            path = arguments[0]
            if not isinstance(path, str | bytes | os.PathLike):
                return
            if not os.path.abspath(os.fsdecode(path)).startswith(str(folder)):
                return
            count += 1
            if count == number:
                in_action.value = True
                action()
                in_action.value = False

        sys.addaudithook(hook)
        if log is not None:
            atexit.register(lambda: log.write_text(str(count)))

    return plant


def kill_at(folder: Path, event: int, number: int = signal.SIGKILL) -> Action:
    """Return a function that, called in a fork, sends signal `number` to the fork at file event `event` (from 1)."""
    return at_file_event(folder, event, lambda: os.kill(os.getpid(), number))


def limit(name: str, value: int) -> Action:
    """Return a function that, called in a fork, sets a resource limit such as RLIMIT_NOFILE.

    For RLIMIT_AS, `value` is in bytes above the memory in use.
    """

    def plant() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        maximum = value + (used if name == "RLIMIT_AS" else 0)
        resource.setrlimit(getattr(resource, name), (maximum, maximum))  # a command may raise a soft limit alone

    return plant


@functools.cache
def may_mount() -> bool:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(OSError), small_disk(Path(folder)):
        return True
    return False


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a tmpfs over an empty folder."""
    _mount(folder, 0, "size=1g")
    try:
        yield
    finally:
        _libc.umount2(str(folder).encode(), 2)  # MNT_DETACH


def remount(folder: Path, options: str = "size=1g") -> None:
    _mount(folder, 32, options)  # MS_REMOUNT


def _mount(folder: Path, flags: int, options: str) -> None:
    if _libc.mount(
        b"tmpfs",
        str(folder).encode(),
        b"tmpfs",
        flags,
        options.encode(),
    ):
        raise OSError(ctypes.get_errno(), "mount")
