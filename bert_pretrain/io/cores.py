"""The cores and the CPU that this process may use, and which of several processes it is."""

import functools
import os
from pathlib import Path

owns_process = False
"""Whether the process is a command of ours, whose allocator and compiler may be set for good; a notebook's may not."""


def available_cores(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the number of cores that this process may use, which `taskset`, Slurm or a container may have limited."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = quota_file.read_text().split()
        return min(cores, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):  # without control groups, or `max`: no limit
        return cores


def is_first_rank() -> bool:
    """Whether this is the only process or the first of those that `torchrun` has started."""
    return os.environ.get("RANK", "0") == "0"


@functools.cache
def cpu_bf16_feature(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Return which instructions for bf16 products the CPU has, or None; unknown outside Linux on x86."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    flags = next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())
    return next((feature for feature in ("amx_bf16", "avx512_bf16") if feature in flags), None)
