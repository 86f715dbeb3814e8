"""Our attention beside torch's on this processor: decode in GB/s of K and V, a prefill in milliseconds.

    python -m benchmarks.cpu_attention --threads 2

One layer of Qwen3-0.6B: 16 heads, 8 KV heads of 128, pages of 16. Each call reads another layer's cache, and they
together exceed the last-level cache, as in a step of the model. Providers take turns; the median counts.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quintet import _cpu
from quintet.ops import Op
from quintet.platforms.cpu import attention, native_attention
from quintet.types import AttentionSpec, Batch

HEADS, KV_HEADS, DIM, PAGE = 16, 8, 128, 16
PROVIDERS = ("native", "torch")
REGISTERED = (attention, native_attention)  # importing them did it


@dataclass(frozen=True)
class Case:
    requests: int
    cached: int
    new: int
    dtype: torch.dtype

    def bytes(self) -> int:
        """Of K and V that a call reads, at least once."""
        return self.requests * (self.cached + self.new) * 2 * KV_HEADS * DIM * self.dtype.itemsize


def step(case: Case) -> tuple[Tensor, Batch]:
    length, count = case.cached + case.new, case.requests
    width = -(-length // PAGE)
    table = torch.randperm(count * width, dtype=torch.int32).reshape(count, width) + 1
    positions = torch.arange(case.cached, length, dtype=torch.int32)
    places = positions.long()
    slots = table[:, places // PAGE] * PAGE + positions % PAGE
    q = torch.randn(count * case.new, HEADS, DIM).to(case.dtype)
    return q, Batch(
        token_ids=torch.zeros(len(q), dtype=torch.int32),
        positions=positions.repeat(count),
        slots=slots.flatten().int(),
        owners=torch.arange(count, dtype=torch.int32).repeat_interleave(case.new),
        starts=torch.arange(count + 1, dtype=torch.int32) * case.new,
        lengths=torch.full((count,), length, dtype=torch.int32),
        page_table=table,
        logit_rows=torch.zeros(0, dtype=torch.int32),
    )


def caches(case: Case, beyond: int) -> list[Tensor]:
    """Layers' caches of more than `beyond` bytes together."""
    pages = case.requests * -(-(case.cached + case.new) // PAGE) + 1
    layers = 2 + beyond // case.bytes()
    return [torch.randn(pages, 2, KV_HEADS, PAGE, DIM).to(case.dtype) for _ in range(layers)]


def medians(calls: dict[str, Callable[[int], object]], layers: int, seconds: float) -> dict[str, float]:
    """Seconds of a call by provider, over all layers in turn."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(took["native"]) < 3:
        for name, call in calls.items():
            start = time.perf_counter()
            for layer in range(layers):
                call(layer)
            took[name].append((time.perf_counter() - start) / layers)
    return {name: statistics.median(times) for name, times in took.items()}


def measure(case: Case, seconds: float, beyond: int) -> dict[str, float]:
    of = AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5, case.dtype, PAGE)
    q, batch = step(case)
    kvs = caches(case, beyond)
    attend = Op.registry["paged_attention"].providers
    calls = {name: lambda i, f=attend[name]: f(q, kvs[i], batch, of, None) for name in PROVIDERS}
    return medians(calls, len(kvs), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=_cpu.physical_cores())
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--isa", default=_cpu.isa())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    _cpu.set_threads(args.threads)
    _cpu.choose_isa(args.isa)
    beyond = 2 * _cpu.last_level_cache_bytes() + (1 << 26)
    read = _cpu.read_bandwidth(1 << 28, args.threads, 1.0)
    print(f"{args.isa}, {args.threads} threads; reading memory: {read:.1f} GB/s")
    for dtype in (torch.bfloat16, torch.float32):
        for requests, context in ((1, 512), (1, 2048), (16, 512), (16, 2048)):
            case = Case(requests, context - 1, 1, dtype)
            for name, took in measure(case, args.seconds, beyond).items():
                rate = case.bytes() / took / 1e9
                what = f"decode {requests:2} x {context:4} {dtype}"
                print(f"{what:32} {name:7} {took * 1e6:8.0f} us {rate:6.1f} GB/s, {rate / read:4.0%}", flush=True)
        for name, took in measure(Case(1, 0, 512, dtype), args.seconds, beyond).items():
            print(f"{f'prefill 512 {dtype}':32} {name:7} {took * 1e3:8.2f} ms", flush=True)


if __name__ == "__main__":
    main()
