"""A layer of experts on the CPU, at Qwen3-30B-A3B's shapes, beside its products alone and beside torch.

`plain` is our own linear() on rows that are sorted already, expert by expert: what the two products cost where nothing
is sorted, gathered, activated and added up. `torch` is a loop over the experts with index_select and index_add, in
bfloat16 where ours are quantized. They take turns, and the best round of each counts: what else runs on the machine
slows all. A form is a type of floats, or a scheme, with the size of its groups behind a dash: w4a8-g128.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn import functional

from quintet.interface.weights import PLAIN, Matrix, WeightFormat
from quintet.ops import Op
from quintet.ops.moe import expert_matrix
from quintet.platforms.cpu.ops import moe as native_moe
from quintet.platforms.cpu.ops import quantized
from quintet.platforms.cpu.ops.moe import pack_experts

HIDDEN, INNER, K = 2048, 768, 8
NUM = 128
TOKENS = (1, 4, 16, 512)
FLOATS = ("float32", "bfloat16", "float16")
FEW = 4  # tokens up to which reading the weights takes most of the time
DRAWS = 4  # choices of experts that take turns
GIGA = 1e9


@dataclass(frozen=True)
class Row:
    """One layer for so many tokens; seconds are of the best round, per layer."""

    format: str
    tokens: int
    route: float
    experts: float
    plain: float
    torch: float
    gbs: float  # GB/s (1e9 bytes) of chosen experts' weights, by `experts`
    gflops: float
    share: float  # for few tokens of what was read just before; then of what `plain` takes


@dataclass(frozen=True)
class Draw:
    """Routing of tokens to experts."""

    logits: Tensor
    weights: Tensor
    ids: Tensor
    rows: tuple[tuple[int, Tensor], ...]  # (expert, its tokens)


def drawn(tokens: int, dtype: torch.dtype) -> Draw:
    logits = torch.randn(tokens, NUM).to(dtype)
    weights, ids = Op.registry["route"].providers["native"](logits, K, True)
    owned = [(e, (ids == e).any(1).nonzero().flatten()) for e in range(NUM)]
    return Draw(logits, weights, ids, tuple((e, each) for e, each in owned if len(each)))


def measure(threads: int, seconds: float, forms: Sequence[str], tokens: Sequence[int]) -> list[Row]:
    from quintet import _cpu

    _cpu.set_threads(threads)
    torch.set_num_threads(threads)
    rows = []
    for fmt in forms:
        dtype = getattr(torch, fmt) if fmt in FLOATS else torch.bfloat16
        gate_up, down = (torch.randn(NUM, *s, dtype=dtype) * 0.02 for s in ((2 * INNER, HIDDEN), (HIDDEN, INNER)))
        layer = Layer(gate_up, down, form_of(fmt))
        for count in tokens:
            x, draws = torch.randn(count, HIDDEN).to(dtype), [drawn(count, dtype) for _ in range(DRAWS)]
            read = _cpu.read_bandwidth(1 << 28, threads, 0.2)  # a virtual machine's share changes by the second
            times = alternate((layer.route, layer.experts, layer.plain, layer.torch), x, draws, seconds)
            rows.append(_row(fmt, layer.expert_bytes, count, times, draws, read))
            print(_line(rows[-1]), flush=True)
    return rows


def form_of(name: str) -> WeightFormat:
    """PLAIN for a type of floats; what quantization= makes of the rest."""
    if name in FLOATS:
        return PLAIN
    scheme, _, group = name.partition("-g")
    bits = 4 if scheme.endswith("4") or scheme.startswith("w4") else 8
    return WeightFormat(scheme, bits, 8 if scheme.endswith("a8") else 16, 0 if scheme == "w8a8" else int(group or 32))


class Layer:
    """The experts, packed and plain."""

    def __init__(self, gate_up: Tensor, down: Tensor, fmt: WeightFormat) -> None:
        self._plain = gate_up, down
        self._packed = _laid(gate_up, fmt), _laid(down, fmt)
        tensors = (x for stack in self._packed for x in (stack.values, stack.scales) if x is not None)
        self.expert_bytes = sum(x[0].nbytes for x in tensors)

    def route(self, x: Tensor, draw: Draw) -> None:
        Op.registry["route"].providers["native"](draw.logits, K, True)

    def experts(self, x: Tensor, draw: Draw) -> None:
        stacks: Sequence[Matrix | Tensor] = self._packed
        plain = self._packed[0].format.plain
        name, stacks = ("experts", [each.values for each in stacks]) if plain else ("quantized_experts", stacks)
        Op.registry[name].providers["native"](x, *stacks, draw.weights, draw.ids, "silu")

    def plain(self, x: Tensor, draw: Draw) -> None:
        fmt = self._packed[0].format
        op, (gate_up, down) = Op.registry["linear"], self._packed
        product = op.kinds.get(fmt.kind, op).providers["native"]
        for expert, tokens in draw.rows:
            wide = product(x[: len(tokens)], expert_matrix(gate_up, expert), None, (2 * INNER,))
            product(wide[:, :INNER], expert_matrix(down, expert), None, (HIDDEN,))

    def torch(self, x: Tensor, draw: Draw) -> None:
        gate_up, down = self._plain
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert, tokens in draw.rows:
            gate, up = functional.linear(x[tokens], gate_up[expert]).chunk(2, -1)
            weights = (draw.weights[tokens] * (draw.ids[tokens] == expert)).sum(1, keepdim=True)
            out.index_add_(0, tokens, functional.linear(functional.silu(gate) * up, down[expert]) * weights)
        out.to(x.dtype)


def _laid(weight: Tensor, fmt: WeightFormat) -> Matrix:
    if fmt.plain:
        return Matrix(pack_experts(weight))
    laid = quantized.pack(weight.flatten(0, 1), fmt)
    values, scales = (laid[name].view(NUM, -1, *laid[name].shape[1:]) for name in ("weight", "scales"))
    return Matrix(values, scales, format=fmt)


def alternate(
    calls: Sequence[Callable[[Tensor, Draw], None]], x: Tensor, draws: Sequence[Draw], seconds: float
) -> list[float]:
    """The shortest time per layer of each, over so many seconds and at least three rounds."""
    best, start, rounds = [float("inf")] * len(calls), time.perf_counter(), 0
    while rounds < 3 or time.perf_counter() - start < seconds:
        for i, call in enumerate(calls):
            call(x, draws[0])  # torch's threads spin for some milliseconds after its last product, on our cores
            before = time.perf_counter()
            for draw in draws:
                call(x, draw)
            best[i] = min(best[i], (time.perf_counter() - before) / len(draws))
        rounds += 1
    return best


def _row(fmt: str, expert_bytes: int, tokens: int, times: Sequence[float], draws: Sequence[Draw], read: float) -> Row:
    route, ours, plain, theirs = times
    gbs = sum(len(draw.rows) for draw in draws) / len(draws) * expert_bytes / ours / GIGA
    gflops = 2 * tokens * K * 3 * INNER * HIDDEN / ours / GIGA
    share = gbs / read if tokens <= FEW else plain / ours
    return Row(fmt, tokens, route, ours, plain, theirs, gbs, gflops, share)


def _line(row: Row) -> str:
    of = "of the bandwidth" if row.tokens <= FEW else "of plain's speed"
    return (
        f"{row.format:9} T {row.tokens:3}  route {row.route * 1e6:6.1f} us, experts {row.experts * 1e6:9.1f} us, plain "
        f"{row.plain * 1e6:9.1f} us, torch {row.torch * 1e6:9.1f} us ({row.torch / row.experts:5.2f}x)  "
        f"{row.gbs:5.1f} GB/s {row.gflops:6.1f} GFLOP/s  {row.share:4.0%} {of}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each number of tokens")
    parser.add_argument("--forms", nargs="+", default=["bfloat16", "int8", "w8a8", "int4", "w4a8", "w4a8-g128"])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--json", help="a file for the figures")
    args = parser.parse_args()
    if reason := native_moe.probe():
        raise SystemExit(reason)
    with torch.inference_mode():
        rows = measure(args.threads, args.seconds, args.forms, args.tokens)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump([asdict(row) for row in rows], file, indent=2)


if __name__ == "__main__":
    main()
