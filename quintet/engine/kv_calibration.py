"""Scales of K and V that no checkpoint brings, computed from what a first prompt gives (calculate_kv_scales)."""

import torch

from quintet.engine.engine import Engine
from quintet.engine.request import Admitted
from quintet.engine.runner import Ranks
from quintet.engine.worker import Worker
from quintet.layers.kv_scales import KVScales
from quintet.sampling_params import SamplingParams

TOKENS = 256  # of the prompt


def calibrate(engine: Engine, ranks: Ranks, vocab: int, longest: int) -> None:
    """Runs a prompt of random tokens, and sets every layer's scales so that twice its largest numbers fit the cache."""
    ranks.each(_look)
    drawn = torch.randint(vocab, (min(TOKENS, longest - 1),), generator=torch.Generator().manual_seed(0))
    engine.add(Admitted("scales of K and V", drawn.tolist(), SamplingParams(detokenize=False), (0, 0), 1))
    while engine.busy:
        failed = [delta.error for delta in engine.step() if delta.error]
        if failed:
            raise ValueError(f"calculate_kv_scales: the first prompt failed ({failed[0]}); leave it out")
    ranks.each(_settle)
    engine.reset_prefix_cache()


def scales_of(worker: Worker) -> bytes:
    """All scales of a worker's layers."""
    placed = [layer.placed[name] for layer in _layers(worker) for name in sorted(layer.placed)]
    return b"".join(worker.device.to_host(each)().float().numpy().tobytes() for each in placed)


def _layers(worker: Worker) -> list[KVScales]:
    return [module for module in worker.model.modules() if isinstance(module, KVScales)]


def _look(worker: Worker) -> None:
    worker.recorded(False)  # or only the first pieces of a prompt would be looked at, which comes in small ones
    for layer in _layers(worker):
        layer.peaks = {}


def _settle(worker: Worker) -> None:
    """Written over the ones that are there: recorded steps hold their addresses."""
    for layer in _layers(worker):
        dtype = worker.layouts[0].dtype
        for name, scale in layer.found(float(torch.finfo(dtype).max)).items():
            layer.placed[name].copy_(scale)
    worker.recorded(True)
