"""Two hosts with a slow link between them: network namespaces, whose packets this process carries.

Each has a TUN device: what is sent there comes to this process, and is given to the other one later. Nothing else is
reached from there.
"""

import contextlib
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MTU = 1500  # bytes
# bytes that wait for their turn, in each direction: what comes beyond them is dropped, as routers do
_WAITING = 1 << 18
FIRST, SECOND = "10.213.8.1", "10.213.8.2"


@dataclass(frozen=True)
class Link:
    """What a packet meets on its way."""

    delay: float = 0.02  # seconds in each direction
    rate: float = 4e6  # bytes a second in each direction
    lost: float = 0.0  # share of the packets, drawn with a seed of its own


class Hosts:
    """How a command is run on each of them; the link may be changed at any time, or cut."""

    def __init__(self, spaces: tuple[str, str], devices: tuple[int, int], link: Link) -> None:
        self.first: tuple[str, ...] = ("ip", "netns", "exec", spaces[0])
        self.second: tuple[str, ...] = ("ip", "netns", "exec", spaces[1])
        self.link, self.is_cut, self.carried, self.dropped = link, False, 0, 0
        self._devices, self._draw = devices, random.Random(0)
        self._under_way: list[tuple[float, int, int, bytes]] = []  # when it is there, number, where, packet
        self._free, self._ended = [0.0, 0.0], threading.Event()  # when each direction can take the next packet
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Whoever sends hears nothing of it."""
        self.is_cut = True

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _carry(self) -> None:
        while not self._ended.is_set():
            now = time.monotonic()
            next_one = self._under_way[0][0] - now if self._under_way else 0.1
            ready, _, _ = select.select(self._devices, (), (), min(0.1, max(0.0, next_one)))
            for device in ready:
                self._take(self._devices.index(device))
            while self._under_way and self._under_way[0][0] <= time.monotonic():
                _, _, to, packet = heapq.heappop(self._under_way)
                if not self.is_cut:
                    with contextlib.suppress(BlockingIOError):
                        os.write(self._devices[to], packet)

    def _take(self, side: int) -> None:
        """All packets that one side has sent."""
        while True:
            try:
                packet = os.read(self._devices[side], 1 << 16)
            except BlockingIOError:
                return
            now = time.monotonic()
            begins = max(now, self._free[side])
            full = (begins - now) * self.link.rate > _WAITING
            if self.is_cut or full or self._draw.random() < self.link.lost:
                self.dropped += 1
                continue
            self._free[side] = begins + len(packet) / self.link.rate
            self.carried += 1
            heapq.heappush(self._under_way, (self._free[side] + self.link.delay, self.carried, 1 - side, packet))


@contextlib.contextmanager
def two_hosts(link: Link) -> Iterator[Hosts]:
    """Skips where the system makes no namespaces or TUN devices for us."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces are root's to make")
    spaces = (f"quintet-{os.getpid()}-a", f"quintet-{os.getpid()}-b")
    with contextlib.ExitStack() as stack:
        try:
            devices = []
            for space, mine, theirs in ((spaces[0], FIRST, SECOND), (spaces[1], SECOND, FIRST)):
                stack.callback(subprocess.run, ("ip", "netns", "del", space), capture_output=True, check=False)
                ip("netns", "add", space)
                name = f"q{os.getpid() % 100000}{space[-1]}"
                devices.append(_tun(name))
                stack.callback(os.close, devices[-1])
                ip("link", "set", name, "netns", space)
                ip("-n", space, "addr", "add", mine, "peer", theirs, "dev", name)
                ip("-n", space, "link", "set", name, "mtu", str(_MTU), "up")
                ip("-n", space, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no hosts can be made here: {getattr(error, 'stderr', '') or error}")
        hosts = Hosts(spaces, (devices[0], devices[1]), link)
        stack.callback(hosts.close)
        yield hosts


def _tun(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError:
        os.close(device)
        raise
    return device


def ip(*words: str) -> str:
    return subprocess.run(("ip", *words), check=True, capture_output=True, text=True, timeout=30).stdout
