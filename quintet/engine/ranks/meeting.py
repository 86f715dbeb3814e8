"""Where the ranks of a model meet, and what they settle before it is loaded."""

import contextlib
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import msgspec

from quintet.config import EngineConfig
from quintet.engine.engine import Engine
from quintet.engine.memory import MemoryPlan
from quintet.engine.ranks.launched import EXTERNAL, Launched, Mirrored, place_of, settled
from quintet.engine.ranks.leader import Leader
from quintet.engine.ranks.nodes import check_alike, on_this_machine, one_machine
from quintet.engine.ranks.processes import Processes
from quintet.engine.ranks.rays import BACKEND, Actors
from quintet.engine.runner import Others, Ranks
from quintet.engine.worker import Worker
from quintet.platforms.interface import Capabilities, Channel, DeviceLost
from quintet.types import Place

__all__ = [
    "Meeting", "check_alike", "check_engines", "closing", "described", "kind_of", "least_of_all", "ranks_of", "settled",
    "started",
]  # fmt: skip


class Meeting(NamedTuple):
    """Which rank this process is, and whom it has started."""

    place: Place
    others: Processes | Launched | Actors | None = None


def check_engines(config: EngineConfig, facts: Capabilities) -> None:
    """ValueError where several engines cannot share the machine."""
    if config.nnodes > 1 and not facts.processes:
        raise ValueError(one_machine(config))
    if config.data_parallel_size == 1:
        return
    if not facts.processes:
        raise ValueError(
            "data_parallel_size must be 1 on this platform, where engines do not share devices out among themselves; "
            "start a server for each group of devices, and a balancer before them"
        )
    if config.profiler_config.profiler is not None:
        raise ValueError("profiler_config: a trace is of one engine; leave it out, or data_parallel_size")


def started(config: EngineConfig, facts: Capabilities, size: int) -> Meeting:
    """This process is rank 0, and starts the others that are this machine's; or somebody else has started all."""
    if config.distributed_executor_backend == EXTERNAL:
        return Meeting(place_of(), Launched())
    if config.distributed_executor_backend == BACKEND:
        actors = Actors(config, facts, size)
        return Meeting(actors.place, actors)
    others = on_this_machine(config, size) if config.nnodes > 1 else Processes(config, size)
    return Meeting(Place(0, size, others.endpoint), others)


@contextlib.contextmanager
def closing(others: Others | None) -> Iterator[None]:
    """No process is left of ranks that do not start; why one has not is said as of a setting."""
    try:
        yield
    except BaseException as error:
        if others is not None:
            others.close()
            if isinstance(error, DeviceLost):
                raise ValueError(f"the ranks did not start: {error}") from None
        raise


def ranks_of(
    config: EngineConfig, facts: Capabilities, meeting: Meeting | None, make: Callable[[Place], Worker]
) -> Ranks:
    """Threads of this process that meet in it, or this process's own rank."""
    if meeting is None:
        _check_threads(config, facts)
        size, endpoint = 1 if facts.spmd else config.tensor_parallel_size, f"inproc://quintet-{uuid.uuid4().hex}"
        return Ranks(size, lambda rank: make(Place(rank, size, endpoint)))
    ranks = Ranks(1, lambda _: make(meeting.place), meeting.others)
    if meeting.others is not None and ranks.channel is not None:
        meeting.others.attach(ranks.channel)
    return ranks


def kind_of(ranks: Ranks) -> type[Engine]:
    """What a rank's engine does beside its steps."""
    if ranks.channel is None or ranks.others is None:
        return Engine
    return Mirrored if isinstance(ranks.others, Launched) else Leader


def _check_threads(config: EngineConfig, facts: Capabilities) -> None:
    backend = config.distributed_executor_backend
    if backend in ("mp", BACKEND, EXTERNAL) and config.tensor_parallel_size > 1:
        what = "one process drives all devices" if facts.spmd else "ranks are threads of one process"
        raise ValueError(f"distributed_executor_backend={backend!r}: on this platform {what}; leave it out")


def described(config: EngineConfig, facts: Capabilities, ranks: Ranks) -> list[str]:
    """How several ranks run, where the platform does not say it: one whose ranks are processes does."""
    size = config.tensor_parallel_size
    if size == 1 or facts.processes:
        return []
    if facts.spmd:
        return [f"{size} devices: this process drives all of them, and the compiler adds the collectives"]
    kind = type(ranks.workers[0].comm).__name__
    return [f"{size} ranks: threads of this process; communicator: {kind}"]


def least_of_all(plan: MemoryPlan, channel: Channel) -> MemoryPlan:
    """The plan of the rank that has the fewest pages, where each knows its own."""
    mine = plan.num_pages, plan.max_model_len, plan.each, plan.num_slots
    notes = channel.exchange(msgspec.msgpack.encode(mine))
    pages, length, each, slots = min(msgspec.msgpack.decode(note, type=tuple[int, int, int, int]) for note in notes)
    return replace(plan, num_pages=pages, max_model_len=length, each=each, num_slots=slots)
