"""Tasks in parallel, on this machine or a cluster: results are yielded in the order of the tasks, with a progress bar.

Tasks are pure and write their own outputs, so it does not matter where, when or how often they run. The number of tasks
submitted ahead of the consumer is bounded, so that results waiting for it cannot fill the memory.
"""

import concurrent.futures
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, Union

from tqdm import tqdm

from bert_pretrain.errors import UserError
from bert_pretrain.io.cores import available_cores

if TYPE_CHECKING:
    from bert_pretrain.io.cluster import Cluster

Task = TypeVar("Task")
Result = TypeVar("Result")

_TASKS_AHEAD_PER_WORKER = 2
"""Submitted behind the first unfinished task; a slow one delays the others only after that many."""
_SILENCE_SECONDS = 60.0


Pool = Union["LocalPool", "Cluster"]
"""Where tasks run."""


def run_each(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    *,
    workers: int | Pool,
    description: str,
    unit: str,
    weights: Sequence[float] | None = None,
) -> Iterator[Result]:
    """Call `function` on every task and yield the results lazily, in the order of the tasks.

    Worker processes import `function` by its name, and get tasks by pickle. Each task counts in the progress bar by its
    weight, 1 by default, of a unit; `B` is scaled to megabytes.

    `workers` is a pool, or a number of processes for this call only; 1 runs everything in this process. A caller that
    may be interrupted while it holds a result opens a pool itself, which then stops at once.
    """
    if isinstance(workers, int):
        with LocalPool(workers) as pool:
            yield from run_each(function, tasks, workers=pool, description=description, unit=unit, weights=weights)
        return
    weights = [1] * len(tasks) if weights is None else weights
    with progress_bar(total=sum(weights), desc=description, unit=unit, unit_scale=unit == "B") as bar:
        if isinstance(workers, LocalPool) and (workers.num_workers == 1 or len(tasks) < 2):
            for task, weight in zip(tasks, weights, strict=True):
                result = function(task)
                bar.update(weight)
                yield result
            return
        try:
            yield from _run_on(workers, function, tasks, description, lambda index: bar.update(weights[index]))
        except BaseException as error:
            # Tasks are pure and their outputs atomic, so an error or interruption need not wait for the rest.
            workers.stop()
            if explanation := workers.explain(error, description):
                raise explanation from error
            raise


def _run_on(
    pool: Pool,
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    description: str,
    advance: Callable[[int], object],
) -> Iterator[Result]:
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    handles: dict[int, Any] = {}
    results: dict[int, Result] = {}
    first = submitted = 0
    while first < len(tasks):
        window = _TASKS_AHEAD_PER_WORKER * pool.num_workers
        for index in range(submitted, min(first + window, len(tasks))):
            handles[index] = pool.submit(function, tasks[index], description)
            handles[index].add_done_callback(lambda _, index=index: done.put(index))
            submitted = index + 1
        while first not in results:
            try:
                index = done.get(timeout=_SILENCE_SECONDS)
            except queue.Empty:
                pool.look()
                continue
            results[index] = handles.pop(index).result()  # an error ends everything, whichever task it comes from
            advance(index)
        yield results.pop(first)
        first += 1


def open_pool(
    workers: int | None, scheduler: str | None, *, folders: Sequence[Path], files: Sequence[Path]
) -> AbstractContextManager[Pool]:
    """Return the pool for a command's flags, to be opened with `with`: processes, or the workers of a Dask scheduler.

    All of them write to `folders`, which exist, and read `files`, which may be folders.
    """
    if scheduler is None:
        return LocalPool(workers or available_cores())
    from bert_pretrain.io import cluster

    return cluster.connect(scheduler, folders=folders, files=files)


class LocalPool:
    """Processes of this machine, started when first needed and kept for further calls."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> "LocalPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.stop()
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def submit(self, function: Callable[[Any], Any], task: Any, description: str) -> Any:
        """Submit one task; returns a future, of `concurrent.futures` or like it."""
        if self._executor is None:
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(self.num_workers, mp_context=context, initializer=_start_worker)
        # Workers start here and inherit what is blocked: Ctrl-C is for the parent, also while they import.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return self._executor.submit(function, task)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def explain(self, error: BaseException, description: str) -> UserError | None:
        """Return the user error behind an error of the pool itself, None for a task's own."""
        if not isinstance(error, concurrent.futures.process.BrokenProcessPool):
            return None
        return UserError(
            "a worker process was killed from outside, usually by the system for lack of memory",
            where=description,
            remedy="run the same command again with fewer --workers; it continues where it stopped",
        )

    def look(self) -> None:
        """Report what is wrong when no task has finished for a while: nothing, as a worker's end is noticed at once."""

    def stop(self) -> None:
        """Cancel all submitted tasks at once; the pool is not used again."""
        if self._executor is None:
            return
        # The executor's own processes, and no others that the caller may have started.
        for worker in list((self._executor._processes or {}).values()):
            worker.kill()
        # Half a result of a killed worker would be waited for as long as this process could write the rest.
        results: Any = self._executor._result_queue
        results._writer.close()


def _start_worker() -> None:
    """Make a worker use one core, and end with its parent."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # The bars of libraries would make a lock for several processes, a semaphore that a worker which is killed leaves.
    tqdm.set_lock(threading.RLock())
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_with, args=(parent.sentinel,), daemon=True).start()


def _exit_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


class _Lines:
    """A file that is no terminal: every state of a bar is a line of its own, so that nothing else is on it."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> None:
        if line := text.replace("\x1b[A", "").strip():  # tqdm moves up to outer bars
            self._file.write(f"{line}\n")


def progress_bar(items: Iterable[Any] | None = None, **options: Any) -> Any:
    """Return a tqdm bar with the given options, perhaps over items."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    file = sys.stderr if is_terminal or sys.stderr is None else _Lines(sys.stderr)
    return tqdm(items, dynamic_ncols=True, mininterval=0.2 if is_terminal else 10.0, file=file, **options)
