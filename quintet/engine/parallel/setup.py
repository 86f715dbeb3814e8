"""Brings the ranks of a model together, and settles what they share before it is loaded."""

import contextlib
import secrets
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
from torch import nn

from quintet.config import EngineConfig
from quintet.distributed.rendezvous import listen_on
from quintet.engine.engine import Engine
from quintet.engine.executor.engine_parts import EngineParts
from quintet.engine.executor.worker import Worker
from quintet.engine.executor.worker_group import RemoteRanks, WorkerGroup
from quintet.engine.lora.manager import LoRARole
from quintet.engine.memory_planner import MemoryPlan
from quintet.engine.parallel.external_launcher import (
    EXTERNAL,
    LaunchedRanks,
    MirroredLeader,
    rank_info_of,
    with_launcher_values,
)
from quintet.engine.parallel.leader import Leader
from quintet.engine.parallel.multi_node import (
    check_same_settings,
    num_ranks,
    single_machine_error,
    start_local_ranks,
    uses_processes,
    wants_processes,
)
from quintet.engine.parallel.multiproc import RankProcesses
from quintet.engine.parallel.ray import BACKEND, RankActors
from quintet.interface.platform import Capabilities, Channel, DeviceLost
from quintet.interface.types import RankInfo
from quintet.layers.moe.moe import MoE

__all__ = [
    "ParallelGroup",
    "check_same_settings",
    "check_engines",
    "check_stages",
    "closing_on_error",
    "describe_ranks",
    "uses_processes",
    "is_leader",
    "smallest_plan",
    "make_engine",
    "lora_role",
    "join_ranks",
    "make_workers",
    "with_launcher_values",
    "num_ranks",
]

LOOPBACK = "127.0.0.1"


class ParallelGroup(NamedTuple):
    """Rank of this process, and the ranks that it has started."""

    rank_info: RankInfo
    remote_ranks: RankProcesses | LaunchedRanks | RankActors | None = None


def check_engines(config: EngineConfig, facts: Capabilities) -> None:
    """Raises ValueError where several engines cannot share the machine."""
    if config.nnodes > 1 and not uses_processes(config, facts):
        raise ValueError(single_machine_error(config))
    if facts.spmd and config.distributed_executor_backend in (EXTERNAL, BACKEND):
        raise ValueError(
            f"distributed_executor_backend={config.distributed_executor_backend!r}: a process holds all devices of a "
            "machine on this platform; start one on each (nnodes, node_rank, master_addr), and leave it out"
        )
    if config.num_local_engines == 1:
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


def join_ranks(config: EngineConfig, facts: Capabilities, rank_info: RankInfo | None, meet: bool) -> ParallelGroup:
    """Returns this process's rank: `place`, if rank 0 has started this process; without `meet`, no other rank is
    started."""
    if rank_info is not None or not meet:
        return ParallelGroup(rank_info or RankInfo(0, num_ranks(config, facts), stages=config.pipeline_parallel_size))
    return _start_ranks(config, facts, num_ranks(config, facts))


def _start_ranks(config: EngineConfig, facts: Capabilities, size: int) -> ParallelGroup:
    """Starts the other ranks of this machine, with this process as rank 0; or takes the rank that a launcher has
    set."""
    if config.distributed_executor_backend == EXTERNAL:
        return ParallelGroup(rank_info_of(config.join_timeout_seconds), LaunchedRanks())
    if config.distributed_executor_backend == BACKEND:
        actors = RankActors(config, facts, size)
        return ParallelGroup(actors.rank_info, actors)
    if wants_processes(config, facts):
        return _start_tcp_ranks(config, size)
    others = start_local_ranks(config, size) if config.nnodes > 1 else RankProcesses(config, size)
    return ParallelGroup(RankInfo(0, size, others.endpoint, config.pipeline_parallel_size), others)


def _start_tcp_ranks(config: EngineConfig, size: int) -> ParallelGroup:
    """Starts ranks of this machine that meet over its loopback interface, by a key that is made for them alone."""
    listener = listen_on(LOOPBACK, 0)
    endpoint = f"tcp://{LOOPBACK}:{listener.getsockname()[1]}?key={secrets.token_hex(32)}"
    try:
        others = RankProcesses(config, size, endpoint=endpoint)
    except BaseException:
        listener.close()
        raise
    return ParallelGroup(RankInfo(0, size, f"{endpoint}&listener={listener.detach()}"), others)


@contextlib.contextmanager
def closing_on_error(others: RemoteRanks | None) -> Iterator[None]:
    """Closes the other ranks if they do not start; why one is lost becomes a ValueError, as of a setting."""
    try:
        yield
    except BaseException as error:
        if others is not None:
            others.close()
            if isinstance(error, DeviceLost):
                raise ValueError(f"the ranks did not start: {error}") from None
        raise


def make_workers(
    config: EngineConfig, facts: Capabilities, meeting: ParallelGroup | None, make: Callable[[RankInfo], Worker]
) -> WorkerGroup:
    """Returns ranks that are threads of this process, or this process's own rank."""
    if meeting is None:
        _check_threads(config, facts)
        size, endpoint = 1 if facts.spmd else config.tensor_parallel_size, f"inproc://quintet-{uuid.uuid4().hex}"
        return WorkerGroup(size, lambda rank: make(RankInfo(rank, size, endpoint)))
    ranks = WorkerGroup(1, lambda _: make(meeting.rank_info), meeting.remote_ranks)
    if meeting.remote_ranks is not None and ranks.channel is not None:
        meeting.remote_ranks.set_channel(ranks.channel)
    return ranks


def is_leader(ranks: WorkerGroup) -> bool:
    """Returns whether this process gets the caller's requests; other ranks get them from rank 0."""
    return ranks.channel is None or ranks.remote_ranks is not None


def lora_role(ranks: WorkerGroup) -> LoRARole:
    """Returns how the adapters in this process's memory are chosen."""
    if ranks.channel is None:
        return LoRARole.ALONE
    if not is_leader(ranks):
        return LoRARole.FOLLOWS
    return LoRARole.MIRRORS if isinstance(ranks.remote_ranks, LaunchedRanks) else LoRARole.LEADS


def make_engine(parts: EngineParts, ranks: WorkerGroup) -> Engine:
    """Returns the engine of a rank."""
    if ranks.channel is None or not is_leader(ranks):
        return Engine(parts)
    kind = MirroredLeader if isinstance(ranks.remote_ranks, LaunchedRanks) else Leader
    return kind(parts, ranks.channel)


def _check_threads(config: EngineConfig, facts: Capabilities) -> None:
    backend = config.distributed_executor_backend
    if backend in ("mp", BACKEND, EXTERNAL) and config.tensor_parallel_size > 1:
        what = "one process drives all devices" if facts.spmd else "ranks are threads of one process"
        raise ValueError(f"distributed_executor_backend={backend!r}: on this platform {what}; leave it out")


def describe_ranks(config: EngineConfig, facts: Capabilities, ranks: WorkerGroup) -> list[str]:
    """Describes how several ranks run, where the platform does not: one with rank processes does."""
    size, stage = config.tensor_parallel_size, ranks.workers[0].stage
    if stage.counts:
        return [f"{len(stage.counts)} stages: {', '.join(map(str, describe_stages(stage.counts)))}"]
    if size == 1:
        return []
    rounding = describe_rounding(ranks.workers[0].model)
    if facts.processes:
        return rounding
    if facts.spmd:
        of = f" of {config.nnodes} machines" if config.nnodes > 1 else ""
        drives = "a process on each drives its own" if of else "this process drives all of them"
        return [f"{size} devices{of}: {drives}, and the compiler adds the collectives", *rounding]
    kind = type(ranks.workers[0].comm).__name__
    how = "processes of this machine" if wants_processes(config, facts) else "threads of this process"
    return [f"{size} ranks: {how}; communicator: {kind}", *rounding]


def describe_rounding(model: nn.Module) -> list[str]:
    """Describes whether ranks give the tokens of one process."""
    if not any(isinstance(each, MoE) or getattr(each, "sums_over_ranks", False) for each in model.modules()):
        return ["ranks: tokens are those of one process, to the bit"]
    return ["ranks: sums round in another order than in one process, and tokens that are nearly as likely may differ"]


def describe_stages(counts: Sequence[int]) -> list[str]:
    """Returns the layers of each stage, and what it has beside them, in words."""
    firsts = [sum(counts[:place]) for place in range(len(counts))]
    stages = [f"layers {first} to {first + count - 1}" for first, count in zip(firsts, counts, strict=True)]
    stages[0], stages[-1] = f"embeddings and {stages[0]}", f"{stages[-1]} and the head"
    return stages


def smallest_plan(plan: MemoryPlan, channel: Channel) -> MemoryPlan:
    """Returns the plan with the fewest pages and slots of all ranks, where each knows its own."""
    mine = plan.num_pages, plan.max_model_len, plan.budget_share, plan.num_slots
    notes = channel.exchange(msgspec.msgpack.encode(mine))
    plans = [msgspec.msgpack.decode(note, type=tuple[int, int, int, int]) for note in notes]
    pages, slots = min(each[0] for each in plans), min(each[3] for each in plans)  # stages have states, or pages
    length, each = min((each[1], each[2]) for each in plans)
    return replace(plan, num_pages=pages, max_model_len=length, budget_share=each, num_slots=slots)
