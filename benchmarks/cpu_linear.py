"""Our matrix products on the CPU beside torch's, as shares of what the machine can read and multiply.

Weights are cycled through, so that each is read from memory and not from a cache, as in a model's step. The two take
turns within a round, and the best round of each counts: what else runs on the machine slows both.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from quintet.interface.weights import Matrix
from quintet.ops import Op
from quintet.platforms.cpu.ops import linear

SHAPES = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024))  # Qwen3-0.6B: outputs, inputs
ROWS = (1, 4, 16, 64, 512)
FEW = 4  # rows up to which reading the weights takes most of the time
CACHES = 4  # weights hold this many times the last-level cache
GIGA = 1e9
Product = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True)
class Row:
    """One product; seconds are of the best round, per product."""

    dtype: str
    outputs: int
    inputs: int
    tokens: int
    ours: float
    torch: float
    gbs: float  # GB/s (1e9 bytes) of weights, ours
    gflops: float  # ours
    share: float  # for few tokens of what was read just before, otherwise of the type's peak


@dataclass(frozen=True)
class Result:
    isa: str
    threads: int
    read_gbs: float  # the best of all
    peaks: dict[str, float]  # GFLOP/s of each type, in the instruction that its products use
    rows: list[Row]


def measure(threads: int, seconds: float, dtypes: Sequence[torch.dtype], tokens: Sequence[int]) -> Result:
    from quintet import _cpu

    _cpu.set_threads(threads)
    torch.set_num_threads(threads)
    best, peaks = 0.0, {str(dtype): _cpu.fma_peak(threads, 1.0, _multiplied(dtype)) for dtype in dtypes}
    cache, rows = _cpu.last_level_cache_bytes() or 1 << 25, []
    for dtype in dtypes:
        for outputs, inputs in SHAPES:
            size = outputs * inputs * dtype.itemsize
            plain = [torch.randn(outputs, inputs).to(dtype) for _ in range(-(-CACHES * cache // size))]
            packed = [linear.pack(weight) for weight in plain]
            for count in tokens:
                x = torch.randn(count, inputs).to(dtype)
                read = _cpu.read_bandwidth(1 << 28, threads, 0.1)  # a virtual machine's share changes by the second
                best = max(best, read)
                ours, theirs = alternate(x, plain, packed, seconds)
                gbs, gflops = size / ours / GIGA, 2 * count * outputs * inputs / ours / GIGA
                share = gbs / read if count <= FEW else gflops / peaks[str(dtype)]
                rows.append(Row(str(dtype), outputs, inputs, count, ours, theirs, gbs, gflops, share))
                print(
                    f"{dtype!s:15} N {outputs:6} K {inputs:4} M {count:3}  {ours * 1e6:9.1f} us, "
                    f"torch {theirs * 1e6:9.1f} us ({theirs / ours:4.2f}x)  "
                    f"{gbs:6.1f} GB/s {gflops:7.1f} GFLOP/s  {share:4.0%}",
                    flush=True,
                )
    return Result(_cpu.chosen_isa(), threads, best, peaks, rows)


def _multiplied(dtype: torch.dtype) -> str:
    """float16 is widened."""
    return "bfloat16" if dtype == torch.bfloat16 else "float32"


def alternate(x: Tensor, plain: list[Tensor], packed: list[Tensor], seconds: float) -> tuple[float, float]:
    """The shortest time per product of each, over so many seconds and at least three rounds."""
    native, outputs = Op.registry["linear"].providers["native"], (plain[0].shape[0],)
    best, start, rounds = [float("inf")] * 2, time.perf_counter(), 0
    most = max(1, 400 // len(x))  # weights in a round: those of many rows need no more to leave the caches
    plain, packed = plain[:most], packed[:most]
    calls: tuple[Callable[[], object], ...] = (
        lambda: [native(x, Matrix(weight), None, outputs) for weight in packed],
        lambda: [torch.nn.functional.linear(x, weight) for weight in plain],
    )
    while rounds < 3 or time.perf_counter() - start < seconds:
        for i, call in enumerate(calls):
            call()  # the other's threads spin for some milliseconds after its last product, on our cores
            before = time.perf_counter()
            call()
            best[i] = min(best[i], (time.perf_counter() - before) / len(plain))
        rounds += 1
    return best[0], best[1]


def choose_isa(name: str | None) -> None:
    """Has kernels and ceilings use a lower instruction set."""
    if name is not None:
        from quintet import _cpu

        _cpu.choose_isa(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each product")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--isa", help="a lower instruction set than the processor's best; torch uses its own")
    parser.add_argument("--json", help="a file for the figures")
    args = parser.parse_args()
    choose_isa(args.isa)
    with torch.inference_mode():
        result = measure(args.threads, args.seconds, [getattr(torch, name) for name in args.dtypes], args.tokens)
    peaks = ", ".join(f"{dtype} {peak:.0f}" for dtype, peak in result.peaks.items())
    print(f"{result.isa}, {result.threads} threads: {result.read_gbs:.1f} GB/s; GFLOP/s: {peaks}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(asdict(result), file, indent=2)


if __name__ == "__main__":
    main()
