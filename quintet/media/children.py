"""Child processes that decode files of strangers: their limits, and what their ends mean."""

import os
import resource
import signal
from typing import NamedTuple

import psutil

CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGABRT, signal.SIGFPE)  # ends of a broken decoder
_LONGEST = 200  # characters of a library's error


class ChildLimits(NamedTuple):
    """Limits of what a process does next."""

    memory: int  # bytes of address space beyond what it has now
    file_bytes: int  # of each file that it writes
    cpu_seconds: int  # of processor time beyond what it has used


def set_limits(limits: ChildLimits, final: bool = False) -> None:
    """Limits the calling process. Later calls may raise the limits again, unless they are `final`."""
    used = os.times()
    values = {
        resource.RLIMIT_AS: psutil.Process().memory_info().vms + limits.memory,
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: int(used.user + used.system) + 1 + limits.cpu_seconds,
    }
    for kind, value in values.items():
        most = resource.getrlimit(kind)[1]
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(kind, (value, value if final else most))


def shown_error(error: Exception) -> str:
    """Returns a library's error as one short line that can be encoded."""
    return " ".join(str(error)[:_LONGEST].encode(errors="replace").decode().split())
