"""The Slurm script of docs/scaling.md, run with fake `srun` and `scontrol`."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.conftest import wait_until
from tests.pages import ROOT, blocks
from tests.train.conftest import assert_same_run, status, tiny
from tests.train.test_resume import num_lines

# Like --kill-on-bad-exit: if one rank fails, the others are killed immediately.
SRUN = """#!/usr/bin/env python
import os, subprocess, sys, time
command = [word for word in sys.argv[1:] if not word.startswith("--kill")]
numbers = range(int(os.environ["SLURM_NTASKS"]))
names = ("SLURM_PROCID", "SLURM_LOCALID")
ranks = [subprocess.Popen(command, env={**os.environ, **dict.fromkeys(names, str(number))}) for number in numbers]
with open("ranks", "w") as file:
    file.write(" ".join(str(rank.pid) for rank in ranks))
while any(rank.poll() is None for rank in ranks):
    if any(rank.poll() for rank in ranks):
        for rank in ranks:
            rank.kill()
    time.sleep(0.01)
sys.exit(max(abs(rank.returncode) for rank in ranks))
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo localhost; else echo "$@" >> requeued; fi
"""


@pytest.fixture
def sbatch(tmp_path: Path) -> Callable[..., "subprocess.Popen[str]"]:
    """Start the script as Slurm would, with two ranks."""
    (script,) = [block.text for block in blocks(ROOT / "docs" / "scaling.md") if "--signal=TERM" in block.text]
    (tmp_path / "train.sh").write_text(script)
    for name, text in (("bin/srun", SRUN), ("bin/scontrol", SCONTROL), ("venv/bin/activate", "")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NTASKS": "2", "SLURM_CPUS_PER_TASK": "1", "SLURM_JOB_NODELIST": "a"}
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, **job, "PATH": path, "PYTHONPATH": str(ROOT), "VENV": str(tmp_path / "venv")}
    return lambda *arguments: subprocess.Popen(
        ["bash", "train.sh", *map(str, arguments)],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
    )  # fmt: skip


@pytest.mark.slow
def test_requeued_job_is_bit_equal_to_an_uninterrupted_one(
    sbatch: Callable[..., "subprocess.Popen[str]"], data_folder: Path, tmp_path: Path
) -> None:
    config = tiny(max_steps=400, save_every=1000, eval_every=100, log_every=5)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    run, straight = tmp_path / "run", tmp_path / "straight"
    options = (data_folder, "--config", "tiny.yaml")
    job = sbatch(run, *options)
    wait_until(lambda: num_lines(run) >= 2, job)
    for rank in (tmp_path / "ranks").read_text().split():
        os.kill(int(rank), signal.SIGTERM)
    out, _ = job.communicate(timeout=180)
    assert (job.returncode, status(run)) == (0, "stopped"), out
    assert (tmp_path / "requeued").read_text() == f"requeue {os.getpid()}\n"
    for folder in (run, straight):
        job = sbatch(folder, *options)
        out, _ = job.communicate(timeout=180)
        assert (job.returncode, status(folder)) == (0, "done"), out
    assert_same_run(straight, run)
    job = sbatch(run, "missing")
    assert (job.wait(timeout=180), status(run)) == (1, "wrong_input")
