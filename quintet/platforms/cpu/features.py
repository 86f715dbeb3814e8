"""What processor this is, and how many of its cores are ours to use."""

import functools
import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


@functools.cache
def describe() -> str:
    """The instruction set that matters here, as the extension reads it from the processor."""
    try:
        from quintet import _cpu
    except ImportError:
        return "instruction set unknown (the compiled extension is not there; torch works without it)"
    return f"instruction set {_cpu.isa()}"


def threads(cgroup: Path = CGROUP) -> int:
    """Cores that this process may run on, within a container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(cgroup)
    return max(1, min(allowed, math.ceil(quota))) if quota else allowed


def _quota(cgroup: Path) -> float | None:
    """Cores' worth of time that the cgroup grants, or None where it grants all."""
    try:
        limit, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if limit == "max" else int(limit) / int(period)
