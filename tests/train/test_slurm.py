"""The Slurm script of docs/scaling.md, run with stand-ins for Slurm and for the program: done, requeued, failed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT, blocks

STAND_INS = {
    "bin/srun": '#!/bin/bash\nfor n in 0 1; do SLURM_PROCID=$n SLURM_LOCALID=$n "${@:2}"; done\n',
    "bin/scontrol": '#!/bin/bash\nif [ "$1" = show ]; then echo node1; else echo "$@" > requeued; fi\n',
    "venv/bin/activate": "",
    "bert_pretrain/__init__.py": "",
    "bert_pretrain/__main__.py": """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
with open("ranks", "a") as file:
    print(*map(os.environ.get, names), *sys.argv[1:], file=file)
if os.environ["OUTCOME"] != "killed":
    with open(sys.argv[sys.argv.index("--output") + 1] + "/status.json", "w") as file:
        json.dump({"status": os.environ["OUTCOME"]}, file)
""",
}


@pytest.mark.parametrize(
    ("outcome", "exit_code", "requeued"),
    [("done", 0, []), ("stopped", 0, ["requeue 40007\n"]), ("wrong_input", 1, []), ("killed", 1, [])],
)
def test_the_outcome_of_all_ranks_is_that_of_the_job(
    tmp_path: Path, outcome: str, exit_code: int, requeued: list[str]
) -> None:
    (script,) = [block.text for block in blocks(ROOT / "docs" / "scaling.md") if "--signal=TERM" in block.text]
    for name, text in {**STAND_INS, "train.sh": script, "run/status.json": '{"status": "done"}'}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "40007", "SLURM_NTASKS": "2", "SLURM_CPUS_PER_TASK": "6", "SLURM_JOB_NODELIST": "a"}
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    here = {"PATH": path, "PYTHONPATH": str(tmp_path), "VENV": str(tmp_path / "venv"), "OUTCOME": outcome}
    words = ["bash", "train.sh", "run", "data", "--config", "tiny"]
    assert subprocess.run(words, cwd=tmp_path, env={**os.environ, **job, **here}).returncode == exit_code
    call = "train --output run --data data --config tiny"
    assert (tmp_path / "ranks").read_text() == "".join(f"{n} {n} 2 node1 20007 6 {call}\n" for n in (0, 1))
    assert [file.read_text() for file in tmp_path.glob("requeued")] == requeued
