"""Host memory and cores as any platform may see them: the machine's, and what a container leaves of them."""

import math
import os
import resource
from pathlib import Path

import psutil

from quintet.types import Memory

_CGROUP = Path("/sys/fs/cgroup")


def host_memory(cgroup: Path = _CGROUP) -> Memory:
    """Bytes; the tighter of the machine and the cgroup counts. The peak is this process's."""
    machine = psutil.virtual_memory()
    free, total = machine.available, machine.total
    limit = _cgroup_limit(cgroup)
    if limit is not None and limit < total:
        total = limit
        free = min(free, max(0, limit - _cgroup_used(cgroup)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Memory(free, total, peak)


def _cgroup_limit(cgroup: Path) -> int | None:
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # version 2, version 1
        value = _read(cgroup / name)
        if value is not None and value != "max":
            return int(value)
    return None


def _cgroup_used(cgroup: Path) -> int:
    """What the kernel could not take back at once: file pages that nobody uses do not count."""
    for used, stat in (("memory.current", "memory.stat"), ("memory/memory.usage_in_bytes", "memory/memory.stat")):
        value = _read(cgroup / used)
        if value is not None:
            lines = (line.split() for line in (_read(cgroup / stat) or "").splitlines())
            idle = next((int(n) for key, n in lines if key in ("inactive_file", "total_inactive_file")), 0)
            return int(value) - idle
    return 0


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def threads(cgroup: Path = _CGROUP) -> int:
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
