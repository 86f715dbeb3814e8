"""Host memory and cores as any platform may see them: the machine's, and what a container leaves of them."""

import math
import os
import resource
from collections.abc import Collection
from pathlib import Path

import psutil

from quintet.types import Memory

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_CPUS = Path("/sys/devices/system/cpu")


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


def threads(cgroup: Path = _CGROUP, cpus: Path = _CPUS, own: Path = _OWN_CGROUP) -> int:
    """Physical cores that this process may run on, within a container's quota: a core's second thread adds little."""
    cores = physical_cores(_allowed(), cpus)
    quota = _quota(cgroup, own)
    return max(1, min(cores, math.ceil(quota))) if quota else cores


def _allowed() -> set[int]:
    """Logical processors in this process's affinity; those of a cpuset are left out of it by the system."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def physical_cores(allowed: Collection[int], cpus: Path = _CPUS) -> int:
    """Cores that these logical processors belong to; `cpus` is /sys/devices/system/cpu or laid out alike."""
    siblings = {cpu: _read(cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list") for cpu in allowed}
    if not any(siblings.values()):  # no Linux: the machine's own count
        return min(len(allowed), psutil.cpu_count(logical=False) or len(allowed))
    return len({siblings[cpu] or cpu for cpu in allowed})


def _quota(cgroup: Path, own: Path = _OWN_CGROUP) -> float | None:
    """Cores' worth of time that the cgroup or one above it grants, or None where they grant all."""
    granted = [each for folder in _cgroups(cgroup, own) if (each := _granted(folder)) is not None]
    return min(granted, default=None)


def _cgroups(cgroup: Path, own: Path) -> list[Path]:
    """This process's own and those above it; a container sees its own as the root."""
    inner = [line.split(":", 2)[2] for line in (_read(own) or "").splitlines() if line.startswith("0::/")]
    folder = cgroup / (inner[0].strip("/") if inner and ".." not in inner[0] else "")
    return [folder, *(each for each in folder.parents if each.is_relative_to(cgroup)), cgroup / "cpu"]


def _granted(folder: Path) -> float | None:
    """By version 2's file, or version 1's two."""
    text = _read(folder / "cpu.max") or " ".join(
        _read(folder / name) or "" for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    )
    try:
        limit, period = text.split()
        return None if limit in ("max", "-1") else int(limit) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
