"""Low-rank adapters on the CPU beside the products that they adapt, as recorded steps run both.

There is room for eight adapters, as in an engine. Weights and adapters are cycled through, so that each is read from
memory, as in a model's step. A step of products alone and one of products, each with its adapters, take turns; the best
round of each counts.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from quintet.interface.weights import Matrix
from quintet.ops import Op
from quintet.platforms.cpu.arena import empty_weight
from quintet.platforms.cpu.ops import linear, lora

# Qwen3-0.6B: inputs, and outputs of each part
SHAPES = {
    "qkv": (1024, (2048, 1024, 1024)),
    "o": (2048, (1024,)),
    "gate_up": (1024, (3072, 3072)),
    "down": (3072, (1024,)),
}
TOKENS = (1, 16, 512)
CACHES = 4  # weights hold this many times the last-level cache
MOST_WEIGHTS = 64
ROOM = 8  # adapters in memory
MICRO = 1e6


@dataclass(frozen=True)
class Row:
    """One product; microseconds of the best round, per product."""

    dtype: str
    product: str
    tokens: int
    adapters: int  # that the tokens have in turn
    rank: int
    linear: float
    both: float  # the product and add_lora
    share: float  # of the product's time that add_lora adds
    eager: float  # add_lora called from Python with what is in the caches


def measure(threads: int, seconds: float, dtype: torch.dtype, tokens: Sequence[int], rank: int) -> list[Row]:
    from quintet import _cpu

    _cpu.set_threads(threads)
    torch.set_num_threads(threads)
    rows = []
    for name, (inputs, widths) in SHAPES.items():
        size = inputs * sum(widths) * dtype.itemsize
        copies = min(MOST_WEIGHTS, -(-CACHES * (_cpu.last_level_cache_bytes() or 1 << 25) // size))
        packed = [linear.pack(torch.randn(sum(widths), inputs).to(dtype)) for _ in range(copies)]
        pools = [_pools(inputs, widths, rank, dtype) for _ in packed]
        for count in tokens:
            for adapters in sorted({1, min(ROOM, count)}):
                rows.append(_row(name, packed, pools, (count, adapters), seconds))
                row = rows[-1]
                print(
                    f"{row.dtype:15} {row.product:8} T {row.tokens:3}  {row.adapters} adapters of rank {row.rank}: "
                    f"linear {row.linear:8.1f} us, with add_lora {row.both:8.1f} ({row.share:+6.1%}); "
                    f"from Python {row.eager:6.1f}",
                    flush=True,
                )
    return rows


def _pools(inputs: int, widths: tuple[int, ...], rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    lora_a = empty_weight((ROOM, len(widths), rank, inputs), dtype)
    return lora_a.normal_(std=inputs**-0.5), empty_weight((ROOM, rank, sum(widths)), dtype).normal_()


def _row(
    name: str, packed: list[Tensor], pools: list[tuple[Tensor, Tensor]], batch: tuple[int, int], seconds: float
) -> Row:
    """`batch`: tokens, and the adapters that they have in turn."""
    (inputs, widths), (tokens, adapters) = SHAPES[name], batch
    (_, parts, rank, _), dtype = pools[0][0].shape, pools[0][0].dtype
    x, columns = torch.randn(tokens, inputs).to(dtype), tuple(enumerate(widths))
    slots = (torch.arange(tokens) % adapters + 1).to(torch.int32)
    ranks = torch.full((ROOM, parts), rank, dtype=torch.int32)
    multiply, add = (Op.registry[op].providers["native"] for op in ("linear", "add_lora"))
    most = max(1, 400 // tokens)  # weights in a round: those of many rows need no more to leave the caches
    kept = []

    def step(with_adapters: bool) -> Any:
        from quintet import _cpu

        graph = _cpu.Graph()
        graph.begin()
        for weight, (lora_a, lora_b) in list(zip(packed, pools, strict=True))[:most]:
            y = multiply(x, Matrix(weight), None, widths)
            kept.append(add(y, x, lora_a, lora_b, ranks, slots, 0, columns) if with_adapters else y)
        graph.end()
        return graph

    y = torch.zeros(tokens, sum(widths), dtype=dtype)
    graphs = [step(False), step(True)]
    alone, both = _alternate([each.run for each in graphs], seconds)
    calls = len(kept) // 2
    (eager,) = _alternate([lambda: add(y, x, *pools[0], ranks, slots, 0, columns)], seconds / 4)
    alone, both = alone / calls, both / calls
    return Row(str(dtype), name, tokens, adapters, rank, alone, both, both / alone - 1, eager)


def _alternate(functions: Sequence[Any], seconds: float) -> list[float]:
    """The shortest time of each in microseconds, over so many seconds and at least five rounds."""
    best, start, rounds = [float("inf")] * len(functions), time.perf_counter(), 0
    while rounds < 5 or time.perf_counter() - start < seconds:
        for i, function in enumerate(functions):
            before = time.perf_counter()
            function()
            best[i] = min(best[i], time.perf_counter() - before)
        rounds += 1
    return [each * MICRO for each in best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each product")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--json", help="a file for the figures")
    args = parser.parse_args()
    if reason := lora.probe():
        raise SystemExit(reason)
    with torch.inference_mode():
        rows = measure(args.threads, args.seconds, getattr(torch, args.dtype), args.tokens, args.rank)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump([asdict(row) for row in rows], file, indent=2)


if __name__ == "__main__":
    main()
