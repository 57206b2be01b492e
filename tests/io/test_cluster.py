"""A real Dask cluster on loopback: the same bytes although a worker dies, and one message for what cannot work."""

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bert_pretrain.config_file import load_config
from bert_pretrain.errors import ConfigError
from bert_pretrain.io import cluster
from bert_pretrain.io.cluster import Expectation
from bert_pretrain.make_data.run import make_data
from tests.conftest import REPOSITORY

SETTINGS = ["data.max_seq_length=32", "data.dupe_factor=6", "data.examples_per_shard=128"]


class LoopbackCluster:
    """A scheduler and its workers, each a process of its own."""

    def __init__(self, folder: Path, *, protocol: str = "tcp", **environment: str) -> None:
        self.folder = folder
        self.environment = {**os.environ, **environment}
        self.processes: list[subprocess.Popen[bytes]] = []
        note = folder / "scheduler.json"
        place = ["--host", "127.0.0.1", "--port", "0", "--protocol", protocol]
        self._start("dask_scheduler", *place, "--scheduler-file", str(note))
        wait_for(lambda: note.exists() and note.read_text().endswith("}"))
        self.address = str(json.loads(note.read_text())["address"])

    def add_worker(self, **options: object) -> "subprocess.Popen[bytes]":
        place = ["--local-directory", str(self.folder / f"worker{len(self.processes)}"), "--memory-limit", "0"]
        return self._start("dask_worker", self.address, "--nthreads", "1", "--no-nanny", *place, **options)

    def _start(self, module: str, *arguments: str, **options: object) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", f"distributed.cli.{module}", *arguments, "--no-dashboard"]
        with (self.folder / f"{module}{len(self.processes)}.log").open("w") as log:
            process: subprocess.Popen[bytes] = subprocess.Popen(
                command, stdout=log, stderr=log, **{"cwd": REPOSITORY, "env": self.environment, **options}
            )  # type: ignore[call-overload]
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in reversed(self.processes):
            process.kill()
            process.wait()


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def loopback(tmp_path: Path) -> Iterator[LoopbackCluster]:
    (tmp_path / "cluster").mkdir()
    running = LoopbackCluster(tmp_path / "cluster")
    yield running
    running.close()


def start(text: Path, vocab: Path, output: Path, address: str) -> "subprocess.Popen[str]":
    # Relative paths, as people type them: the workers run elsewhere.
    command = ["make-data", os.path.relpath(text, output.parent), "--vocab", os.path.relpath(vocab, output.parent)]
    command += ["--output", output.name, "--scheduler", address]
    command += [item for setting in SETTINGS for item in ("--set", setting)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        [sys.executable, "-m", "bert_pretrain", *command],
        cwd=output.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def digests(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def shards(output: Path) -> int:
    return len(list(output.glob("train/[0-9]*.parquet")))


def test_a_cluster_that_loses_a_worker_makes_the_bytes_of_one_process(
    loopback: LoopbackCluster, tmp_path: Path, english_text: Path, vocab_folder: Path
) -> None:
    doomed, _ = loopback.add_worker(), loopback.add_worker()
    output = tmp_path / "data"
    process = start(english_text, vocab_folder, output, loopback.address)
    wait_for(lambda: shards(output) >= 5 or process.poll() is not None)
    doomed.send_signal(signal.SIGKILL)
    assert not (output / "manifest.json").exists()
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == 0, stderr
    config = load_config(settings=SETTINGS)
    here = make_data(config, [str(english_text)], vocab_folder, tmp_path / "here" / "data", workers=1)
    # The manifest names the input as it was typed.
    assert {**digests(output), "manifest.json": ""} == {**digests(here), "manifest.json": ""}


def test_workers_that_do_not_fit_and_mistakes_of_tasks_are_one_message(
    loopback: LoopbackCluster, command_line: Callable[..., "subprocess.CompletedProcess[str]"], tmp_path: Path
) -> None:
    shutil.copytree(REPOSITORY / "bert_pretrain", tmp_path / "other" / "bert_pretrain")
    (tmp_path / "other" / "bert_pretrain" / "__init__.py").write_text('__version__ = "0.0.7"\n')
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "other")}
    odd = loopback.add_worker(cwd=tmp_path, env=environment)
    text = tmp_path / "a.jsonl"
    text.write_text('{"text": "a"}\n{broken\n')
    arguments = ("vocab", text, "--output", tmp_path / "v", "--scheduler", loopback.address)
    done = command_line(*arguments)
    assert done.returncode == 2
    assert "error: the worker tcp://127.0.0.1" in done.stderr
    assert "has bert-pretrain 0.0.7, this process" in done.stderr
    odd.kill()
    loopback.add_worker()
    done = command_line(*arguments)
    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1
    assert "where: " + str(text) + ": line 2" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_an_interrupted_command_leaves_the_cluster_idle_and_goes_on(
    loopback: LoopbackCluster, tmp_path: Path, english_text: Path, vocab_folder: Path
) -> None:
    loopback.add_worker()
    output = tmp_path / "data"
    process = start(english_text, vocab_folder, output, loopback.address)
    wait_for(lambda: shards(output) >= 5)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == 130, stderr
    time.sleep(2)  # at most the shard begun
    count = shards(output)
    time.sleep(2)
    assert shards(output) == count
    again = start(english_text, vocab_folder, output, loopback.address)
    _, stderr = again.communicate(timeout=180)
    assert again.returncode == 0, stderr
    assert shards(output) > count


@pytest.mark.slow
def test_a_scheduler_that_dies_is_one_message(
    loopback: LoopbackCluster, tmp_path: Path, english_text: Path, vocab_folder: Path
) -> None:
    loopback.add_worker()
    output = tmp_path / "data"
    process = start(english_text, vocab_folder, output, loopback.address)
    wait_for(lambda: shards(output) >= 5)
    loopback.processes[0].kill()
    _, stderr = process.communicate(timeout=180)
    assert process.returncode == 2
    assert "the scheduler is gone" in stderr
    assert "Traceback" not in stderr


@pytest.mark.slow
def test_a_cluster_without_workers_waits_for_them(
    loopback: LoopbackCluster, tmp_path: Path, english_text: Path, vocab_folder: Path
) -> None:
    process = start(english_text, vocab_folder, tmp_path / "data", loopback.address)
    wait_for(lambda: (tmp_path / "data").exists())
    time.sleep(2)
    first = loopback.add_worker()
    wait_for(lambda: shards(tmp_path / "data") >= 5)
    first.kill()
    first.wait()
    time.sleep(1)
    loopback.add_worker()
    stdout, stderr = process.communicate(timeout=180)
    assert process.returncode == 0, stderr
    assert "waiting for workers" in stdout


@pytest.mark.parametrize("address", ["nonsense", "", "http://127.0.0.1:80", "tcp://127.0.0.1"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is not the address"), cluster.connect(address, folders=[], files=[]):
        pass


def test_a_scheduler_that_does_not_answer_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "CONNECT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"cannot reach a scheduler at {address}: "):
            cluster.connect(address, folders=[], files=[]).__enter__()
    with pytest.raises(ConfigError, match=f"cannot reach a scheduler at {address}: "):
        cluster.connect(address, folders=[], files=[]).__enter__()


def test_a_worker_tells_what_it_does_not_see(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    versions = tuple(cluster._versions().items())

    def difference(**changes: object) -> str | None:
        sound = {"versions": versions, "folders": (str(tmp_path),), "files": ((str(tmp_path / "a.txt"), 4),)}
        return cluster._difference(Expectation(**{**sound, **changes}))  # type: ignore[arg-type]

    assert difference() is None
    assert "sees no folder /nowhere" in str(difference(folders=("/nowhere",)))
    assert "does not see /nowhere/a" in str(difference(files=(("/nowhere/a", 4),)))
    assert "4 bytes instead of 5" in str(difference(files=((str(tmp_path / "a.txt"), 5),)))
    assert "numpy" in str(difference(versions=(("numpy", "0.1"),)))


def make_certificate(folder: Path, name: str) -> str:
    """Make a self-signed certificate with its key in one file, and return its path."""
    key, certificate = folder / f"{name}.key", folder / f"{name}.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    certificate.write_text(certificate.read_text() + key.read_text())
    return str(certificate)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_tls_takes_its_certificates_from_the_configuration_of_dask_and_refuses_others(tmp_path: Path) -> None:
    import dask

    own, foreign = (make_certificate(tmp_path, name) for name in ("own", "foreign"))
    keys = ("CA_FILE", "SCHEDULER__CERT", "WORKER__CERT", "CLIENT__CERT")
    running = LoopbackCluster(tmp_path, protocol="tls", **{f"DASK_DISTRIBUTED__COMM__TLS__{key}": own for key in keys})
    try:
        assert running.address.startswith("tls://")
        running.add_worker()
        for certificate in (own, foreign):
            tls = {"distributed.comm.tls.ca-file": certificate, "distributed.comm.tls.client.cert": certificate}
            with dask.config.set(tls):
                if certificate == own:
                    with cluster.connect(running.address, folders=[tmp_path], files=[]) as pool:
                        assert pool.submit(abs, -7, "task").result(timeout=60) == 7
                else:
                    with pytest.raises(ConfigError, match="cannot reach a scheduler"):
                        cluster._check_scheduler(running.address)
    finally:
        running.close()


def test_tls_without_certificates_and_tcp_where_encryption_is_required_are_one_message() -> None:
    import dask

    with pytest.raises(ConfigError, match="cannot reach a scheduler at tls://") as caught:
        cluster._check_scheduler("tls://127.0.0.1:1")
    assert "distributed.comm.tls" in caught.value.remedy
    with (
        dask.config.set({"distributed.comm.require-encryption": True}),
        pytest.raises(ConfigError, match="encryption required by Dask configuration"),
    ):
        cluster._check_scheduler("tcp://127.0.0.1:1")
