"""Checks and completes the settings of an engine on CPUs: ranks, threads, activation bits."""

import functools
from typing import Any

import torch

from quintet.config import EngineConfig
from quintet.platforms.cpu import numa_binding as seats
from quintet.platforms.cpu.numa_binding import num_ranks
from quintet.platforms.host import threads

NO_RANKS = "ranks share memory by the compiled extension, which is not there; install a C++ compiler, and quintet anew"
MAX_RANKS = 16  # that share a model; where there are fewer cores, ranks wait for one
PROMPT_TOKENS_PER_THREAD, MIN_PROMPT_SHARE, MAX_PROMPT_SHARE = 8, 16, 256  # beside requests that decode
STARTED = {"ray": ", Ray's actors", "external_launcher": ", the launcher's"}  # ranks that are not started by us


def default_activation_bits(config: EngineConfig) -> tuple[EngineConfig, list[str]]:
    """Sets activation_bits=8 for int8 and int4: products of bytes, unless the user set activation_bits."""
    if config.quantization not in ("int8", "int4") or config.activation_bits is not None:
        return config, []
    reason = (
        f"activation_bits=8: quantization={config.quantization!r} multiplies bytes here, with activations rounded for "
        "each group of weights: prompts and batches are up to twice as fast; 16 leaves activations as they are"
    )
    return config.replace(activation_bits=8), [reason]


def default_prompt_share(config: EngineConfig) -> EngineConfig:
    """Sets prefill_tokens_beside_decode, unless the user did: so many tokens take about as long as reading the weights,
    which a step does anyway. Machines that compute together may differ, and plan alike."""
    if config.prefill_tokens_beside_decode is not None or not config.enable_chunked_prefill:
        return config
    alike = config.nnodes == 1 and config.distributed_executor_backend not in STARTED
    ranks = num_ranks(config)
    of_engine = threads_per_rank(ranks) * (ranks // config.num_local_engines) if alike else 0
    tokens = PROMPT_TOKENS_PER_THREAD * of_engine
    return config.replace(prefill_tokens_beside_decode=min(max(tokens, MIN_PROMPT_SHARE), MAX_PROMPT_SHARE))


def describe_ranks(config: EngineConfig) -> list[str]:
    """Describes how ranks and engines run here. ValueError if they cannot."""
    stages, engines, all_of_them = config.pipeline_parallel_size, config.num_local_engines, num_ranks(config)
    ranks = config.tensor_parallel_size * stages
    if ranks * engines == 1:
        return []
    asked = "tensor_parallel_size" if stages == 1 else "pipeline_parallel_size"
    if ranks > 1 and load_extension() is None:
        raise ValueError(f"{asked} must be 1: {NO_RANKS}")
    if ranks > MAX_RANKS:
        of = f" x tensor_parallel_size {ranks // stages}" if stages > 1 and ranks > stages else ""
        given = getattr(config, asked)
        raise ValueError(f"{asked} {given}{of}: at most {MAX_RANKS} ranks share a host's memory; lower it")
    share = f"with {threads_per_rank(all_of_them)} of {granted_threads()} threads"
    reasons = [f"{engines} engines: a process each, {share}, that share the requests"] if engines > 1 else []
    started = STARTED.get(config.distributed_executor_backend or "", "")
    if config.nnodes > 1 or started:
        machines = f" on {config.nnodes} machines" if config.nnodes > 1 else ""
        where = "" if started else f", that meet at {config.master_addr}:{config.master_port}"
        reasons.append(
            f"{ranks} ranks{machines}: a process each{started}, {share}{where}; communicator: TCP, sums in rank order"
        )
    elif ranks > 1:
        staged = f" in {stages} stages" if stages > 1 else ""
        reasons.append(
            f"{ranks} ranks{staged}: a process each, {share}; communicator: shared memory, sums in rank order"
        )
    reasons[-1] += seats.describe_binding(config)
    short = f"; there are fewer cores ({threads()}) than ranks, which wait for one"
    return [*reasons[:-1], reasons[-1] + (short if threads() < all_of_them else "")]


def load_extension() -> Any:
    """quintet._cpu, or None where it was not compiled."""
    try:
        from quintet import _cpu
    except ImportError:
        return None
    return _cpu if hasattr(_cpu, "limit_threads") else None


@functools.cache
def granted_threads() -> int:
    """Threads for large models: the cores that are ours, or fewer if OMP_NUM_THREADS or the caller set fewer."""
    return min(torch.get_num_threads(), threads())


def threads_per_rank(ranks: int) -> int:
    """Threads of each of so many ranks."""
    return max(1, granted_threads() // ranks)
