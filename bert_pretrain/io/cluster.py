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
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from bert_pretrain.errors import ConfigError, DataError, UserError, needs_extra
from bert_pretrain.io.manifest import library_versions

CONNECT_SECONDS = 5.0
WORKERS_SECONDS = 60.0
_MAX_CHECKED_FILES = 16  # sent with every task; enough to detect a file system that is not shared
_RUN_AGAIN = "run the same command again; it continues where it stopped"


Facts = tuple[tuple[str, str], ...]  # names and values; a name that starts with "/" is a path


def facts_of(paths: Iterable[str]) -> Facts:
    """Return what a worker must have in common with its sender: versions, and the state of files and folders."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    facts = {**library_versions(), "the source of bert-pretrain": digest.hexdigest()[:12]}
    for path in paths:
        if os.path.isfile(path):
            facts[path] = f"{os.path.getsize(path):,} bytes"
        else:
            facts[path] = "a folder" if os.path.isdir(path) else "missing"
    return tuple(facts.items())


def difference(expected: Facts) -> str | None:
    """Return the first difference between this process and the sender, as text for the sender, or None."""
    facts = dict(facts_of(name for name, _ in expected if name.startswith("/")))
    for name, value in expected:
        if facts.get(name) != value:
            return f"{name} is {facts.get(name)} there, {value} here"
    return None


class Cluster:
    """A pool with the interface of `pool.LocalPool` that runs tasks on the workers of a Dask cluster."""

    def __init__(self, client: Any, facts: Facts) -> None:
        self._client = client
        self._facts = facts

    @property
    def num_workers(self) -> int:
        """Number of tasks that run in parallel. It changes when workers join or leave."""
        return max(1, sum(self._client.nthreads().values()))

    def submit(
        self,
        function: Callable[[Any], Any],
        task: Any,
        description: str,
    ) -> Any:
        # Not through `Client.get_executor`: its futures may return garbage if a worker dies while it holds a result.
        # The key is random because Dask treats equal keys as the same result, even from another client.
        key = f"{description}-{secrets.token_hex(8)}"
        return self._client.submit(
            _run_task,
            function,
            task,
            self._facts,
            key=key,
            pure=False,
        )

    def explain(self, error: BaseException, description: str) -> UserError | None:
        from distributed import KilledWorker

        if isinstance(error, KilledWorker):
            return DataError(
                f"several workers died during the same task, the last one {error.last_worker.address}",
                where=description,
                remedy=f"give the workers more memory (1 GiB each, and --memory-limit 0), then {_RUN_AGAIN}",
            )
        # Errors of the connection to the scheduler have no errno; file errors have one.
        is_connection = isinstance(error, OSError) and error.errno is None
        if is_connection or isinstance(error, asyncio.CancelledError | concurrent.futures.CancelledError):
            return DataError("the scheduler stopped or dropped the tasks", where=description, remedy=_RUN_AGAIN)
        return None

    def stop(self) -> None:
        self._client.close(timeout=CONNECT_SECONDS)  # the scheduler drops tasks that no client waits for


@contextlib.contextmanager
def connect(address: str, *, folders: Sequence[Path], files: Sequence[Path]) -> Iterator[Cluster]:
    """Connect to a scheduler, check the files and versions of all its workers, and yield its cluster.

    This process and the workers write to `folders` and read `files` (files or folders). The first 16 are checked. A new
    file with a random name in each folder shows whether the workers see the same folder.
    """
    with needs_extra("cluster", "clusters", where="--scheduler"):
        import distributed
        from distributed.utils import silence_logging_cmgr
    with contextlib.ExitStack() as stack:
        stack.enter_context(silence_logging_cmgr(logging.CRITICAL))  # our own messages report each problem once
        _check_scheduler(address)
        client = stack.enter_context(distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False))
        _wait_for_worker(client, address)
        probes = [folder / f".cluster-{secrets.token_hex(16)}.tmp" for folder in folders]
        for probe in probes:
            stack.callback(probe.unlink, missing_ok=True)
            probe.touch()
        facts = facts_of(str(path.absolute()) for path in (*files[:_MAX_CHECKED_FILES], *probes))
        for worker, details in sorted(client.run(difference, facts, on_error="return").items()):
            if details:
                raise _mismatch(worker, str(details))
        cluster = Cluster(client, facts)
        print(f"cluster: {cluster.num_workers} worker threads at {address}")
        yield cluster


def _check_scheduler(address: str) -> None:
    """Check that a scheduler answers. A Dask client would wait for an answer without end."""
    from distributed.core import rpc
    from distributed.security import Security

    async def ask() -> None:
        connection = Security().get_connection_args("client")
        async with rpc(address, timeout=CONNECT_SECONDS, connection_args=connection) as peer:
            await asyncio.wait_for(peer.identity(), CONNECT_SECONDS)

    try:
        asyncio.run(ask())
    except Exception as error:  # another kind of server may break the protocol in any way
        what = f"cannot reach a scheduler at {address}: {str(error) or type(error).__name__}"
        remedy = (
            "start 'dask scheduler' there, and use the address that it prints, like tcp://10.0.0.1:8786; for tls://, "
            "Dask's configuration names the certificates, under distributed.comm.tls (docs/scaling.md)"
        )
        raise ConfigError(what, where="--scheduler", remedy=remedy) from error


def _wait_for_worker(client: Any, address: str) -> None:
    """Wait for the first worker."""
    if not client.nthreads():
        print(f"waiting for workers at {address}")
    try:
        client.wait_for_workers(1, timeout=WORKERS_SECONDS)
    except TimeoutError as error:
        raise ConfigError(
            f"no worker joined within {WORKERS_SECONDS:.0f} s",
            where=f"--scheduler {address}",
            remedy=f"start workers: dask worker {address} --nthreads 1 --nworkers N --memory-limit 0",
        ) from error


def _mismatch(worker: str, details: str) -> DataError:
    what = f"the worker {worker} does not match this process: {details}"
    remedy = "workers must run the same installation and see the output, the token store, the tokenizer and the "
    remedy += "inputs under the same absolute paths (docs/scaling.md)"
    return DataError(what, where="--scheduler", remedy=remedy)


_TASK_LOCK = threading.Lock()  # a process has caches, such as the encoder's, that only one thread may use


def _run_task(function: Callable[[Any], Any], task: Any, facts: Facts) -> Any:
    """Run one task on this worker. Check the worker first, because it may have joined after the others."""
    _check_this_worker(facts)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # tasks already run in parallel
    with _TASK_LOCK:
        return function(task)


@lru_cache(maxsize=4)  # once per sender, because it takes longer than a small task
def _check_this_worker(facts: Facts) -> None:
    if details := difference(facts):
        from distributed import get_worker

        raise _mismatch(get_worker().address, details)
