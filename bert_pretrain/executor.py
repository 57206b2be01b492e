"""Work on many parts at once: a pool of processes behind the standard executor interface, with a progress bar.

Tasks are pure and write their own outputs, so it does not matter where, when or how often they run.
"""

import concurrent.futures
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from bert_pretrain.errors import UserError
from bert_pretrain.progress import progress_bar

Task = TypeVar("Task")
Result = TypeVar("Result")


def run_all(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    *,
    workers: int,
    description: str,
    unit: str,
    weights: Sequence[float] | None = None,
) -> list[Result]:
    """Call `function` on every task, on `workers` processes; returns the results in the order of the tasks.

    Args:
        function: importable by name, since worker processes start afresh.
        tasks: sent to the workers by pickle.
        workers: 1 runs everything in this process.
        description: what the progress bar calls the work.
        unit: what its rate counts; `B` is scaled to megabytes.
        weights: how much each task counts in the bar, 1 each when None.

    Raises:
        UserError: when a worker was killed from outside, usually for memory.
    """
    weights = [1.0] * len(tasks) if weights is None else weights
    scale = unit == "B"
    with progress_bar(total=sum(weights), desc=description, unit=unit, unit_scale=scale) as bar:
        if workers == 1 or len(tasks) < 2:
            results = []
            for task, weight in zip(tasks, weights, strict=True):
                results.append(function(task))
                bar.update(weight)
            return results
        executor = concurrent.futures.ProcessPoolExecutor(
            min(workers, len(tasks)), mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker
        )
        try:
            futures = {executor.submit(function, task): index for index, task in enumerate(tasks)}
            for future in concurrent.futures.as_completed(futures):
                future.result()
                bar.update(weights[futures[future]])
            return [future.result() for future in futures]
        except concurrent.futures.process.BrokenProcessPool as error:
            raise UserError(
                "a worker process was killed from outside, usually by the system for want of memory",
                where=description,
                remedy="run the same command again with fewer --workers; it continues where it stopped",
            ) from error
        except BaseException:
            # Tasks are pure and their outputs atomic, so an interruption need not wait for them.
            for worker in multiprocessing.active_children():
                worker.kill()
            raise
        finally:
            executor.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    """Keep a worker to one core, silent on Ctrl-C (the parent speaks), and never alive without its parent."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_leave_with, args=(parent.sentinel,), daemon=True).start()


def _leave_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)
