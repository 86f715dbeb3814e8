"""NUMA binding of CPU ranks: the memory node of each rank, and its threads."""

from collections.abc import Sequence

from quintet.config import AUTO, EngineConfig, read_environment
from quintet.platforms.host import physical_cores
from quintet.platforms.numa import NumaNode, NumaShare, allowed, nodes, numa_share


def num_ranks(config: EngineConfig) -> int:
    """Processes that share this machine."""
    return (
        max(1, config.tensor_parallel_size // config.nnodes) * config.pipeline_parallel_size * config.num_local_engines
    )


def engine_index(config: EngineConfig) -> int:
    """Returns the number of an engine among those of the machine."""
    return ((config.data_parallel_rank or 0) - config.data_parallel_start_rank) % config.num_local_engines


def resolve_tensor_parallel_size(config: EngineConfig, most: int) -> tuple[EngineConfig, list[str]]:
    """Resolves tensor_parallel_size=auto: one rank for each memory node that this process may use, `most` at most.
    Several engines, and their pipeline stages, share the nodes."""
    if config.tensor_parallel_size != AUTO:
        return config, []
    there = nodes()
    ranks = max(1, min(most, len(there) // (config.num_local_engines * config.pipeline_parallel_size)))
    why = f"of which this process may use {format_nodes(there)}" if there else "and the system names none"
    engines = f" for {config.num_local_engines} engines" if config.num_local_engines > 1 else ""
    reason = f"tensor_parallel_size={ranks}: auto, a rank for each NUMA node{engines}, {why}"
    return config.replace(tensor_parallel_size=ranks), [reason]


def format_nodes(there: Sequence[NumaNode]) -> str:
    """Formats nodes for messages."""
    return ", ".join(f"node {each.number} ({len(each.cpus)} processors)" for each in there)


def numa_share_of(config: EngineConfig, place: int) -> NumaShare | None:
    """The node of one of all ranks; None: the system moves it."""
    return numa_share(place, num_ranks(config), nodes()) if read_environment().cpu_bind else None


def describe_binding(config: EngineConfig) -> str:
    """Describes the ranks' nodes; empty if the system moves the ranks."""
    return "" if numa_share_of(config, 0) is None else f"; each stays at one of the NUMA nodes {format_nodes(nodes())}"


def threads_at(where: NumaShare, config: EngineConfig, granted: int) -> int:
    """Returns a rank's threads: its share of the node's cores, unless fewer were granted to all ranks together."""
    cores = physical_cores(allowed())
    return where.threads(max(1, granted // num_ranks(config)) if granted < cores else cores)
