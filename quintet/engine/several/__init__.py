"""Several engines of one model, each a process of its own with its share of the machine: data parallelism."""

from quintet.config import EngineConfig


def here(config: EngineConfig) -> range:
    """Numbers of the engines that are started here: one where its number is given, else those of this machine. The
    others are started elsewhere."""
    first, count = config.data_parallel_rank, 1
    if first is None:
        first, count = config.data_parallel_start_rank, config.engines_of_machine
    return range(first, first + count)


def each_engine(config: EngineConfig) -> list[EngineConfig]:
    """The settings of each engine that is started here: they differ in its number."""
    if config.data_parallel_size == 1:
        return [config]
    # data_parallel_hybrid_lb is said of several
    return [config.replace(data_parallel_rank=number, data_parallel_hybrid_lb=False) for number in here(config)]
