"""Several machines: the pool of `io/pool.py` on an existing Dask cluster whose workers share our file system.

Before any work, every worker is checked to have the same versions and see the same files as this process. Scheduler,
workers and all who can reach them are trusted: tasks and results are pickles, which can run any code. With a `tls://`
address only those can reach them who have a certificate; Dask's configuration names it.
"""

import asyncio
import concurrent.futures
import contextlib
import hashlib
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from bert_pretrain.errors import ConfigError, DataError, UserError, needs_extra
from bert_pretrain.io.manifest import library_versions

CONNECT_SECONDS = 5.0
WORKERS_SECONDS = 60.0
_COUNT_SECONDS = 5.0
_MAX_CHECKED_FILES = 16
"""Enough to tell whether the file system is shared; they are sent with every task."""
_RUN_AGAIN = "run the same command again; it continues where it stopped"


class Expectation(NamedTuple):
    """Folders, files and facts that a worker must share with the process that sends it work; absolute paths."""

    folders: tuple[str, ...]
    """Folders that all workers write to."""
    files: tuple[str, ...]
    """Inputs and folders that all read."""
    facts: tuple[tuple[str, str], ...]
    """Facts about the folders and files as this process sees them, and its versions."""

    @staticmethod
    def of(folders: Sequence[str], files: Sequence[str]) -> "Expectation":
        """Return what this process expects of its workers."""
        return Expectation(tuple(folders), tuple(files), tuple(_facts(folders, files).items()))


def _facts(folders: Sequence[str], files: Sequence[str]) -> dict[str, str]:
    """Return what determines the bytes of an output: versions, this package's source, and what is at some paths."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    facts = {**library_versions(), "the source of bert-pretrain": digest.hexdigest()[:12]}
    facts |= {path: f"{os.path.getsize(path):,} bytes" if os.path.isfile(path) else "no file" for path in files}
    facts |= {path: "a folder" for path in files if os.path.isdir(path)}
    return facts | {path: "writable" if os.access(path, os.W_OK) else "not writable" for path in folders}


def difference(expectation: Expectation) -> str | None:
    """Return how this worker differs from the process that sends it work, None if it does not."""
    own = _facts(expectation.folders, expectation.files)
    differs = (
        f"{name} is {own.get(name)} there, {fact} here" for name, fact in expectation.facts if own.get(name) != fact
    )
    return next(differs, None)


class Cluster:
    """A pool like `pool.LocalPool`, of the workers of a Dask cluster."""

    def __init__(self, client: Any, expectation: Expectation) -> None:
        self._client = client
        self._expectation = expectation
        self._num_workers = 0
        self._counted = -_COUNT_SECONDS

    @property
    def num_workers(self) -> int:
        """How many tasks the cluster runs at once; workers may come and go."""
        if time.monotonic() - self._counted > _COUNT_SECONDS:
            self._num_workers = sum(self._client.nthreads().values())
            self._counted = time.monotonic()
        return max(1, self._num_workers)

    def submit(self, function: Callable[[Any], Any], task: Any, description: str) -> Any:
        # Not `Client.get_executor`: its futures may return garbage when a worker dies while it holds a result. The key
        # is random, because Dask takes equal keys, even of another client, for the same result.
        key = f"{description}-{secrets.token_hex(8)}"
        return self._client.submit(_run_task, function, task, self._expectation, key=key, pure=False)

    def explain(self, error: BaseException, description: str) -> UserError | None:
        from distributed import KilledWorker

        if isinstance(error, KilledWorker):
            return DataError(
                f"several workers died during the same task, the last one {error.last_worker.address}",
                where=description,
                remedy=f"give the workers more memory (1 GiB each, and --memory-limit 0), then {_RUN_AGAIN}",
            )
        # An error between client and scheduler has no number; one of a file has.
        is_connection = isinstance(error, OSError) and error.errno is None
        if is_connection or isinstance(error, asyncio.CancelledError | concurrent.futures.CancelledError):
            return DataError("the scheduler is gone, or dropped the work", where=description, remedy=_RUN_AGAIN)
        return None

    def look(self) -> None:
        if not self._client.nthreads():
            print("the cluster has no workers left; waiting for new ones")

    def stop(self) -> None:
        self._client.close(timeout=CONNECT_SECONDS)  # the scheduler drops what no client waits for


@contextlib.contextmanager
def connect(address: str, *, folders: Sequence[Path], files: Sequence[Path]) -> Iterator[Cluster]:
    """Yield the cluster of a scheduler, after checking that all its workers have the same files and versions.

    This process and the workers write to `folders`, and read `files`, which may be folders.
    """
    with needs_extra("cluster", "clusters", where="--scheduler"):
        import distributed
        from distributed.utils import silence_logging_cmgr
    paths = ([str(path.absolute()) for path in given] for given in (folders, files[:_MAX_CHECKED_FILES]))
    expectation = Expectation.of(*paths)
    with silence_logging_cmgr(logging.CRITICAL):  # we report what matters, once
        _check_scheduler(address)
        with distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False) as client:
            _wait_for_a_worker(client, address)
            _check_workers(client, expectation)
            cluster = Cluster(client, expectation)
            print(f"cluster: {cluster.num_workers} worker threads at {address}")
            yield cluster


def _check_scheduler(address: str) -> None:
    """Check that a scheduler answers; a client would keep trying."""
    from distributed.core import rpc
    from distributed.security import Security

    async def ask() -> None:
        connection = Security().get_connection_args("client")
        async with rpc(address, timeout=CONNECT_SECONDS, connection_args=connection) as peer:
            await asyncio.wait_for(peer.identity(), CONNECT_SECONDS)

    remedy = "start 'dask scheduler' there, or correct the address; it prints one like tcp://10.0.0.1:8786"
    if address.startswith("tls://"):
        remedy += "; certificates are those that Dask's configuration names, distributed.comm.tls (docs/scaling.md)"
    if not re.fullmatch(r"(tcp|tls)://.+:\d+", address):
        raise ConfigError(f"'{address}' is not the address of a scheduler", where="--scheduler", remedy=remedy)
    try:
        asyncio.run(ask())
    except Exception as error:  # what answers may break the protocol in any way
        what = f"cannot reach a scheduler at {address}: {str(error) or type(error).__name__}"
        raise ConfigError(what, where="--scheduler", remedy=remedy) from error


def _wait_for_a_worker(client: Any, address: str) -> None:
    """Wait for the first worker, and warn of a memory limit."""
    if not client.nthreads():
        print(f"waiting for workers at {address}")
    start = f"dask worker {address} --nthreads 1 --nworkers N --memory-limit 0"
    try:
        client.wait_for_workers(1, timeout=WORKERS_SECONDS)
    except TimeoutError as error:
        what = f"no worker came within {WORKERS_SECONDS:.0f} s"
        raise ConfigError(what, where=f"--scheduler {address}", remedy=f"start some: {start}") from error
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    if any(worker["memory_limit"] for worker in workers):  # mapped pages of the token store count towards it
        print(f"warning: workers have a memory limit, and Dask may pause them without need; start them by: {start}")


def _check_workers(client: Any, expectation: Expectation) -> None:
    """Compare all workers with this process; each must see a file of a random name in each folder."""
    probes = [f"{folder}/.cluster-{secrets.token_hex(16)}.tmp" for folder in expectation.folders]
    try:
        for probe in probes:
            Path(probe).touch()
        expectation = Expectation.of(expectation.folders, [*expectation.files, *probes])
        found = client.run(difference, expectation, on_error="return")
    finally:
        for probe in probes:
            Path(probe).unlink(missing_ok=True)
    for worker, differs in sorted(found.items()):
        if differs:
            raise _mismatch(worker, f"it cannot run our code: {differs}" if isinstance(differs, Exception) else differs)


def _mismatch(worker: str, differs: str) -> DataError:
    return DataError(
        f"the worker {worker} does not fit: {differs}",
        where="--scheduler",
        remedy="workers must run the same installation and see the output, the token store, the tokenizer and the "
        "inputs under the same absolute paths (docs/scaling.md)",
    )


def _run_task(function: Callable[[Any], Any], task: Any, expectation: Expectation) -> Any:
    """Run one task on this worker, after checking it: it may have joined after the others were checked."""
    _check_own_process(expectation)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    return function(task)


@lru_cache(maxsize=4)  # a process cannot change its versions, and reading them takes longer than a small task
def _check_own_process(expectation: Expectation) -> None:
    if differs := difference(expectation):
        from distributed import get_worker

        raise _mismatch(get_worker().address, differs)
