"""What the CPU can do."""

import functools
from pathlib import Path

owns_process = False
"""Whether the process is a command of ours, whose allocator and compiler may be set for good; a notebook's may not."""


@functools.cache
def cpu_bf16_feature(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Return which instructions for bf16 products the CPU has, or None; unknown outside Linux on x86."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    flags = next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())
    return next((feature for feature in ("amx_bf16", "avx512_bf16") if feature in flags), None)
