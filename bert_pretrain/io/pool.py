"""Run tasks in parallel, on this machine or a cluster, and yield the results in task order with a progress bar.

Tasks must be idempotent and write separate outputs, so that they can run anywhere, in any order and more than once.
Only a bounded number of tasks is submitted before the consumer takes their results, which bounds the memory.
"""

import contextlib
import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
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

TASKS_AHEAD_PER_WORKER = 2  # submitted before the next result is yielded, so that one slow task does not stop others

Pool = Union["LocalPool", "Cluster"]


def run_each(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    *,
    workers: int | Pool,
    description: str,
    unit: str,
    weights: Sequence[float] | None = None,
) -> Iterator[Result]:
    """Call `function` on every task and yield the results lazily, in task order.

    Worker processes import `function` by name, but not from `__main__`, and receive tasks as pickles. A task advances
    the progress bar by its weight, 1 by default. If `unit` is `B`, the bar shows units such as kB and MB.

    `workers` is a pool, or the number of processes for this call only. With 1, everything runs in this process. If the
    caller may be interrupted while it uses a result, it should open a pool and pass it: the context of the pool then
    stops the workers immediately.
    """
    if isinstance(workers, int):
        with LocalPool(workers) as pool:
            yield from run_each(
                function,
                tasks,
                workers=pool,
                description=description,
                unit=unit,
                weights=weights,
            )
        return
    if weights is None:
        weights = [1] * len(tasks)
    if isinstance(workers, LocalPool) and (workers.num_workers == 1 or len(tasks) < 2):
        results: Iterator[Result] = map(function, tasks)
    else:
        results = _results(workers, function, tasks, description)
    with progress_bar(total=sum(weights), desc=description, unit=unit, unit_scale=unit == "B") as bar:
        for result, weight in zip(results, weights, strict=True):
            bar.update(weight)
            yield result


def _results(
    pool: Pool,
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    description: str,
) -> Iterator[Result]:
    """Yield the results of a pool in task order. The first error of any task stops all tasks."""
    done: queue.SimpleQueue[int] = queue.SimpleQueue()
    futures: dict[int, Any] = {}
    results: dict[int, Result] = {}
    num_submitted = 0
    try:
        for next_index in range(len(tasks)):
            end = min(next_index + TASKS_AHEAD_PER_WORKER * pool.num_workers, len(tasks))
            for index in range(num_submitted, end):
                future = pool.submit(function, tasks[index], description)
                future.add_done_callback(lambda _, index=index: done.put(index))
                futures[index] = future
                num_submitted += 1
            while next_index not in results:
                index = done.get()
                results[index] = futures.pop(index).result()
            yield results.pop(next_index)
    except BaseException as error:
        # Outputs are atomic, so the remaining tasks can be killed on an error or interruption.
        pool.stop()
        if explanation := pool.explain(error, description):
            raise explanation from error
        raise


def open_pool(
    workers: int | None,
    scheduler: str | None,
    *,
    folders: Sequence[Path],
    files: Sequence[Path],
) -> AbstractContextManager[Pool]:
    """Return a context manager for the pool of a command: local processes or a Dask cluster.

    Tasks write to the existing `folders` and read `files`, which may include folders.
    """
    if scheduler is None:
        return LocalPool(workers or available_cores())
    from bert_pretrain.io import cluster

    return cluster.connect(scheduler, folders=folders, files=files)


class LocalPool(AbstractContextManager["LocalPool"]):
    """A pool of processes on this machine, started on first use and kept for further calls."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._executor: ProcessPoolExecutor | None = None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.stop()
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def submit(
        self,
        function: Callable[[Any], Any],
        task: Any,
        description: str,
    ) -> Any:
        """Submit one task and return its future, with the interface of `concurrent.futures.Future`."""
        if self._executor is None:
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(self.num_workers, mp_context=context, initializer=_start_worker)
        with _starting_workers():
            return self._executor.submit(function, task)

    def explain(self, error: BaseException, description: str) -> UserError | None:
        """Return the user error for a failure of the pool itself, or None for an error that a task raised."""
        if not isinstance(error, BrokenProcessPool | BrokenPipeError):
            return None
        return UserError(
            "a worker process ended; if it printed no error, it was killed, usually because memory ran out",
            where=description,
            remedy="run the same command again, with fewer --workers if memory ran out; it continues where it stopped",
        )

    def stop(self) -> None:
        """Cancel all submitted tasks immediately. The pool cannot be used again."""
        if self._executor is None:
            return
        # `multiprocessing.active_children` would also return processes that the caller started.
        for worker in list((self._executor._processes or {}).values()):
            worker.kill()
        # A killed worker may leave half a result; the reader waits for the rest while a writer is open.
        results: Any = self._executor._result_queue
        if results is not None:  # it is None after a shutdown
            results._writer.close()


@contextlib.contextmanager
def _starting_workers() -> Iterator[None]:
    """Let workers that start in this context ignore signals of the terminal, which only the parent handles.

    Hide the script of the caller, which `spawn` would run again in each worker if it found it.
    """
    main = vars(sys.modules["__main__"])
    script = {name: main[name] for name in main.keys() & {"__spec__", "__file__"}}
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    main.update(dict.fromkeys(script))
    try:
        yield
    finally:
        main.update(script)
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def _start_worker() -> None:
    """Disable the threads of `tokenizers`, and exit when the parent process exits."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # By default tqdm makes a multiprocessing lock, a semaphore that a killed worker would leave behind.
    tqdm.set_lock(threading.RLock())
    threading.Thread(target=_exit_with, args=(multiprocessing.parent_process(),), daemon=True).start()


def _exit_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


class _Lines:
    """Wraps a file that is not a terminal, and writes every update of a progress bar on a separate line."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> None:
        if line := text.replace("\x1b[A", "").strip():  # the escape code with which tqdm moves up to an outer bar
            self._file.write(f"{line}\n")


def progress_bar(items: Iterable[Any] | None = None, **options: Any) -> Any:
    """Return a tqdm progress bar for a terminal or a log file; `options` are those of tqdm."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    file = sys.stderr if is_terminal or sys.stderr is None else _Lines(sys.stderr)
    options["disable"] = options.get("disable", False) or sys.stderr is None
    return tqdm(
        items,
        dynamic_ncols=True,
        mininterval=0.2 if is_terminal else 10.0,
        file=file,
        **options,
    )
