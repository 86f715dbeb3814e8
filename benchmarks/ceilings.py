"""The most that this machine can read and compute, measured now: what every other figure is a share of."""

import argparse
import json
import os
import platform as python_platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import psutil

MIB = 1 << 20
GIGA = 1e9
MIN_BUFFER = 256 * MIB
SQUARE = 1024
CACHE_MULTIPLE = 8  # a buffer this many times the last-level caches keeps what they still hold under an eighth


@dataclass(frozen=True)
class Ceilings:
    """Best rates of `threads` threads together; `note` says what is to be known before they are believed."""

    read_gbs: float  # GB/s (1e9 bytes), streaming reads of a buffer far larger than the caches
    fma_gflops: float  # GFLOP/s of float32; a multiply-add is two
    bfloat16_gflops: float  # the same, in the instruction that our products of bfloat16 use
    int8_gops: float  # and in that of our quantized products
    threads: int
    isa: str
    arch: str
    physical_cores: int
    logical_cores: int
    last_level_cache_bytes: int  # 0 when it is not known
    buffer_bytes: int
    seconds: float  # spent on each
    source: str  # "extension" or "torch"
    note: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


def measure(threads: int | None = None, seconds: float = 1.0) -> Ceilings:
    """All ceilings for `threads` threads (as many as there are physical cores by default).

    Without the compiled module the figures come from torch, are lower than the truth, and say so in `note`.
    """
    try:
        from quintet import _cpu
    except ImportError as error:
        return _measure_torch(threads, seconds, f"quintet._cpu is not built ({error})")
    threads = threads or _cpu.physical_cores()
    buffer_bytes = _buffer_bytes(_cpu.last_level_cache_bytes())
    return Ceilings(
        read_gbs=_cpu.read_bandwidth(buffer_bytes, threads, seconds),
        fma_gflops=_cpu.fma_peak(threads, seconds),
        bfloat16_gflops=_cpu.fma_peak(threads, seconds, "bfloat16"),
        int8_gops=_cpu.fma_peak(threads, seconds, "int8"),
        threads=threads,
        source="extension",
        seconds=seconds,
        buffer_bytes=buffer_bytes,
        note=_note(threads, _cpu.logical_cores()),
        **_facts(_cpu),
    )


def _facts(cpu: ModuleType) -> dict[str, Any]:
    return {
        "isa": cpu.isa(),
        "arch": cpu.arch(),
        "physical_cores": cpu.physical_cores(),
        "logical_cores": cpu.logical_cores(),
        "last_level_cache_bytes": cpu.last_level_cache_bytes(),
    }


def _note(threads: int, cores: int) -> str:
    if threads > cores:
        return f"{threads} threads share {cores} hardware threads"
    return ""


def _buffer_bytes(cache_bytes: int) -> int:
    """Far above the caches, and never more than a quarter of the memory that is free."""
    wanted = max(MIN_BUFFER, CACHE_MULTIPLE * cache_bytes)
    return max(MIB, min(wanted, psutil.virtual_memory().available // 4))


def _best(call: Callable[[], object], seconds: float) -> float:
    """The shortest time that `call` took, over `seconds` and at least three calls."""
    best, spent, calls = float("inf"), 0.0, 0
    while calls < 3 or spent < seconds:
        start = time.perf_counter()
        call()
        took = time.perf_counter() - start
        best, spent, calls = min(best, took), spent + took, calls + 1
    return best


def _measure_torch(threads: int | None, seconds: float, reason: str) -> Ceilings:
    """Stand-ins from torch: the sum of a large tensor, and a square matrix product."""
    import torch

    logical = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = threads or min(psutil.cpu_count(logical=False) or logical, logical)
    buffer_bytes = _buffer_bytes(0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        buffer = torch.ones(buffer_bytes // 4)
        read = _best(buffer.sum, seconds)
        del buffer
        square = torch.rand(SQUARE, SQUARE)
        product, half = (_best(lambda x=x: x @ x, seconds) for x in (square, square.bfloat16()))
    finally:
        torch.set_num_threads(before)
    return Ceilings(
        read_gbs=buffer_bytes / read / GIGA,
        fma_gflops=2 * SQUARE**3 / product / GIGA,
        bfloat16_gflops=2 * SQUARE**3 / half / GIGA,
        int8_gops=0.0,  # torch has no such product
        threads=threads,
        isa=torch.backends.cpu.get_cpu_capability().lower(),
        arch=python_platform.machine(),
        physical_cores=psutil.cpu_count(logical=False) or logical,
        logical_cores=logical,
        last_level_cache_bytes=0,
        buffer_bytes=buffer_bytes,
        seconds=seconds,
        source="torch",
        note="; ".join(
            filter(
                None, [f"{reason}: torch's sum and matmul stand in, below the true ceilings", _note(threads, logical)]
            )
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=None, help="threads that work together (all physical cores)")
    parser.add_argument("--seconds", type=float, default=1.0, help="time spent on each ceiling (1)")
    args = parser.parse_args()
    print(measure(args.threads, args.seconds).to_json())


if __name__ == "__main__":
    main()
