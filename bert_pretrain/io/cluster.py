"""Run the tasks of `io/pool.py` on an existing Dask cluster that shares this machine's file system.

Every worker must have the same versions and see the same files as this process, which each worker checks once.
Tasks and results are pickles, which can run any code, so you must trust the scheduler, the workers and everyone who can
reach them. A `tls://` address limits access to holders of the certificate that Dask's configuration names.
"""

import asyncio
import concurrent.futures
import contextlib
import hashlib
import logging
import math
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from bert_pretrain.errors import ConfigError, DataError, UserError, needs_extra
from bert_pretrain.io.manifest import library_versions

CONNECT_SECONDS = 5.0
WORKERS_SECONDS = 60.0
_RECOUNT_SECONDS = 5.0
_MAX_CHECKED_FILES = 16  # sent with every task; enough to detect a file system that is not shared
_RUN_AGAIN = "run the same command again; it continues where it stopped"


class Expectation(NamedTuple):
    """The paths and facts that must be the same for a worker and for the process that sends it tasks."""

    folders: tuple[str, ...]  # absolute paths that all workers write to
    files: tuple[str, ...]  # absolute paths of inputs and folders that all workers read
    facts: tuple[tuple[str, str], ...]  # versions, and the state of these paths as the sender sees it

    @staticmethod
    def of(folders: Sequence[str], files: Sequence[str]) -> "Expectation":
        return Expectation(tuple(folders), tuple(files), tuple(_facts(folders, files).items()))


def _facts(folders: Sequence[str], files: Sequence[str]) -> dict[str, str]:
    """Return the library versions, a hash of this package's source, and the state of each path."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    facts = {**library_versions(), "the source of bert-pretrain": digest.hexdigest()[:12]}
    facts |= {path: f"{os.path.getsize(path):,} bytes" if os.path.isfile(path) else "no file" for path in files}
    facts |= {path: "a folder" for path in files if os.path.isdir(path)}
    return facts | {path: "writable" if os.access(path, os.W_OK) else "not writable" for path in folders}


def difference(expectation: Expectation) -> str | None:
    """Return the first difference between this worker and the expectation, as text for the sender, or None."""
    facts = _facts(expectation.folders, expectation.files)
    for name, expected in expectation.facts:
        if facts.get(name) != expected:
            return f"{name} is {facts.get(name)} there, {expected} here"
    return None


class Cluster:
    """A pool with the interface of `pool.LocalPool` that runs tasks on the workers of a Dask cluster."""

    def __init__(self, client: Any, expectation: Expectation) -> None:
        self._client = client
        self._expectation = expectation
        self._num_workers = 0
        self._counted_at = -math.inf

    @property
    def num_workers(self) -> int:
        """Number of tasks that run in parallel. It changes when workers join or leave."""
        if time.monotonic() - self._counted_at > _RECOUNT_SECONDS:
            self._num_workers = sum(self._client.nthreads().values())
            self._counted_at = time.monotonic()
        return max(1, self._num_workers)

    def submit(self, function: Callable[[Any], Any], task: Any, description: str) -> Any:
        # Not through `Client.get_executor`: its futures may return garbage if a worker dies while it holds a result.
        # The key is random because Dask treats equal keys as the same result, even from another client.
        key = f"{description}-{secrets.token_hex(8)}"
        return self._client.submit(_run_task, function, task, self._expectation, key=key, pure=False)

    def explain(self, error: BaseException, description: str) -> UserError | None:
        from distributed import KilledWorker

        if isinstance(error, KilledWorker):
            what = f"several workers died during the same task, the last one {error.last_worker.address}"
            remedy = f"give the workers more memory (1 GiB each, and --memory-limit 0), then {_RUN_AGAIN}"
            return DataError(what, where=description, remedy=remedy)
        # Errors of the connection to the scheduler have no errno; file errors have one.
        is_connection = isinstance(error, OSError) and error.errno is None
        if is_connection or isinstance(error, asyncio.CancelledError | concurrent.futures.CancelledError):
            return DataError("the scheduler stopped or dropped the tasks", where=description, remedy=_RUN_AGAIN)
        return None

    def report_stall(self) -> None:
        if not self._client.nthreads():
            print("the cluster has no workers left; waiting for new ones")

    def stop(self) -> None:
        self._client.close(timeout=CONNECT_SECONDS)  # the scheduler drops tasks that no client waits for


@contextlib.contextmanager
def connect(address: str, *, folders: Sequence[Path], files: Sequence[Path]) -> Iterator[Cluster]:
    """Connect to a scheduler, check the files and versions of all its workers, and yield its cluster.

    This process and the workers write to `folders` and read `files` (files or folders). The first 16 are checked.
    """
    with needs_extra("cluster", "clusters", where="--scheduler"):
        import distributed
        from distributed.utils import silence_logging_cmgr
    folder_paths, file_paths = ([str(path.absolute()) for path in paths] for paths in (folders, files))
    expectation = Expectation.of(folder_paths, file_paths[:_MAX_CHECKED_FILES])
    with silence_logging_cmgr(logging.CRITICAL):  # our own messages report each problem once
        _check_scheduler(address)
        with distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False) as client:
            _wait_for_worker(client, address)
            _check_workers(client, expectation)
            cluster = Cluster(client, expectation)
            print(f"cluster: {cluster.num_workers} worker threads at {address}")
            yield cluster


def _check_scheduler(address: str) -> None:
    """Check that a scheduler answers. A Dask client would retry without end."""
    from distributed.core import rpc
    from distributed.security import Security

    async def ask() -> None:
        connection = Security().get_connection_args("client")
        async with rpc(address, timeout=CONNECT_SECONDS, connection_args=connection) as peer:
            await asyncio.wait_for(peer.identity(), CONNECT_SECONDS)

    remedy = "start 'dask scheduler' there, or use the address that it prints, like tcp://10.0.0.1:8786"
    if address.startswith("tls://"):
        remedy += "; Dask's configuration names the certificates, under distributed.comm.tls (docs/scaling.md)"
    if not re.fullmatch(r"(tcp|tls)://.+:\d+", address):
        raise ConfigError(f"'{address}' is not the address of a scheduler", where="--scheduler", remedy=remedy)
    try:
        asyncio.run(ask())
    except Exception as error:  # another kind of server may break the protocol in any way
        what = f"cannot reach a scheduler at {address}: {str(error) or type(error).__name__}"
        raise ConfigError(what, where="--scheduler", remedy=remedy) from error


def _wait_for_worker(client: Any, address: str) -> None:
    """Wait for the first worker, and warn if a worker has a memory limit."""
    if not client.nthreads():
        print(f"waiting for workers at {address}")
    start = f"dask worker {address} --nthreads 1 --nworkers N --memory-limit 0"
    try:
        client.wait_for_workers(1, timeout=WORKERS_SECONDS)
    except TimeoutError as error:
        what = f"no worker joined within {WORKERS_SECONDS:.0f} s"
        raise ConfigError(what, where=f"--scheduler {address}", remedy=f"start workers: {start}") from error
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    if any(worker["memory_limit"] for worker in workers):  # Dask counts mapped pages of the token store as used memory
        print(f"warning: the workers have a memory limit and Dask may pause them needlessly; start them with: {start}")


def _check_workers(client: Any, expectation: Expectation) -> None:
    """Compare all workers with this process. Each must see a new file with a random name in each folder."""
    probes = [f"{folder}/.cluster-{secrets.token_hex(16)}.tmp" for folder in expectation.folders]
    try:
        for probe in probes:
            Path(probe).touch()
        expectation = Expectation.of(expectation.folders, [*expectation.files, *probes])
        differences = client.run(difference, expectation, on_error="return")
    finally:
        for probe in probes:
            Path(probe).unlink(missing_ok=True)
    for worker, details in sorted(differences.items()):
        if details:
            is_error = isinstance(details, Exception)
            raise _mismatch(worker, f"it cannot run our code: {details}" if is_error else details)


def _mismatch(worker: str, details: str) -> DataError:
    what = f"the worker {worker} does not match this process: {details}"
    remedy = "workers must run the same installation and see the output, the token store, the tokenizer and the "
    remedy += "inputs under the same absolute paths (docs/scaling.md)"
    return DataError(what, where="--scheduler", remedy=remedy)


_TASK_LOCK = threading.Lock()  # a process has caches, such as the encoder's, that only one thread may use


def _run_task(function: Callable[[Any], Any], task: Any, expectation: Expectation) -> Any:
    """Run one task on this worker. Check the worker first, because it may have joined after `_check_workers`."""
    _check_this_worker(expectation)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # tasks already run in parallel
    with _TASK_LOCK:
        return function(task)


@lru_cache(maxsize=4)  # once per expectation, because it takes longer than a small task
def _check_this_worker(expectation: Expectation) -> None:
    if details := difference(expectation):
        from distributed import get_worker

        raise _mismatch(get_worker().address, details)
