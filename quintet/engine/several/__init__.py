"""Several engines of one model, each a process of its own with its share of the machine: data parallelism."""

from quintet.config import EngineConfig


def num_engines(size: int, rank: int | None) -> int:
    """That are started here: one alone where its number is given, and somebody else starts the others."""
    return size if rank is None else 1


def each_engine(config: EngineConfig) -> list[EngineConfig]:
    """The settings of each engine that is started here: they differ in its number."""
    if num_engines(config.data_parallel_size, config.data_parallel_rank) == 1:
        return [config]
    return [config.replace(data_parallel_rank=number) for number in range(config.data_parallel_size)]
