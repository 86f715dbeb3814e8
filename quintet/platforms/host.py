"""Host memory and cores as any platform may see them: the machine's, and what a container leaves of them."""

import math
import os
import resource
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from quintet.interface.types import Memory

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_CPUS = Path("/sys/devices/system/cpu")


def host_memory(cgroup: Path = _CGROUP, own: Path = _OWN_CGROUP) -> Memory:
    """Bytes; the tightest of the machine and the control groups above us counts. The peak is this process's."""
    machine = psutil.virtual_memory()
    free, total = machine.available, machine.total
    for folder in _cgroups(cgroup, own, "memory"):
        for version in (_VERSION_2, _VERSION_1):
            limit = _read(folder / version.limit)
            if limit is not None and limit != "max":
                total = min(total, int(limit))
                free = min(free, max(0, int(limit) - _used(folder, version)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Memory(free, total, peak)


class _Files(NamedTuple):
    """Files in which one version of control groups reports memory."""

    limit: str
    used: str
    pages: tuple[str, ...]  # of files, in memory.stat


_VERSION_2 = _Files("memory.max", "memory.current", ("inactive_file", "active_file"))
_VERSION_1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def _used(folder: Path, version: _Files) -> int:
    """Returns bytes that the kernel could not reclaim: cached pages of files do not count, such as a model's."""
    used = int(_read(folder / version.used) or 0)
    stat = (line.split() for line in (_read(folder / "memory.stat") or "").splitlines())
    return max(0, used - sum(int(size) for name, size in stat if name in version.pages))


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
    granted = [each for folder in _cgroups(cgroup, own, "cpu") if (each := _granted(folder)) is not None]
    return min(granted, default=None)


def _cgroups(cgroup: Path, own: Path, kind: str) -> list[Path]:
    """This process's own and those above it, and version 1's of that kind; a container sees its own as the root."""
    inner = [line.split(":", 2)[2] for line in (_read(own) or "").splitlines() if line.startswith("0::/")]
    folder = cgroup / (inner[0].strip("/") if inner and ".." not in inner[0] else "")
    return [folder, *(each for each in folder.parents if each.is_relative_to(cgroup)), cgroup / kind]


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


def nameless_file() -> Any:
    """An empty file for processes to share, in memory where the system has that: gone with the last of them."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("quintet-ranks", os.MFD_CLOEXEC), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)
