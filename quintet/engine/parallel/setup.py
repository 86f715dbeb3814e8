"""Brings the ranks of a model together, and settles what they share before it is loaded."""

import contextlib
import secrets
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from quintet.config import EngineConfig
from quintet.distributed.rendezvous import listening
from quintet.engine.engine import Engine, EngineParts
from quintet.engine.executor.worker import Worker
from quintet.engine.executor.worker_group import RemoteRanks, WorkerGroup
from quintet.engine.memory_planner import MemoryPlan
from quintet.engine.parallel.external_launcher import EXTERNAL, Launched, Mirrored, place_of, settled
from quintet.engine.parallel.leader import Leader
from quintet.engine.parallel.multi_node import by_wish, check_alike, in_processes, on_this_machine, one_machine, size_of
from quintet.engine.parallel.multiproc import Processes
from quintet.engine.parallel.ray import BACKEND, Actors
from quintet.interface.platform import Capabilities, Channel, DeviceLost
from quintet.interface.types import RankInfo

__all__ = [
    "ParallelGroup", "check_alike", "check_engines", "check_stages", "closing", "described", "in_processes", "leads",
    "least_of_all", "make_engine", "met", "ranks_of", "settled", "size_of",
]  # fmt: skip

LOOPBACK = "127.0.0.1"


class ParallelGroup(NamedTuple):
    """Rank of this process, and the ranks that it has started."""

    rank_info: RankInfo
    others: Processes | Launched | Actors | None = None


def check_engines(config: EngineConfig, facts: Capabilities) -> None:
    """Raises ValueError where several engines cannot share the machine."""
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
    """Raises ValueError where layers cannot be divided into pipeline stages."""
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


def met(config: EngineConfig, facts: Capabilities, rank_info: RankInfo | None, meet: bool) -> ParallelGroup:
    """Returns this process's rank: `place`, if rank 0 has started this process; without `meet`, no other rank is
    started."""
    if rank_info is not None or not meet:
        return ParallelGroup(rank_info or RankInfo(0, size_of(config, facts), stages=config.pipeline_parallel_size))
    return _started(config, facts, size_of(config, facts))


def _started(config: EngineConfig, facts: Capabilities, size: int) -> ParallelGroup:
    """Starts the other ranks of this machine, with this process as rank 0; or takes the rank that a launcher has
    set."""
    if config.distributed_executor_backend == EXTERNAL:
        return ParallelGroup(place_of(config.join_timeout_seconds), Launched())
    if config.distributed_executor_backend == BACKEND:
        actors = Actors(config, facts, size)
        return ParallelGroup(actors.place, actors)
    if by_wish(config, facts):
        return _connected(config, size)
    others = on_this_machine(config, size) if config.nnodes > 1 else Processes(config, size)
    return ParallelGroup(RankInfo(0, size, others.endpoint, config.pipeline_parallel_size), others)


def _connected(config: EngineConfig, size: int) -> ParallelGroup:
    """Starts ranks of this machine that meet over its loopback interface, by a key that is made for them alone."""
    listener = listening(LOOPBACK, 0)
    endpoint = f"tcp://{LOOPBACK}:{listener.getsockname()[1]}?key={secrets.token_hex(32)}"
    try:
        others = Processes(config, size, endpoint=endpoint)
    except BaseException:
        listener.close()
        raise
    return ParallelGroup(RankInfo(0, size, f"{endpoint}&listener={listener.detach()}"), others)


@contextlib.contextmanager
def closing(others: RemoteRanks | None) -> Iterator[None]:
    """Closes the other ranks if they do not start; why one is lost becomes a ValueError, as of a setting."""
    try:
        yield
    except BaseException as error:
        if others is not None:
            others.close()
            if isinstance(error, DeviceLost):
                raise ValueError(f"the ranks did not start: {error}") from None
        raise


def ranks_of(
    config: EngineConfig, facts: Capabilities, meeting: ParallelGroup | None, make: Callable[[RankInfo], Worker]
) -> WorkerGroup:
    """Returns ranks that are threads of this process, or this process's own rank."""
    if meeting is None:
        _check_threads(config, facts)
        size, endpoint = 1 if facts.spmd else config.tensor_parallel_size, f"inproc://quintet-{uuid.uuid4().hex}"
        return WorkerGroup(size, lambda rank: make(RankInfo(rank, size, endpoint)))
    ranks = WorkerGroup(1, lambda _: make(meeting.rank_info), meeting.others)
    if meeting.others is not None and ranks.channel is not None:
        meeting.others.attach(ranks.channel)
    return ranks


def leads(ranks: WorkerGroup) -> bool:
    """Returns whether this process gets the caller's requests; other ranks get them from rank 0."""
    return ranks.channel is None or ranks.others is not None


def make_engine(parts: EngineParts, ranks: WorkerGroup) -> Engine:
    """Returns the engine of a rank."""
    if ranks.channel is None or not leads(ranks):
        return Engine(parts)
    kind = Mirrored if isinstance(ranks.others, Launched) else Leader
    return kind(parts, ranks.channel)


def _check_threads(config: EngineConfig, facts: Capabilities) -> None:
    backend = config.distributed_executor_backend
    if backend in ("mp", BACKEND, EXTERNAL) and config.tensor_parallel_size > 1:
        what = "one process drives all devices" if facts.spmd else "ranks are threads of one process"
        raise ValueError(f"distributed_executor_backend={backend!r}: on this platform {what}; leave it out")


def described(config: EngineConfig, facts: Capabilities, ranks: WorkerGroup) -> list[str]:
    """Describes how several ranks run, where the platform does not: one with rank processes does."""
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
    """Returns the layers of each stage, and what it has beside them, in words."""
    firsts = [sum(counts[:place]) for place in range(len(counts))]
    told = [f"layers {first} to {first + count - 1}" for first, count in zip(firsts, counts, strict=True)]
    told[0], told[-1] = f"embeddings and {told[0]}", f"{told[-1]} and the head"
    return told


def least_of_all(plan: MemoryPlan, channel: Channel) -> MemoryPlan:
    """Returns the plan with the fewest pages and slots of all ranks, where each knows its own."""
    mine = plan.num_pages, plan.max_model_len, plan.each, plan.num_slots
    notes = channel.exchange(msgspec.msgpack.encode(mine))
    said = [msgspec.msgpack.decode(note, type=tuple[int, int, int, int]) for note in notes]
    pages, slots = min(each[0] for each in said), min(each[3] for each in said)  # stages have states, or pages
    length, each = min((each[1], each[2]) for each in said)
    return replace(plan, num_pages=pages, max_model_len=length, each=each, num_slots=slots)
