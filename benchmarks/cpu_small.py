"""Times the CPU kernels between matrix products and attention, beside torch's functions and a copy of the bytes.

They take turns within a round, and the best round of each counts: what else runs on the machine slows all. A model's
step calls each kernel on what the call before has just written, so everything is in the caches that it fits in.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from quintet.interface.types import HeadNorms
from quintet.ops import Op
from quintet.platforms.cpu.ops import elementwise as native_elementwise
from quintet.platforms.cpu.ops import embedding as native_embedding
from quintet.platforms.cpu.ops import norm as native_norm
from quintet.platforms.cpu.ops import rotary as native_rotary
from quintet.platforms.cpu.ops import torch_ops as _torchs  # noqa: F401  registers its providers

HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB, LAYERS = 1024, 3072, 16, 8, 128, 151936, 28  # Qwen3-0.6B
POSITIONS = 4096
TOKENS = (1, 16, 512)
MICRO = 1e6
Call = tuple[str, tuple[Any, ...], int]  # op, arguments, bytes read and written


@dataclass(frozen=True)
class Row:
    """One op; microseconds of the best round, per call."""

    dtype: str
    tokens: int
    op: str
    other: str  # the provider beside ours: the platform's, where ours is not compiled
    ours: float
    others: float
    copy: float  # of as many bytes as are read and written
    replayed: float  # ours without Python, as a recorded step runs it


def calls(tokens: int, dtype: torch.dtype) -> Iterator[Call]:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    size = dtype.itemsize
    x, y, weight, ids = drawn(tokens, HIDDEN), drawn(tokens, HIDDEN), drawn(HIDDEN), torch.arange(tokens).int() * 97
    fused = drawn(tokens, (HEADS + 2 * KV_HEADS) * DIM)
    q, k, _ = (
        part.reshape(tokens, -1, DIM) for part in fused.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=-1)
    )
    angles = torch.arange(POSITIONS)[:, None] * torch.linspace(0, 1, DIM // 2)
    table, positions = torch.cat([angles.cos(), angles.sin()], -1), torch.arange(tokens).int()
    norms, gate_up, hidden = HeadNorms(drawn(DIM), drawn(DIM), 1e-6, 0.0), drawn(tokens, 2 * INNER), x.nbytes
    yield "embedding", (ids, drawn(VOCAB, HIDDEN), 0, False), 2 * hidden
    yield "rms_norm", (x, weight, 1e-6, 0.0), 2 * hidden
    yield "add_rms_norm", (x, y, weight, 1e-6, 0.0), 4 * hidden
    yield "layer_norm", (x, weight, weight, 1e-5), 2 * hidden
    yield "rotary", (q, k, table, positions), 2 * tokens * (HEADS + KV_HEADS) * DIM * size
    yield "norm_rotary", (q, k, norms, table, positions), 2 * tokens * (HEADS + KV_HEADS) * DIM * size
    yield "gated", (gate_up, "silu"), 3 * tokens * INNER * size
    yield "gated", (gate_up, "gelu_pytorch_tanh"), 3 * tokens * INNER * size
    yield "activate", (gate_up, "gelu"), 2 * gate_up.nbytes
    yield "add", (x.clone(), y), 3 * hidden
    yield "scale", (x.clone(), 1.0), 2 * hidden
    yield "softcap", (x.clone(), 30.0), 2 * hidden


def measure(threads: int, seconds: float, dtypes: Sequence[torch.dtype], tokens: Sequence[int]) -> list[Row]:
    from quintet import _cpu

    _cpu.set_threads(threads)
    torch.set_num_threads(threads)
    rows = []
    for dtype in dtypes:
        for count in tokens:
            for op, args, size in calls(count, dtype):
                rows.append(_row(dtype, count, (op, args, size), seconds))
                row = rows[-1]
                name = " ".join([op, *(a for a in args if isinstance(a, str))])
                print(
                    f"{row.dtype:15} T {count:3}  {name:24} {row.ours:8.1f} us, replayed {row.replayed:8.1f}; "
                    f"{row.other} {row.others:8.1f} ({row.others / row.ours:5.1f}x); copy {row.copy:7.1f} "
                    f"({row.copy / row.replayed:4.0%} of ours)",
                    flush=True,
                )
    return rows


def _row(dtype: torch.dtype, tokens: int, call: Call, seconds: float) -> Row:
    from quintet import _cpu

    op, args, size = call
    providers = Op.registry[op].providers
    other = "torch" if "torch" in providers else "reference"
    source, target, graph = (
        torch.ones(size // 2, dtype=torch.uint8),
        torch.ones(size // 2, dtype=torch.uint8),
        _cpu.Graph(),
    )
    graph.begin()
    kept = providers["native"](*args)  # noqa: F841  the graph writes there
    graph.end()
    ours, others, copy, replayed = alternate(
        (
            lambda: providers["native"](*args),
            lambda: providers[other](*args),
            lambda: target.copy_(source),
            graph.run,
        ),
        seconds,
    )
    return Row(str(dtype), tokens, op, other, ours, others, copy, replayed)


def alternate(functions: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """The shortest time per call of each in microseconds, over so many seconds and at least five rounds."""
    times: list[list[float]] = [[] for _ in functions]
    start = time.perf_counter()
    while len(times[0]) < 5 or time.perf_counter() - start < seconds:
        for function, taken in zip(functions, times, strict=True):
            function()
            count, before, passed = 0, time.perf_counter(), 0.0
            while passed < 0.001:
                function()
                count, passed = count + 1, time.perf_counter() - before
            taken.append(passed / count * MICRO)
    return [min(taken) for taken in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.3, help="for each op")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--json", help="a file for the figures")
    args = parser.parse_args()
    for each in (native_elementwise, native_embedding, native_norm, native_rotary):
        if reason := each.probe():
            raise SystemExit(reason)
    with torch.inference_mode():
        rows = measure(args.threads, args.seconds, [getattr(torch, name) for name in args.dtypes], args.tokens)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump([asdict(row) for row in rows], file, indent=2)


if __name__ == "__main__":
    main()
