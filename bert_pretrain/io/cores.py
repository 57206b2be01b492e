"""The CPU cores that this process may use, and its rank."""

import functools
import os
from pathlib import Path

owns_process = False  # True in our commands, which may configure the allocator and compiler; an import may not


def available_cores(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the number of cores that this process may use, within the limits of `taskset`, Slurm or a container."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = quota_file.read_text().split()
        return min(cores, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no control groups, or the quota is `max`
        return cores


def is_first_rank() -> bool:
    """Return whether this is the only process, or rank 0 of a process group that `torchrun` started."""
    return os.environ.get("RANK", "0") == "0"


def num_ranks() -> int:
    """Return the number of processes that `torchrun` started, 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@functools.cache
def cpu_bf16_feature(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Return the name of the CPU feature for bf16 matrix products. None without one, or if this is not Linux on x86."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    flags = next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())
    return next((feature for feature in ("amx_bf16", "avx512_bf16") if feature in flags), None)
