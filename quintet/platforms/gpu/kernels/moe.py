"""Products with the weights of experts, for rows that lie sorted by expert. Not verified on a GPU yet.

A block of rows never reaches into the next expert's, so that a weight is read once per block. How many programs run
depends on shapes alone: each finds its expert among the counts, and those past the last block end at once. One program
adds up an output, in the order of the inputs: a row's result does not depend on the others of its expert, as long as
as many rows per expert choose the same tile.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintet.platforms.gpu.kernels.activation import activated
from quintet.platforms.gpu.kernels.chips import ChipLimits, chip_limits_for
from quintet.platforms.gpu.kernels.matmul import TYPES, computed, tile_of
from quintet.platforms.gpu.kernels.routing import ordered
from quintet.platforms.gpu.kernels.variant import Variant


@dataclass(frozen=True)
class MoETile:
    """Tile that one program computes, and its warps and stages."""

    rows: int
    outputs: int
    inputs: int  # bytes of a row that one step takes
    warps: int
    stages: int

    def within(self, cut: ChipLimits) -> "MoETile":
        rows, outputs, inputs = min(self.rows, cut.side), min(self.outputs, cut.side), min(self.inputs, cut.inputs)
        return MoETile(rows, outputs, inputs, self.warps, min(self.stages, cut.stages))


# By the most rows that an expert has on average. Untuned guesses: few rows wait for weights, which come in long pieces;
# many fill a tensor core's 64 rows per 4 warps. With a gate, half of the outputs: each has two sums.
TILES = ((16, MoETile(16, 64, 256, 4, 4)), (64, MoETile(64, 128, 128, 4, 3)), (1 << 31, MoETile(128, 128, 128, 8, 3)))
COMBINED = 1024  # features of a token that one program of combine() adds up


@triton.jit
def _block(counts, block, num, rows, BM: tl.constexpr, P: tl.constexpr):
    """-> (expert, first row, end of the expert's rows) of a block; rows without an expert count as `num`'s."""
    bins = tl.arange(0, P)
    many = tl.load(counts + bins, mask=bins < num, other=0)
    many = tl.where(bins == num, rows - tl.sum(many), many)
    blocks = tl.cdiv(many, BM)
    expert = tl.sum((tl.cumsum(blocks, 0) <= block).to(tl.int32))
    earlier = bins < expert
    start = tl.sum(tl.where(earlier, many, 0))
    first = start + (block - tl.sum(tl.where(earlier, blocks, 0))) * BM
    return expert, first, start + tl.sum(tl.where(bins == expert, many, 0))


@triton.jit
def _cut(at, k, inputs, EVEN: tl.constexpr, COMPUTE: tl.constexpr):
    if EVEN:
        return tl.load(at + k[None, :]).to(COMPUTE)
    else:
        return tl.load(at + k[None, :], mask=k[None, :] < inputs, other=0.0).to(COMPUTE)


@triton.jit
def _biased(acc, bias, at, STEP: tl.constexpr):
    """acc [rows, columns] and the bias of each column; they lie STEP apart."""
    return acc + tl.load(bias + at * STEP).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["rows", "shared"])  # or some numbers of tokens would compile anew
def product(
    out, x, weight, bias, counts, order, rows, outputs, inputs, num, shared, x_row, weight_row, expert_row, up_row,
    alpha, limit, KIND: tl.constexpr, SCATTERED: tl.constexpr, COMPUTE: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """x by weight [num, outputs, inputs], each row by its expert's, -> out [rows, outputs].

    `order` has the entry of each row; `shared` entries have one row of x. SCATTERED: they come and go as entries, else
    out's rows are in order. Without `order` rows are their own entries, and those without an expert become 0. A KIND
    other than "none" is the activation of a gate; up is up_row numbers behind it: weight [num, 2 outputs, inputs] with
    gate before up, or, if "clamped" (see ops.moe.biased_experts), row by row. A bias [num, ...] has the weight's order.
    """
    wide = tl.cdiv(outputs, BN)
    tile, block = tile_of(tl.program_id(0), wide, tl.num_programs(0) // wide)
    expert, first, end = _block(counts, block, num, rows, BM, P)
    ours = expert < num
    if order is None:
        ours = expert <= num
    if ours:
        columns, row = tile * BN + tl.arange(0, BN), first + tl.arange(0, BM)
        n = tl.minimum(columns, outputs - 1).to(tl.int64)  # what is past the end is computed twice, and not stored
        entry = tl.minimum(row, end - 1).to(tl.int64)
        to = entry
        if order is not None:
            entry = tl.load(order + entry).to(tl.int64)
            if SCATTERED:
                source, to = to, entry
            else:
                source = entry // shared
        else:
            source = entry
        at = x + source[:, None] * x_row
        weights = weight + tl.minimum(expert, num - 1).to(tl.int64) * expert_row + n[:, None] * weight_row
        acc = tl.zeros((BM, BN), tl.float32)
        steps = tl.where(expert < num, tl.cdiv(inputs, BK), 0)
        if bias is not None:
            bias += tl.minimum(expert, num - 1).to(tl.int64) * outputs * (1 if KIND == "none" else 2)
        if KIND == "none":
            for step in range(steps):
                k = step * BK + tl.arange(0, BK)
                cut = _cut(at, k, inputs, EVEN, COMPUTE)
                acc = tl.dot(cut, tl.trans(_cut(weights, k, inputs, EVEN, COMPUTE)), acc, input_precision="ieee")
            if bias is not None:
                acc = _biased(acc, bias, n, 1)
        else:
            ups, up = weights + up_row, tl.zeros((BM, BN), tl.float32)
            for step in range(steps):
                k = step * BK + tl.arange(0, BK)
                cut = _cut(at, k, inputs, EVEN, COMPUTE)
                acc = tl.dot(cut, tl.trans(_cut(weights, k, inputs, EVEN, COMPUTE)), acc, input_precision="ieee")
                up = tl.dot(cut, tl.trans(_cut(ups, k, inputs, EVEN, COMPUTE)), up, input_precision="ieee")
            if KIND == "clamped":
                gate = tl.minimum(_biased(acc, bias, n, 2), limit)
                up = tl.minimum(tl.maximum(_biased(up, bias + 1, n, 2), -limit), limit)
                acc = (up + 1.0) * (gate / (1.0 + tl.exp(gate * -alpha)))
            else:
                acc = activated(acc, KIND) * up
        there = (row < end)[:, None] & (columns < outputs)[None, :]
        tl.store(out + to[:, None] * outputs + columns[None, :], acc.to(out.dtype.element_ty), mask=there)


@triton.jit
def combine(out, each, weights, ids, width, num, k, B: tl.constexpr):
    """out [T, D]: the sum over j of weights [T, k] times each [T k, D], in order, where ids [T, k] name an expert."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    for j in range(k):
        entry = token * k + j
        owner = tl.load(ids + entry)
        until = tl.where((owner >= 0) & (owner < num), width, 0)
        got = tl.load(each + entry * width + at, mask=at < until, other=0.0).to(tl.float32)
        total += tl.load(weights + entry) * got
    tl.store(out + token * width + at, total.to(out.dtype.element_ty), mask=at < width)


class ExpertGate(NamedTuple):
    """Activation between the two products of experts, and their biases."""

    kind: str  # of KINDS' values, or "clamped"
    clamp: tuple[float, float] = (0.0, 0.0)  # (alpha, limit)
    biases: tuple[Tensor | None, Tensor | None] = (None, None)  # [E, 2 I] and [E, D]


UNGATED = ExpertGate("none")


FIXED = TILES[1][1]  # where a row's bits must not depend on how many rows there are


def grouped(
    x: Tensor, weight: Tensor, counts: Tensor, tile: MoETile | None = None, bias: Tensor | None = None
) -> Tensor:
    """x [M, K] by weight [E, N, K], the first counts[0] rows by weight[0]...; rows without an expert give 0. Each
    row gets its expert's bias of [E, N]."""
    out = torch.empty((len(x), weight.shape[1]), dtype=x.dtype, device=x.device)
    if out.numel():
        _launch(out, x, weight, counts, None, gate=ExpertGate("none", biases=(bias, None)), tile=tile)
    return out


def mixed(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate: ExpertGate,
    tile: MoETile | None = None,
) -> Tensor:
    """x [T, D], gate_up [E, 2 I, D], down [E, D, I], weights and ids [T, k] -> [T, D]."""
    (_, hidden), k, entries = x.shape, ids.shape[1], ids.numel()
    inner = torch.empty((entries, down.shape[2]), dtype=x.dtype, device=x.device)
    outer = torch.empty((entries, hidden), dtype=x.dtype, device=x.device)
    if not outer.numel():
        return torch.empty_like(x)
    order, counts = ordered(ids, len(down))
    _launch(inner, x, gate_up, counts, order, k, gate, tile)
    _launch(outer, inner, down, counts, order, gate=ExpertGate("none", biases=gate.biases[::-1]), tile=tile)
    return combined(outer, weights, ids, len(down))


def combined(each: Tensor, weights: Tensor, ids: Tensor, num: int) -> Tensor:
    """each [T k, D] by weights [T, k] where ids [T, k] name one of `num` experts -> their sums [T, D]."""
    (tokens, k), hidden = ids.shape, each.shape[1]
    out = torch.empty((tokens, hidden), dtype=each.dtype, device=each.device)
    combine[tokens, triton.cdiv(hidden, COMBINED)](out, each, weights, ids, hidden, num, k, B=COMBINED)
    return out


def _launch(
    out: Tensor, x: Tensor, weight: Tensor, counts: Tensor, order: Tensor | None, shared: int = 0,
    gate: ExpertGate = UNGATED, tile: MoETile | None = None,
) -> None:  # fmt: skip
    """`shared` 0: x and out have a row per entry. The gate's first bias is the product's. Without a tile, the rows
    choose one."""
    kind, row = gate.kind, weight.stride(1)
    row, up = (2 * row, row) if kind == "clamped" else (row, out.shape[1] * row)
    (rows, outputs), inputs, num = out.shape, x.shape[1], len(weight)
    cut = chip_limits_for(x.device)
    tile = (tile or next(each for most, each in TILES if triton.cdiv(rows, num) <= most)).within(cut)
    blocks = min(rows, rows // tile.rows + num + (order is None))
    step, width = tile.inputs // x.dtype.itemsize, tile.outputs // (1 if kind == "none" else 2)
    product[(blocks * triton.cdiv(outputs, width),)](
        out, x, weight, gate.biases[0], counts, order, rows, outputs, inputs, num, shared, x.stride(0), row,
        weight.stride(0), up, *gate.clamp, KIND=kind, SCATTERED=shared == 0, COMPUTE=computed(x.dtype, x.device),
        EVEN=inputs % step == 0, BM=tile.rows, BN=width, BK=step, P=triton.next_power_of_2(num + 1),
        num_warps=tile.warps, num_stages=tile.stages, **dict(cut.options),
    )  # fmt: skip


def variants(cut: ChipLimits = ChipLimits()) -> list[Variant]:  # noqa: B008
    """Both products of experts by each tile, with 8 and 128 of them; gpt-oss's, which have biases."""
    found = []
    for dtype, compute in (("bf16", TYPES[torch.bfloat16]), ("fp16", TYPES[torch.float16])):
        for _, largest in TILES:
            tile = largest.within(cut)
            for what, kind, scattered, bins in (
                ("gate and up", "silu", False, 256), ("down", "none", True, 16),
                ("clamped gate and up", "clamped", False, 64), ("biased down", "none", True, 64),
            ):  # fmt: skip
                biased = bins == 64
                fixed: dict[str, Any] = {"KIND": kind, "SCATTERED": scattered, "COMPUTE": compute, "EVEN": True}
                fixed |= {"BM": tile.rows, "BN": tile.outputs // (2 - scattered), "BK": tile.inputs // 2, "P": bins}
                signature = dict.fromkeys(("out", "x", "weight"), f"*{dtype}") | {"counts": "*i32", "order": "*i32"}
                signature |= dict.fromkeys(("rows", "num", "shared"), "i32") | {"expert_row": "i64:16"}
                signature |= dict.fromkeys(("outputs", "inputs", "x_row", "weight_row", "up_row"), "i32:16")
                signature |= {"alpha": "fp32", "limit": "fp32"} | ({"bias": f"*{dtype}"} if biased else {})
                fixed |= {} if biased else {"bias": None}
                name = f"experts' {what} {dtype} for {largest.rows}"
                found.append(Variant(name, product, signature, fixed, tile.warps, tile.stages))
        signature = {"out": f"*{dtype}", "each": f"*{dtype}", "weights": "*fp32", "ids": "*i32"}
        signature |= {"width": "i32:16", "num": "i32", "k": "i32"}
        found.append(Variant(f"combine {dtype}", combine, signature, {"B": COMBINED}))
    return found
