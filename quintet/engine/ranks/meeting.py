"""Where the ranks of a model meet, and what they settle before it is loaded."""

import contextlib
import secrets
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from quintet.config import EngineConfig
from quintet.engine.engine import Engine
from quintet.engine.memory import MemoryPlan
from quintet.engine.ranks.launched import EXTERNAL, Launched, Mirrored, place_of, settled
from quintet.engine.ranks.leader import Leader
from quintet.engine.ranks.nodes import by_wish, check_alike, in_processes, on_this_machine, one_machine, size_of
from quintet.engine.ranks.processes import Processes
from quintet.engine.ranks.rays import BACKEND, Actors
from quintet.engine.runner import Others, Ranks
from quintet.engine.worker import Worker
from quintet.platforms.interface import Capabilities, Channel, DeviceLost
from quintet.platforms.network.rendezvous import listening
from quintet.types import Place

__all__ = [
    "Meeting", "check_alike", "check_engines", "check_stages", "closing", "described", "in_processes", "kind_of",
    "least_of_all", "met", "ranks_of", "settled", "size_of",
]  # fmt: skip

LOOPBACK = "127.0.0.1"


class Meeting(NamedTuple):
    """Which rank this process is, and whom it has started."""

    place: Place
    others: Processes | Launched | Actors | None = None


def check_engines(config: EngineConfig, facts: Capabilities) -> None:
    """ValueError where several engines cannot share the machine."""
    if config.nnodes > 1 and not in_processes(config, facts):
        raise ValueError(one_machine(config))
    if facts.spmd and config.distributed_executor_backend in (EXTERNAL, BACKEND):
        raise ValueError(
            f"distributed_executor_backend={config.distributed_executor_backend!r}: a process holds all devices of a "
            "machine on this platform; start one on each (nnodes, node_rank, master_addr), and leave it out"
        )
    if config.engines_of_machine == 1:
        return
    if not facts.processes:
        raise ValueError(
            "data_parallel_size must be 1 on this platform, where engines do not share devices out among themselves; "
            "start a server for each group of devices, and a balancer before them"
        )
    if config.profiler_config.profiler is not None:
        raise ValueError("profiler_config: a trace is of one engine; leave it out, or data_parallel_size")


def check_stages(config: EngineConfig, platform: str, facts: Capabilities) -> None:
    """ValueError where layers cannot be shared out over stages."""
    if config.pipeline_parallel_size == 1:
        return
    if not facts.processes:
        raise ValueError(
            f"pipeline_parallel_size must be 1 on platform {platform}, whose ranks are no processes that hand on; "
            "share each layer out over its devices (tensor_parallel_size)"
        )
    if config.nnodes > 1 or config.distributed_executor_backend in (EXTERNAL, BACKEND):
        raise ValueError(
            "pipeline_parallel_size must be 1 where ranks meet over a network (nnodes, external_launcher, ray): stages "
            "hand on through shared memory; share each layer out (tensor_parallel_size)"
        )


def met(config: EngineConfig, facts: Capabilities, place: Place | None, meet: bool) -> Meeting:
    """This process's rank: `place` says it where rank 0 has started this one; without `meet`, no other is started."""
    if place is not None or not meet:
        return Meeting(place or Place(0, size_of(config, facts), stages=config.pipeline_parallel_size))
    return _started(config, facts, size_of(config, facts))


def _started(config: EngineConfig, facts: Capabilities, size: int) -> Meeting:
    """This process is rank 0, and starts the others that are this machine's; or something else has started all."""
    if config.distributed_executor_backend == EXTERNAL:
        return Meeting(place_of(config.join_timeout_seconds), Launched())
    if config.distributed_executor_backend == BACKEND:
        actors = Actors(config, facts, size)
        return Meeting(actors.place, actors)
    if by_wish(config, facts):
        return _connected(config, size)
    others = on_this_machine(config, size) if config.nnodes > 1 else Processes(config, size)
    return Meeting(Place(0, size, others.endpoint, config.pipeline_parallel_size), others)


def _connected(config: EngineConfig, size: int) -> Meeting:
    """Ranks of this machine that meet over its loopback interface, by a key that is made for them alone."""
    listener = listening(LOOPBACK, 0)
    endpoint = f"tcp://{LOOPBACK}:{listener.getsockname()[1]}?key={secrets.token_hex(32)}"
    try:
        others = Processes(config, size, endpoint=endpoint)
    except BaseException:
        listener.close()
        raise
    return Meeting(Place(0, size, f"{endpoint}&listener={listener.detach()}"), others)


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
    size, stage = config.tensor_parallel_size, ranks.workers[0].stage
    if stage.counts:
        return [f"{len(stage.counts)} stages: {', '.join(map(str, ends(stage.counts)))}"]
    if size == 1 or facts.processes:
        return []
    if facts.spmd:
        of = f" of {config.nnodes} machines" if config.nnodes > 1 else ""
        drives = "a process on each drives its own" if of else "this process drives all of them"
        return [f"{size} devices{of}: {drives}, and the compiler adds the collectives"]
    kind = type(ranks.workers[0].comm).__name__
    how = "processes of this machine" if by_wish(config, facts) else "threads of this process"
    return [f"{size} ranks: {how}; communicator: {kind}"]


def ends(counts: Sequence[int]) -> list[str]:
    """Which layers each stage has, and what beside them."""
    firsts = [sum(counts[:place]) for place in range(len(counts))]
    told = [f"layers {first} to {first + count - 1}" for first, count in zip(firsts, counts, strict=True)]
    told[0], told[-1] = f"embeddings and {told[0]}", f"{told[-1]} and the head"
    return told


def least_of_all(plan: MemoryPlan, channel: Channel) -> MemoryPlan:
    """As few pages and slots as the rank has that has the fewest, where each knows its own."""
    mine = plan.num_pages, plan.max_model_len, plan.each, plan.num_slots
    notes = channel.exchange(msgspec.msgpack.encode(mine))
    said = [msgspec.msgpack.decode(note, type=tuple[int, int, int, int]) for note in notes]
    pages, slots = min(each[0] for each in said), min(each[3] for each in said)  # stages have states, or pages
    length, each = min((each[1], each[2]) for each in said)
    return replace(plan, num_pages=pages, max_model_len=length, each=each, num_slots=slots)
