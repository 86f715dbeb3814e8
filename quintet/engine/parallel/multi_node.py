"""Ranks of several machines: starts those of this one, and checks that all were started with the same settings."""

import dataclasses
import json
import logging
import zlib
from typing import Any

import msgspec

from quintet.config import EngineConfig, read_environment
from quintet.engine.executor.worker_group import WorkerGroup
from quintet.engine.parallel.external_launcher import EXTERNAL
from quintet.engine.parallel.multiproc import CLOSED, RankProcesses
from quintet.interface.platform import Capabilities
from quintet.model_loader.weight_files import WeightFiles
from quintet.platforms import choose

logger = logging.getLogger(__name__)

# settings that may differ between machines: paths of files, and sizes of memory, of which the least counts
PER_MACHINE = frozenset({
    "model", "tokenizer", "hf_config_path", "download_dir", "compilation_cache_dir", "node_rank", "master_addr",
    "join_timeout_seconds",
    "kv_cache_memory_bytes", "num_pages", "gpu_memory_utilization", "hf_token", "profiler_config", "kv_events_config",
})  # fmt: skip
MAX_NAMED = 4  # settings that are named, where more differ


def endpoint_of(config: EngineConfig) -> str:
    """Returns the endpoint where ranks of several machines meet."""
    host = f"[{config.master_addr}]" if ":" in config.master_addr else config.master_addr
    return f"tcp://{host}:{config.master_port}"


def uses_processes(config: EngineConfig, facts: Capabilities) -> bool:
    """Returns whether ranks are processes; where one worker drives a machine's devices, only if there are several
    machines."""
    return facts.processes or (facts.multi_host and config.nnodes > 1) or wants_processes(config, facts)


def wants_processes(config: EngineConfig, facts: Capabilities) -> bool:
    """True if the settings ask for ranks as processes of this machine where they would be threads."""
    return facts.mp and config.distributed_executor_backend == "mp" and config.nnodes == 1


def num_ranks(config: EngineConfig, facts: Capabilities) -> int:
    """Returns the number of ranks of one engine, where they are processes: on an SPMD platform, of machines."""
    return config.nnodes if facts.spmd else config.tensor_parallel_size * config.pipeline_parallel_size


def local_ranks(config: EngineConfig, size: int) -> range:
    """Returns the ranks of this machine."""
    each = size // config.nnodes
    return range(config.node_rank * each, (config.node_rank + 1) * each)


def start_local_ranks(config: EngineConfig, size: int) -> RankProcesses:
    """Starts the ranks of this machine, but for this process, which is rank 0. ValueError on a machine that follows."""
    if config.node_rank:
        raise ValueError(
            f"node_rank {config.node_rank} follows machine 0, and takes no requests: start it by quintet serve "
            "--headless, with the same settings"
        )
    here = local_ranks(config, size)
    return RankProcesses(config, size, here[1:], endpoint_of(config))


def follow_rank_0(config: EngineConfig) -> int:
    """Runs the ranks of a machine other than machine 0: they follow rank 0 until they end -> the exit code, 0 if rank 0
    has closed its engine."""
    config = read_environment().apply(config)
    chosen = choose(config.device)
    chosen.configure(config)  # raises if it cannot
    if not uses_processes(config, chosen.capabilities):
        raise ValueError(single_machine_error(config))
    size = num_ranks(config, chosen.capabilities)
    here = local_ranks(config, size)
    others = RankProcesses(config, size, here, endpoint_of(config), aloud=True)
    logger.info("ranks %d to %d of %d: they follow rank 0 at %s", here[0], here[-1], size, endpoint_of(config))
    try:
        code = others.wait()
        if not code:
            logger.info("%s: the ranks of this machine end, too", CLOSED)
        return code
    except KeyboardInterrupt:
        return 130
    finally:
        others.close()


def single_machine_error(config: EngineConfig) -> str:
    return (
        f"nnodes {config.nnodes}: ranks are of one machine on this platform; start a server on each machine, and a "
        "balancer before them, or take a platform whose ranks meet over a network (docs/multi-machine.md)"
    )


def check_same_settings(config: EngineConfig, ranks: WorkerGroup, hf_config: Any, weights: WeightFiles | None) -> None:
    """Raises ValueError, on all ranks, where one was started with other settings, or has another model under its
    name."""
    channel, place = ranks.channel, ranks.workers[0].rank_info
    if channel is None or (config.nnodes == 1 and config.distributed_executor_backend != EXTERNAL):
        return
    mine = {**_checksums(config), "the model's config.json": _checksum(hf_config.to_dict())}
    mine["the model's weights"] = (
        0 if weights is None else _checksum([(f.name, f.stat().st_size) for f in weights.files()])
    )
    notes = channel.exchange(b"".join(each.to_bytes(4, "little") for each in mine.values()))
    first = notes[0]
    other = next((rank for rank, note in enumerate(notes) if note != first), None)
    if other is None:
        return
    theirs = notes[other]
    differ = [name for i, name in enumerate(mine) if first[4 * i : 4 * i + 4] != theirs[4 * i : 4 * i + 4]]
    shown = [f"{name}={getattr(config, name)!r}" if hasattr(config, name) else name for name in differ[:MAX_NAMED]]
    why = (
        f"rank {other} was started with other settings than rank 0, which must be the same: {', '.join(shown)} on rank "
        f"{place.rank}"
    )
    channel.abort(why)
    raise ValueError(why)


def _checksums(config: EngineConfig) -> dict[str, int]:
    config = dataclasses.replace(config, kv_transfer_config=config.kv_transfer_config.shared_part)
    return {
        each.name: _checksum(getattr(config, each.name))
        for each in dataclasses.fields(config)
        if each.name not in PER_MACHINE
    }


def _checksum(value: Any) -> int:
    """Returns a checksum: the same for what is written the same."""
    try:
        return zlib.crc32(msgspec.json.encode(value, order="sorted"))
    except TypeError:
        return zlib.crc32(json.dumps(value, sort_keys=True, default=str).encode())
