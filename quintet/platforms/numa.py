"""The memory nodes of this machine (NUMA): which processors lie at which, and how a process stays at one.

A processor reads memory of its own node faster than another's. A rank that computes at one node, and first touches its
memory there, has it there.
"""

import contextlib
import ctypes
import logging
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from quintet.platforms.host import physical_cores

logger = logging.getLogger(__name__)

_NODES = Path("/sys/devices/system/node")
_STATUS = Path("/proc/self/status")
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # the number of the system call
_PREFERRED = 1  # MPOL_PREFERRED: there as long as there is room, then on other nodes
_MAX_NODES = 1024  # bits of a mask
_BEFORE: dict[frozenset[int], frozenset[int]] = {}  # processors of a seat -> those that its thread had before


class NumaNode(NamedTuple):
    """One that has memory which this process may use, and its processors that it may run on."""

    number: int
    cpus: frozenset[int]


class NumaShare(NamedTuple):
    """NUMA node that one of several processes runs at."""

    node: NumaNode
    place: int  # among those at this node
    ranks: int  # at this node

    def threads(self, most: int) -> int:
        """Its share of the node's cores, up to `most`."""
        return max(1, min(most, physical_cores(self.node.cpus) // self.ranks))


def nodes(cpus: Collection[int] | None = None, root: Path = _NODES, status: Path = _STATUS) -> tuple[NumaNode, ...]:
    """Nodes that this process may use, in order; none if the system lists none. Processors of a node without memory
    count to the nearest that has some. `cpus`: logical processors that it may run on; as the system says if None."""
    usable = allowed() if cpus is None else set(cpus)
    online = _numbers(_text(root / "online"))
    there = _mems_allowed(status)
    memory = _numbers(_text(root / "has_memory")) or online
    filled = [number for number in online if number in memory and (there is None or number in there)]
    found: dict[int, set[int]] = {number: set() for number in filled}
    for number in online if filled else ():
        own = set(_numbers(_text(root / f"node{number}" / "cpulist"))) & usable
        found[number if number in found else _nearest_node(root, number, online, filled)] |= own
    return tuple(NumaNode(number, frozenset(its)) for number, its in sorted(found.items()) if its)


def numa_share(place: int, processes: int, there: Sequence[NumaNode]) -> NumaShare | None:
    """Returns the seat of the `place`-th process; None below two nodes, or if nodes cannot have equally many."""
    if len(there) < 2 or processes % len(there):
        return None
    each = processes // len(there)
    return NumaShare(there[place // each], place % each, each)


def allowed() -> frozenset[int]:
    """Logical processors that this thread may run on, or might before it took a seat."""
    now = frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))
    return _BEFORE.get(now, now)


def bind_to_node(where: NumaShare) -> None:
    """This thread, and all that it starts, run at that node from now on, and take memory there."""
    before = allowed()
    try:
        os.sched_setaffinity(0, where.node.cpus)
    except OSError as error:
        logger.warning("node %d: the system does not keep this rank at its processors: %s", where.node.number, error)
        return
    if before != where.node.cpus:
        _BEFORE[where.node.cpus] = before
    prefer_memory(where.node.number)


def prefer_memory(node: int) -> bool:
    """True if the system takes this thread's memory from that node first. If it refuses, as containers often do, memory
    lies where it is first touched, which is that node as well."""
    call = _SET_MEMPOLICY.get(os.uname().machine)
    if call is None or not 0 <= node < _MAX_NODES:
        return False
    mask = (ctypes.c_ulong * (_MAX_NODES // 64))()
    mask[node // 64] = 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(call, _PREFERRED, mask, ctypes.c_ulong(_MAX_NODES))) == 0


@contextlib.contextmanager
def unbound() -> Iterator[None]:
    """Lets what this thread starts meanwhile run on all processors that it had before it took a seat."""
    seated = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset[int]()
    if seated not in _BEFORE:
        yield
        return
    os.sched_setaffinity(0, _BEFORE[seated])
    try:
        yield
    finally:
        os.sched_setaffinity(0, seated)


def _mems_allowed(status: Path) -> set[int] | None:
    """Nodes of which a cpuset grants memory; None where the system does not say."""
    lines = [line for line in _text(status).splitlines() if line.startswith("Mems_allowed_list:")]
    return set(_numbers(lines[0].partition(":")[2])) if lines else None


def _nearest_node(root: Path, number: int, online: Sequence[int], filled: Sequence[int]) -> int:
    """Returns the nearest node by the system's table of distances, with a column for each online node."""
    row = [int(each) for each in _text(root / f"node{number}" / "distance").split() if each.isdigit()]
    distances = dict(zip(online, row, strict=False))
    return min(filled, key=lambda each: (distances.get(each, 255), each))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _numbers(text: str) -> list[int]:
    """ "0-3,8" as numbers."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            found += range(int(first), int(last or first) + 1)
    return found
