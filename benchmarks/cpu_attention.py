"""Our attention beside torch's on this processor: decode in GB/s of K and V, a prefill in milliseconds.

    python -m benchmarks.cpu_attention --threads 2

One layer of Qwen3-0.6B: 16 heads, 8 KV heads of 128, pages of 16, the cache in the layer's type, in int8, fp8 and int4.
Each call reads another layer's cache, and they together exceed the last-level cache, as in a step of the model. Caches
and providers take turns; the median counts.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quintet import _cpu
from quintet.interface.types import INT4, AttentionSpec, Batch, Group, StepContext
from quintet.ops import Op
from quintet.ops.attention import page_shape, to_cache_rows
from quintet.platforms.cpu.ops import attention as native_attention
from quintet.platforms.cpu.ops import torch_attention as attention

HEADS, KV_HEADS, DIM, PAGE = 16, 8, 128, 16
CACHED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": INT4}
REGISTERED = (attention, native_attention)  # importing them did it


@dataclass(frozen=True)
class Case:
    requests: int
    cached: int
    new: int
    dtype: torch.dtype
    kv_dtype: torch.dtype | None = None

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5, self.dtype, PAGE, kv_dtype=self.kv_dtype)

    def bytes(self) -> int:
        """Returns the bytes of K and V that a call reads, each counted once."""
        row = page_shape(self.spec)[-1] * self.spec.cache_dtype.itemsize
        return self.requests * (self.cached + self.new) * 2 * KV_HEADS * row


def step(case: Case) -> tuple[Tensor, StepContext]:
    length, count = case.cached + case.new, case.requests
    width = -(-length // PAGE)
    table = torch.randperm(count * width, dtype=torch.int32).reshape(count, width) + 1
    positions = torch.arange(case.cached, length, dtype=torch.int32)
    places = positions.long()
    slots = table[:, places // PAGE] * PAGE + positions % PAGE
    q = torch.randn(count * case.new, HEADS, DIM).to(case.dtype)
    group = Group(slots.flatten().int(), table, torch.full((count,), length, dtype=torch.int32))
    batch = Batch(
        token_ids=torch.zeros(len(q), dtype=torch.int32),
        positions=positions.repeat(count),
        token_to_seq=torch.arange(count, dtype=torch.int32).repeat_interleave(case.new),
        query_start_loc=torch.arange(count + 1, dtype=torch.int32) * case.new,
        logits_indices=torch.zeros(0, dtype=torch.int32),
        groups=(group,),
    )
    return q, StepContext(batch, group)


def caches(case: Case, beyond: int) -> list[Tensor]:
    """Layers' caches of more than `beyond` bytes together."""
    pages = case.requests * -(-(case.cached + case.new) // PAGE) + 1
    layers = 2 + beyond // case.bytes()
    one = to_cache_rows(torch.randn(pages, 2, KV_HEADS, PAGE, DIM), case.spec.cache_dtype)
    return [one.clone() for _ in range(layers)]


def calls(case: Case, beyond: int) -> Iterator[tuple[str, Callable[[int], object], int, int]]:
    """Yields (name, a call on the i-th layer, number of layers, bytes that a call reads)."""
    attend = Op.registry["paged_attention"].providers
    q, step_context = step(case)
    for what, cached in {"": None, **CACHED}.items():
        each = replace(case, kv_dtype=cached)
        kvs, of = caches(each, beyond), each.spec

        def call(i: int, name: str, kvs: list[Tensor] = kvs, of: AttentionSpec = of) -> object:
            return attend[name](q, kvs[i], step_context, of, None)

        for name in ("native", "torch") if cached is None else ("native",):
            yield f"{name} {what}", functools.partial(call, name=name), len(kvs), each.bytes()


def measure(case: Case, seconds: float, beyond: int) -> dict[str, tuple[float, int]]:
    """Seconds of a call, the median over layers in turn, and the bytes that it reads."""
    every = list(calls(case, beyond))
    took: dict[str, list[float]] = {what: [] for what, *_ in every}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(took[every[0][0]]) < 3:
        for what, call, layers, _ in every:
            start = time.perf_counter()
            for layer in range(layers):
                call(layer)
            took[what].append((time.perf_counter() - start) / layers)
    return {what: (statistics.median(took[what]), read) for what, _, _, read in every}


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
        for requests, context in ((1, 512), (1, 2048), (1, 8192), (16, 512), (16, 2048)):
            case = Case(requests, context - 1, 1, dtype)
            for what, (took, size) in measure(case, args.seconds, beyond).items():
                rate = size / took / 1e9
                print(
                    f"{f'decode {requests:2} x {context:4} {dtype}':32} {what:11} {took * 1e6:8.0f} us "
                    f"{rate:6.1f} GB/s, {rate / read:4.0%}", flush=True,
                )  # fmt: skip
        for what, (took, _) in measure(Case(1, 0, 512, dtype), args.seconds, beyond).items():
            print(f"{f'prefill 512 {dtype}':32} {what:11} {took * 1e3:8.2f} ms", flush=True)


if __name__ == "__main__":
    main()
