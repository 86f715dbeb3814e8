"""Scales of K and V: the checkpoint's, or computed from what a first prompt gives (calculate_kv_scales)."""

from collections.abc import Callable, Iterable

import torch

from quintet.config import EngineConfig
from quintet.engine.engine import Engine
from quintet.engine.executor.worker import Worker
from quintet.engine.executor.worker_group import WorkerGroup
from quintet.engine.request import CoreRequest
from quintet.interface.platform import Capabilities
from quintet.layers.attention import kv_scales
from quintet.layers.attention.kv_scales import KVScales
from quintet.layers.build import KVScaling
from quintet.sampling_params import SamplingParams

TOKENS = 256  # of the prompt


def kv_scaling(
    config: EngineConfig, facts: Capabilities, there: Callable[[], Iterable[str]] | None, reasons: list[str]
) -> KVScaling:
    """Returns the source of an fp8 cache's scales; e5m2 has the range of float16 and needs none, as in vLLM.

    `there`: the names of the checkpoint's tensors, if it is read.
    """
    if config.calculate_kv_scales:
        if facts.ops_only:
            raise ValueError("calculate_kv_scales: K and V cannot be looked at on this device; leave it out")
        reasons.append("scales of K and V: computed from a first prompt of random tokens, for each head")
        return KVScaling(computed=True)
    if config.kv_cache_dtype != "fp8" or there is None:
        return KVScaling()
    names = kv_scales.kv_scale_names(there())
    if names:
        reasons.append(f"scales of K and V: the checkpoint's, in {len(names)} layers")
    return KVScaling(names)


def calibrate(engine: Engine, ranks: WorkerGroup, vocab: int, longest: int) -> None:
    """Runs a prompt of random tokens, and sets every layer's scales so that twice its largest numbers fit the cache.

    What it wrote to the cache is never read: `engine` has bookkeeping of its own, which is dropped.
    """
    ranks.map_workers(_start_observing)
    drawn = torch.randint(vocab, (min(TOKENS, longest - 1),), generator=torch.Generator().manual_seed(0))
    engine.add(CoreRequest("scales of K and V", drawn.tolist(), SamplingParams(detokenize=False), (0, 0), 1))
    while engine.busy:
        failed = [delta.error for delta in engine.step() if delta.error]
        if failed:
            raise ValueError(f"calculate_kv_scales: the first prompt failed ({failed[0]}); leave it out")
    ranks.map_workers(_write_scales)


def scales_of(worker: Worker) -> bytes:
    """All scales of a worker's layers."""
    placed = [layer.assigned_tensors[name] for layer in _layers(worker) for name in sorted(layer.assigned_tensors)]
    return b"".join(worker.device.to_host(each)().float().numpy().tobytes() for each in placed)


def _layers(worker: Worker) -> list[KVScales]:
    return [module for module in worker.model.modules() if isinstance(module, KVScales)]


def _start_observing(worker: Worker) -> None:
    worker.main.allow_recorded(
        False
    )  # or only the first pieces of a prompt would be looked at, which comes in small ones
    for layer in _layers(worker):
        layer.peaks = {}


def _write_scales(worker: Worker) -> None:
    """Written over the ones that are there: recorded steps hold their addresses."""
    for layer in _layers(worker):
        dtype = worker.layouts[0].dtype
        for name, scale in layer.compute_scales(float(torch.finfo(dtype).max)).items():
            layer.assigned_tensors[name].copy_(scale)
    worker.main.allow_recorded(True)
