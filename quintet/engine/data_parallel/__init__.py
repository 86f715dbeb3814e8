"""Data parallelism: several engines behind one LLM."""

from quintet.config import EngineConfig


def local_engine_ranks(config: EngineConfig) -> range:
    """Returns the numbers of the engines that are started here: one where its number is given, else those of this
    machine. Other commands start the others."""
    first, count = config.data_parallel_rank, 1
    if first is None:
        first, count = config.data_parallel_start_rank, config.num_local_engines
    return range(first, first + count)


def local_engine_configs(config: EngineConfig) -> list[EngineConfig]:
    """Returns the settings of each engine that is started here: they differ in its number."""
    if config.data_parallel_size == 1:
        return [config]
    # data_parallel_hybrid_lb applies to several engines
    return [
        config.replace(data_parallel_rank=number, data_parallel_hybrid_lb=False)
        for number in local_engine_ranks(config)
    ]
