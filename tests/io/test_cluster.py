"""A real Dask cluster on loopback: a worker may die without changing the output, and mistakes are one message."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bert_pretrain.config_file import load_config
from bert_pretrain.errors import ConfigError, DataError
from bert_pretrain.io import cluster
from bert_pretrain.io.files import read_json
from bert_pretrain.io.pool import run_each
from bert_pretrain.make_data.run import make_data
from tests.conftest import REPOSITORY, digests, one_sentence_a_line, wait_until
from tests.make_data.test_faults import num_shards

SETTINGS = ["data.max_seq_length=32", "data.dupe_factor=3", "data.examples_per_shard=128"]


def test_a_process_runs_one_task_at_a_time() -> None:
    running, seen = [], []

    def work(task: int) -> int:
        running.append(task)
        time.sleep(0.02)
        seen.append(len(running))
        running.remove(task)
        return task

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda task: cluster._run_task(work, task, ()), range(8))) == list(range(8))
    assert seen == [1] * 8


class LoopbackCluster:
    """A scheduler and its workers in separate processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        note = folder / "scheduler.json"
        self._start("dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(note))
        wait_until(lambda: note.exists() and note.read_text().endswith("}"))
        self.address = str(json.loads(note.read_text())["address"])

    def add_worker(self, **options: object) -> "subprocess.Popen[bytes]":
        storage = ["--local-directory", str(self.folder / f"worker{len(self.processes)}"), "--memory-limit", "0"]
        return self._start("dask_worker", self.address, "--nthreads", "1", "--no-nanny", *storage, **options)

    def _start(self, module: str, *arguments: str, **options: object) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", f"distributed.cli.{module}", *arguments, "--no-dashboard"]
        with (self.folder / f"{module}{len(self.processes)}.log").open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, **{"cwd": REPOSITORY, **options})
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in reversed(self.processes):
            process.kill()
            process.wait()


@pytest.fixture
def loopback(tmp_path: Path) -> Iterator[LoopbackCluster]:
    (tmp_path / "cluster").mkdir()
    running = LoopbackCluster(tmp_path / "cluster")
    yield running
    running.close()


def test_output_is_the_same_after_loss_of_a_worker(
    loopback: LoopbackCluster, tmp_path: Path, english_documents: list[list[str]], vocab_folder: Path, monkeypatch
) -> None:
    doomed, _ = loopback.add_worker(), loopback.add_worker()
    config, output = load_config(settings=SETTINGS), tmp_path / "data"
    (tmp_path / "a.txt").write_text(one_sentence_a_line(english_documents[:40]))
    is_late = []

    def lose_a_worker() -> None:
        wait_until(lambda: num_shards(output) >= 3)
        doomed.kill()
        is_late.append((output / "manifest.json").exists())

    watcher = threading.Thread(target=lose_a_worker)
    watcher.start()
    monkeypatch.chdir(tmp_path)  # relative paths, while the workers run in another folder
    make_data(config, ["a.txt"], Path(os.path.relpath(vocab_folder)), Path("data"), scheduler=loopback.address)
    watcher.join()
    assert is_late == [False]
    here = make_data(config, ["a.txt"], vocab_folder, tmp_path / "here" / "data", workers=1)
    assert digests(output) == digests(here)

    # A worker of another version and an error in a task are one message each.
    shutil.copytree(REPOSITORY / "bert_pretrain", tmp_path / "other" / "bert_pretrain")
    (tmp_path / "other" / "bert_pretrain" / "__init__.py").write_text('__version__ = "0.0.7"\n')
    odd = loopback.add_worker(cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path / "other")})
    note = (loopback.folder / f"dask_worker{len(loopback.processes) - 1}.log").read_text
    wait_until(lambda: "Registered to" in note())
    with pytest.raises(DataError, match=r"0\.0\.7"):
        cluster.connect(loopback.address, folders=[tmp_path], files=[]).__enter__()
    odd.kill()
    odd.wait()
    with cluster.connect(loopback.address, folders=[tmp_path], files=[]) as pool:
        results = run_each(read_json, [tmp_path / "none.json"] * 2, workers=pool, description="read", unit="file")
        with pytest.raises(DataError, match=r"none\.json"):
            list(results)


@pytest.mark.slow
def test_waits_for_workers_and_reports_a_dead_scheduler(
    loopback: LoopbackCluster, tmp_path: Path, english_text: Path, vocab_folder: Path, capsys
) -> None:
    def add_worker_and_kill_scheduler() -> None:
        time.sleep(1)
        loopback.add_worker()
        wait_until(lambda: num_shards(tmp_path / "data") >= 5)
        loopback.processes[0].kill()

    watcher = threading.Thread(target=add_worker_and_kill_scheduler)
    watcher.start()
    config = load_config(settings=SETTINGS)
    with pytest.raises(DataError, match="the scheduler stopped"):
        make_data(config, [str(english_text)], vocab_folder, tmp_path / "data", scheduler=loopback.address)
    watcher.join()
    assert "waiting for workers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("address", "settings", "part"),
    [
        *((address, {}, "cannot reach a scheduler") for address in ("nonsense", "http://127.0.0.1:80", "tcp://a")),
        ("tcp://127.0.0.1:1", {}, "cannot reach a scheduler"),
        ("tls://127.0.0.1:1", {}, "distributed.comm.tls"),
        ("tcp://127.0.0.1:1", {"distributed.comm.require-encryption": True}, "encryption required"),
        ("silent", {}, "cannot reach a scheduler"),
    ],
)
def test_unusable_address_is_one_message(address, settings, part, monkeypatch) -> None:
    import dask

    monkeypatch.setattr(cluster, "CONNECT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent, dask.config.set(settings):
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}" if address == "silent" else address
        with pytest.raises(ConfigError, match=part):
            cluster.connect(address, folders=[], files=[]).__enter__()


def test_worker_reports_differences(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("text")
    facts = cluster.facts_of([str(file), str(tmp_path)])
    assert cluster.difference(facts) is None
    assert "numpy" in str(cluster.difference((*facts, ("numpy", "0.1"))))
    file.write_text("texts")
    assert "a.txt is 5 bytes there" in str(cluster.difference(facts))
    file.unlink()
    assert "a.txt is missing there" in str(cluster.difference(facts))
