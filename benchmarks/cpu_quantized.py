"""Quantized products on the CPU beside our bfloat16 ones, as shares of what the machine can read and multiply.

Weights are cycled through, so that each is read from memory and not from a cache, as in a model's step; bytes are those
of the packed weight and its scales. The best round counts: what else runs on the machine slows all of them. The most
that is multiplied is measured with the instruction that the products use; where it multiplies bytes, activations in 16
bits take two.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from benchmarks.cpu_linear import CACHES, FEW, GIGA, ROWS, choose_isa
from quintet.interface.weights import Matrix, WeightFormat
from quintet.ops import Op
from quintet.ops.registry import of_kind
from quintet.platforms.cpu import weight_layout as tiles
from quintet.platforms.cpu.ops import linear, quantized

SHAPES = ((1024, 3072), (6144, 1024), (3072, 6144), (151936, 1024))  # outputs, inputs
BYTES = ("avx2_vnni", "avx512_bf16", "amx")  # the others multiply words of 16 bits
SCHEMES = {
    "int8": WeightFormat("int8", 8, 16, 128),
    "int4": WeightFormat("int4", 4, 16, 32),
    "w8a8": WeightFormat("w8a8", 8, 8, 0),
    "w4a8": WeightFormat("w4a8", 4, 8, 32),
}


@dataclass(frozen=True)
class Row:
    """One product; seconds are of the best round, per product."""

    scheme: str
    outputs: int
    inputs: int
    tokens: int
    ours: float
    bfloat16: float
    gbs: float  # GB/s (1e9 bytes) of packed weights
    gmacs: float  # multiply-adds, in 1e9 a second
    share: float  # for few tokens of what was read just before, otherwise of what could be multiplied


@dataclass(frozen=True)
class Result:
    isa: str
    threads: int
    read_gbs: float  # the best of all
    int8_gops: float  # a multiply-add is two
    packing: dict[str, float]  # weights in bfloat16, in 1e9 a second
    rows: list[Row]


def measure(threads: int, seconds: float, schemes: Sequence[str], tokens: Sequence[int]) -> Result:
    from quintet import _cpu

    _cpu.set_threads(threads)
    torch.set_num_threads(threads)
    peak = max(_cpu.fma_peak(threads, 0.3, "int8") for _ in range(3))
    best, packing, rows = 0.0, dict.fromkeys(schemes, 0.0), []
    for outputs, inputs in SHAPES:
        weight = torch.randn(outputs, inputs).to(torch.bfloat16)
        plain = _copies([linear.pack(weight)])
        for name in schemes:
            before = time.perf_counter()
            first = quantized.pack(weight, SCHEMES[name])
            packing[name] = max(packing[name], weight.numel() / (time.perf_counter() - before) / GIGA)
            packed, size = _copies(list(first.values())), tiles.packed_bytes(weight.shape, SCHEMES[name])
            for count in tokens:
                x = torch.randn(count, inputs).to(torch.bfloat16)
                read = _cpu.read_bandwidth(1 << 28, threads, 0.1)  # a virtual machine's share changes by the second
                best = max(best, read)
                ours, theirs = alternate(x, packed, plain, name, outputs, seconds)
                gbs, gmacs = size / ours / GIGA, count * outputs * inputs / ours / GIGA
                most = peak / 2 / (2 if SCHEMES[name].activations == 16 and _cpu.chosen_isa() in BYTES else 1)
                share = gbs / read if count <= FEW else gmacs / most
                rows.append(Row(name, outputs, inputs, count, ours, theirs, gbs, gmacs, share))
                print(
                    f"{name:5} N {outputs:6} K {inputs:4} M {count:3}  {ours * 1e6:9.1f} us, "
                    f"bfloat16 {theirs * 1e6:9.1f} us ({theirs / ours:4.2f}x)  "
                    f"{gbs:6.1f} GB/s {gmacs:7.1f} GMAC/s  {share:4.0%}",
                    flush=True,
                )
    return Result(_cpu.chosen_isa(), threads, best, peak, packing, rows)


def _copies(tensors: list[Tensor]) -> list[list[Tensor]]:
    """As many as no cache holds."""
    from quintet import _cpu

    cache, size = _cpu.last_level_cache_bytes() or 1 << 25, sum(tensor.nbytes for tensor in tensors)
    return [tensors, *([tensor.clone() for tensor in tensors] for _ in range(CACHES * cache // size))]


def alternate(
    x: Tensor, packed: list[list[Tensor]], plain: list[list[Tensor]], name: str, outputs: int, seconds: float
) -> tuple[float, float]:
    """The shortest time per product of each, over so many seconds and at least three rounds."""
    fmt, dense = SCHEMES[name], Op.registry["linear"].providers["native"]
    native = Op.registry[of_kind("linear", fmt.kind)].providers["native"]
    best, start, rounds = [float("inf")] * 2, time.perf_counter(), 0
    most = max(1, 400 // len(x))  # weights in a round: those of many rows need no more to leave the caches
    packed, plain = packed[:most], plain[:most]
    calls: tuple[tuple[int, Callable[[], object]], ...] = (
        (len(packed), lambda: [native(x, Matrix(*weight, format=fmt), None, (outputs,)) for weight in packed]),
        (len(plain), lambda: [dense(x, Matrix(*weight), None, (outputs,)) for weight in plain]),
    )
    while rounds < 3 or time.perf_counter() - start < seconds:
        for i, (count, call) in enumerate(calls):
            before = time.perf_counter()
            call()
            best[i] = min(best[i], (time.perf_counter() - before) / count)
        rounds += 1
    return best[0], best[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each product")
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=list(SCHEMES))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--isa", help="a lower instruction set than the processor's best")
    parser.add_argument("--json", help="a file for the figures")
    args = parser.parse_args()
    choose_isa(args.isa)
    with torch.inference_mode():
        result = measure(args.threads, args.seconds, args.schemes, args.tokens)
    packing = ", ".join(f"{name} {rate:.2f}" for name, rate in result.packing.items())
    print(f"{result.isa}, {result.threads} threads: {result.read_gbs:.1f} GB/s, {result.int8_gops / 2:.0f} GMAC/s")
    print(f"packed, 1e9 weights a second: {packing}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(asdict(result), file, indent=2)


if __name__ == "__main__":
    main()
