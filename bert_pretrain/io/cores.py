"""How many cores this process may use, and which of several processes it is."""

import os


def available_cores() -> int:
    """Return the number of cores that this process may use, which `taskset` or Slurm may have limited."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_first_rank() -> bool:
    """Whether this is the only process or the first of those that `torchrun` has started."""
    return os.environ.get("RANK", "0") == "0"
