"""Several machines' devices as one mesh: their processes meet, and start JAX's runtime together.

Nothing here imports torchax: that computes something, and JAX's runtime has to know of the others before it does.
"""

import atexit
import contextlib
import hmac
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from quintet import __version__
from quintet.common.processes import DEVICE_CALL
from quintet.distributed.exchange import MessageExchange, RankLost
from quintet.distributed.messages import RankMessages
from quintet.distributed.rendezvous import RendezvousTerms, join, key_of, parse_endpoint
from quintet.interface.platform import Device, DeviceLost, SingleRank, State
from quintet.interface.types import Layout, Memory, RankInfo
from quintet.platforms.tpu.facts import TPUFacts

logger = logging.getLogger(__name__)

T = TypeVar("T")

NEVER = 10**6  # seconds without a sign of life until JAX ends the process: the channel sees it, and says who is lost
LEAVE = 10.0  # seconds for the other processes to end before this one, which has JAX's coordinator, takes it away
LOOK = 0.5  # seconds between two looks at whether a rank is gone


class PendingDevice(Device):
    """A device that is there when its machine has met the others."""

    opened: Device | None = None

    @property
    def _there(self) -> Device:
        assert self.opened is not None, "connect() opens it"
        return self.opened

    def memory(self) -> Memory:
        return self._there.memory()

    def allocate(self, layouts: Sequence[Layout], units: int) -> State:
        return self._there.allocate(layouts, units)

    def to_device(self, arrays: Sequence[np.ndarray[Any, Any]]) -> tuple[Tensor, ...]:
        return self._there.to_device(arrays)

    def to_host(self, x: Tensor) -> Callable[[], Tensor]:
        return self._there.to_host(x)


class MultiHostCommunicator(SingleRank):
    """Size 1: the compiler adds the collectives. The channel is to the other machines' processes."""

    def __init__(self, notes: MessageExchange, channel: RankMessages) -> None:
        self.channel: RankMessages = channel
        self._notes = notes

    def wait_for(self, call: Callable[[], T]) -> T:
        """Returns the call's result. DeviceLost if a rank is lost meanwhile: its data never comes, and nothing ends the
        call. A RuntimeError of the call stops all ranks: it is not known how the step ended on the others."""
        found: list[T | BaseException] = []
        done = threading.Event()

        def run() -> None:
            try:
                found.append(call())
            except BaseException as error:
                found.append(error)
            done.set()

        threading.Thread(target=run, name=DEVICE_CALL, daemon=True).start()
        while not done.wait(LOOK):
            if self.channel.aborted:
                raise DeviceLost(self.channel.aborted)
        (result,) = found
        if not isinstance(result, BaseException):
            return result
        if not isinstance(result, RuntimeError):
            raise result
        self.channel.abort(f"a step failed on one of several machines: {type(result).__name__}: {result}")
        raise DeviceLost(self.channel.aborted) from result

    def leave(self) -> None:
        """For the end of this process. JAX ends processes that lose its coordinator, with code 134: those go first."""
        self.channel.abort("a rank's process ends")
        self._notes.wait_until_gone(LEAVE)


def start_multi_host(rank_info: RankInfo, found: TPUFacts, terms: RendezvousTerms) -> MultiHostCommunicator:
    """Meets the others, and starts JAX's runtime of all; blocks until all have come. ValueError if it fails."""
    _check_unused()
    key = key_of(rank_info.endpoint)
    alike = {"quintet": __version__, "accelerator": found.detail}
    met, seconds = join(rank_info, key, alike, terms), terms.seconds
    notes, seal = (
        MessageExchange(met.sockets, rank_info.rank, seconds),
        hmac.digest(key, b"notes" + met.session, "sha256"),
    )
    channel = RankMessages(notes, rank_info, met.connections, seal, seconds, RankLost)
    _start(rank_info, channel, terms)
    made = MultiHostCommunicator(notes, channel)
    if rank_info.rank == 0:
        atexit.register(made.leave)  # before what JAX has registered
    return made


def _check_unused() -> None:
    import jax

    if jax.distributed.is_initialized():
        raise ValueError("nnodes: this process has run a model on several machines already; start another for this one")


def _start(rank_info: RankInfo, channel: RankMessages, terms: RendezvousTerms) -> None:
    """JAX's coordinator is where rank 0 is, on a port that is free there; the channel tells the others which."""
    import jax

    host, _, _ = parse_endpoint(rank_info.endpoint)
    port = channel.exchange(_free_port(host).to_bytes(2, "big") if rank_info.rank == 0 else b"")[0]
    address = f"{f'[{host}]' if ':' in host else host}:{int.from_bytes(port, 'big')}"
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would heed SIGTERM in the place of the server
    jax.config.update("jax_enable_recoverability", True)  # or a rank that is lost ends this process, before it says so
    try:
        jax.distributed.initialize(
            address,
            rank_info.size,
            rank_info.rank,
            cluster_detection_method="deactivate",
            coordinator_bind_address=address,
            initialization_timeout=int(terms.start),
            heartbeat_timeout_seconds=NEVER,
            shutdown_timeout_seconds=int(LEAVE),
        )
    except RuntimeError as error:
        why = f"rank {rank_info.rank} of {rank_info.size}: JAX's runtime of all machines does not start: {error}"
        channel.abort(why)
        raise ValueError(why) from None


def _free_port(host: str) -> int:
    with contextlib.closing(socket.create_server((host, 0), family=_family(host))) as made:
        return int(made.getsockname()[1])


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]


def devices_of_all(devices: Sequence[Any], each: int) -> list[Any]:
    """Returns so many devices of every process, in the same order on all. ValueError if a process has fewer."""
    own: dict[int, list[Any]] = {}
    for device in sorted(devices, key=lambda one: (one.process_index, one.id)):
        own.setdefault(device.process_index, []).append(device)
    for process, here in own.items():
        if len(here) < each:
            raise ValueError(
                f"nnodes: process {process} has {len(here)} devices, where tensor_parallel_size wants {each} of each"
            )
    return [device for here in own.values() for device in here[:each]]
