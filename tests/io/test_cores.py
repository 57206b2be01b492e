"""The number of cores is that of the process, not that of the machine."""

import os
import subprocess
import sys

import pytest

PROGRAM = "from bert_pretrain.io.cores import available_cores; print(available_cores())"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system cannot limit a process to some cores")
def test_a_process_that_is_limited_to_one_core_counts_one() -> None:
    one = {min(os.sched_getaffinity(0))}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        preexec_fn=lambda: os.sched_setaffinity(0, one), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert result.stdout == "1\n"
