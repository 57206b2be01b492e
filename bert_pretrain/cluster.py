"""More machines: the pool of `executor.py` on an existing Dask cluster, whose workers share a file system with us.

Before any work, every worker must show that it is a twin of this process: the same versions, the same files. The
scheduler is trusted: it and the workers run what we send, and we read what they return, by pickle.
"""

import asyncio
import concurrent.futures
import contextlib
import hashlib
import logging
import os
import platform
import re
import secrets
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from bert_pretrain.errors import ConfigError, DataError, UserError
from bert_pretrain.manifest import library_versions

CONNECT_SECONDS = 5.0
WORKERS_SECONDS = 60.0
_COUNT_SECONDS = 5.0
_LOOKED_AT = 16
_AGAIN = "run the same command again; it continues where it stopped"


@dataclass(frozen=True)
class Expectation:
    """What every worker must find to be a twin of the process that sends it work."""

    versions: tuple[tuple[str, str], ...]
    folders: tuple[str, ...]
    """Absolute paths of folders that all write in."""
    files: tuple[tuple[str, int], ...]
    """Absolute paths of inputs and folders that all read, and their sizes in bytes, -1 for a folder."""


class Cluster:
    """A pool (see `executor.Pool`) of the workers of a Dask cluster."""

    def __init__(self, client: Any, expectation: Expectation) -> None:
        self._client = client
        self._expectation = expectation
        self._handles: weakref.WeakSet[Any] = weakref.WeakSet()
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
        # Not `Client.get_executor`: its futures may hand on garbage when a worker dies with a result in hand. A key of
        # its own for every task, because Dask would take an equal key, even another client's, for the same result.
        key = f"{description}-{secrets.token_hex(8)}"
        handle = self._client.submit(_work, function, task, self._expectation, key=key, pure=False)
        self._handles.add(handle)
        return handle

    def explain(self, error: BaseException, description: str) -> UserError | None:
        from distributed import KilledWorker

        if isinstance(error, KilledWorker):
            return DataError(
                f"several workers died over the same piece of work, the last one {error.last_worker.address}",
                where=description,
                remedy=f"give the workers more memory (1 GiB each, and --memory-limit 0), then {_AGAIN}",
            )
        # What goes wrong between the client and the scheduler has no number; what goes wrong with a file has.
        is_between = isinstance(error, OSError) and error.errno is None
        if is_between or isinstance(error, asyncio.CancelledError | concurrent.futures.CancelledError):
            return DataError("the scheduler is gone, or dropped the work", where=description, remedy=_AGAIN)
        return None

    def look(self) -> None:
        if not self._client.nthreads():
            print("the cluster has no workers left; waiting for some to come")

    def stop(self) -> None:
        with contextlib.suppress(OSError):  # the scheduler may be what failed
            self._client.cancel(list(self._handles))


@contextlib.contextmanager
def connect(address: str, *, folders: Sequence[Path], files: Sequence[Path]) -> Iterator[Cluster]:
    """Yield the cluster of a scheduler, once all its workers have shown that they see the same files and versions.

    Args:
        address: of the scheduler, `tcp://HOST:PORT`.
        folders: existing folders that this process and the workers write in.
        files: inputs and folders that they read.

    Raises:
        UserError: when the scheduler cannot be reached, no worker comes, or one does not fit.
    """
    try:
        import distributed
    except ImportError as error:
        raise ConfigError(
            "the library for clusters is not installed",
            where="--scheduler",
            remedy="pip install 'bert-pretrain[cluster]'",
        ) from error
    for name in ("distributed", "distributed.client"):  # what matters is said by us, once
        logging.getLogger(name).setLevel(logging.CRITICAL)
    _greet(address)
    client = distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    expectation = Expectation(
        tuple(_versions().items()),
        tuple(str(folder.absolute()) for folder in folders),
        # A few tell whether the file system is shared; it travels with every task.
        tuple((str(file.absolute()), file.stat().st_size if file.is_file() else -1) for file in files[:_LOOKED_AT]),
    )
    try:
        _wait_for_a_worker(client, address)
        _check_workers(client, expectation)
        cluster = Cluster(client, expectation)
        print(f"cluster: {cluster.num_workers} worker threads at {address}")
        _warn_of_memory_limits(client)
        yield cluster
    finally:
        client.close(timeout=CONNECT_SECONDS)


def _greet(address: str) -> None:
    """Make sure that a scheduler answers, before a client is made that would keep trying.

    Raises:
        ConfigError: when the address is none, nobody answers, or somebody else does.
    """
    from distributed.core import rpc
    from distributed.security import Security

    async def ask() -> str:
        connection = Security().get_connection_args("client")
        async with rpc(address, timeout=CONNECT_SECONDS, connection_args=connection) as peer:
            return str((await asyncio.wait_for(peer.identity(), CONNECT_SECONDS))["type"])

    remedy = "start 'dask scheduler' there, or mend the address; it prints one like tcp://10.0.0.1:8786"
    if not re.fullmatch(r"(tcp|tls)://.+:\d+", address):
        raise ConfigError(f"'{address}' is no address of a scheduler", where="--scheduler", remedy=remedy)
    try:
        kind = asyncio.run(ask())
    except Exception as error:  # whatever answers there may break the protocol in any way
        what = f"cannot reach a scheduler at {address}: {str(error) or type(error).__name__}"
        raise ConfigError(what, where="--scheduler", remedy=remedy) from error
    if kind != "Scheduler":
        raise ConfigError(f"{address} is a {kind.lower()}, not a scheduler", where="--scheduler", remedy=remedy)


def _wait_for_a_worker(client: Any, address: str) -> None:
    if not client.nthreads():
        print(f"waiting for workers at {address}")
    try:
        client.wait_for_workers(1, timeout=WORKERS_SECONDS)
    except TimeoutError as error:
        raise ConfigError(
            f"no worker came within {WORKERS_SECONDS:.0f} s",
            where=f"--scheduler {address}",
            remedy=f"start some: dask worker {address} --nthreads 1 --nworkers N --memory-limit 0",
        ) from error


def _warn_of_memory_limits(client: Any) -> None:
    """Say so where Dask would pause workers for pages of the token store, which are mapped and not theirs."""
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    limits = [worker["memory_limit"] for worker in workers if worker["memory_limit"]]
    if limits:
        print(
            f"warning: workers have a memory limit of {min(limits) / 1e9:.1f} GB, towards which Dask counts the mapped "
            "pages of the token store, and may pause them for it; start them with --memory-limit 0"
        )


def _check_workers(client: Any, expectation: Expectation) -> None:
    """Let every worker look for a secret in each folder, and compare versions and files.

    Raises:
        UserError: naming the first worker that does not fit, and what it lacks.
    """
    secret = secrets.token_hex(16)
    probes = [Path(folder) / f".cluster-{secret}.tmp" for folder in expectation.folders]
    try:
        for probe in probes:
            probe.write_text(secret)
        found = client.run(_examine, expectation, secret, on_error="return")
    finally:
        for probe in probes:
            probe.unlink(missing_ok=True)
    for worker, complaint in sorted(found.items()):
        if isinstance(complaint, Exception):
            raise _misfit(worker, f"cannot run our code: {complaint}")
        if complaint:
            raise _misfit(worker, complaint)


def _misfit(worker: str, complaint: str) -> DataError:
    return DataError(
        f"the worker {worker} {complaint}",
        where="--scheduler",
        remedy="workers must run the same installation and see the output, the token store, the tokenizer and the "
        "inputs under the same absolute paths (docs/scaling.md)",
    )


def _versions() -> dict[str, str]:
    """Return all that decides the bytes of an output: versions, and the source of this package itself."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return {**library_versions(), "source of bert-pretrain": digest.hexdigest()[:12]}


def _examine(expectation: Expectation, secret: str) -> str | None:
    """On a worker: return what does not fit, None if all does."""
    return _compare(expectation) or next(filter(None, (_use(folder, secret) for folder in expectation.folders)), None)


def _compare(expectation: Expectation) -> str | None:
    own = _versions()
    for name, version in expectation.versions:
        if own.get(name) != version:
            return f"({platform.node()}) has {name} {own.get(name)}, this process {version}"
    for folder in expectation.folders:
        if not Path(folder).is_dir():
            return f"({platform.node()}) sees no folder {folder}"
    for path, size in expectation.files:
        file = Path(path)
        if not file.exists():
            return f"({platform.node()}) does not see {path}"
        if size >= 0 and file.stat().st_size != size:
            return f"({platform.node()}) sees another {path}: {file.stat().st_size:,} bytes instead of {size:,}"
    return None


def _use(folder: str, secret: str) -> str | None:
    try:
        if (Path(folder) / f".cluster-{secret}.tmp").read_text() != secret:
            return f"({platform.node()}) sees another folder under {folder}"
        own = Path(folder) / f".cluster-{secret}-{platform.node()}-{os.getpid()}.tmp"
        own.write_text(secret)
        own.unlink()
    except FileNotFoundError:
        return f"({platform.node()}) has a folder {folder}, but it is not this one: the file system is not shared"
    except OSError as error:
        return f"({platform.node()}) cannot write in {folder}: {error.strerror}"
    return None


def _work(function: Callable[[Any], Any], task: Any, expectation: Expectation) -> Any:
    """On a worker: do one task, if the worker fits; it may have come after the others were looked at."""
    _admit(expectation)
    return function(task)


@lru_cache(maxsize=4)
def _admit(expectation: Expectation) -> None:
    complaint = _compare(expectation)
    if complaint:
        from distributed import get_worker

        raise _misfit(get_worker().address, complaint)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
