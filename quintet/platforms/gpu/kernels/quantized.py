"""Products with quantized weights: one kernel for weights of 4 and 8 bits, and activations as they are or in 8 bits.

The weight is the first factor, tokens are the second's columns: what is unpacked in registers stays there. A group's
products are added up by themselves, and scaled in float32. Not verified on a GPU yet.

A result does not depend on the batch among up to 16 tokens, among up to 64, and among more: a tile's size is settled by
these, the splits of the inputs by the weight's shape, and splits are added in order.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintet.platforms.gpu.kernels.chips import ChipLimits, chip_limits_for
from quintet.platforms.gpu.kernels.formats import FLOAT8, UNITS, eight, fours, whole
from quintet.platforms.gpu.kernels.matmul import TYPES, added, computed, finish, tile_of, units
from quintet.platforms.gpu.kernels.product_tiles import SPLIT_UP_TO, TILES, ProductTile, tile_for
from quintet.platforms.gpu.kernels.variant import Variant

SHALLOW = 2  # stages in float32: its tiles are twice as large; they are for at most 64 tokens
WAVES = 4  # programs per processor that splits should come to, where a split has LEAST steps at least
LEAST = 4
WHOLE = 1 << 30  # a group that no row ends: its scales come in before the end, as zero points want it
LEAST_PART, LEAST_WHOLE = 16, 32  # numbers that tensor cores add up at least: of 16 bits, and of 8


@triton.jit
def _inputs(at, k, inputs, EVEN: tl.constexpr, COMPUTE: tl.constexpr):
    """x's columns k for the tile's tokens, [PART, BM]."""
    if EVEN:
        return tl.load(at + k[:, None]).to(COMPUTE)
    else:
        return tl.load(at + k[:, None], mask=k[:, None] < inputs, other=0).to(COMPUTE)


@triton.jit
def _bytes(at, k, there, EVEN: tl.constexpr):
    """The weight's bytes k for the tile's outputs, [BN, PART]."""
    if EVEN:
        return tl.load(at + k[None, :])
    else:
        return tl.load(at + k[None, :], mask=k[None, :] < there, other=0)


@triton.jit
def _looked_up(table, places):
    """The table is 64 to 1024 bytes, and stays beside the processor."""
    return tl.load(table + places.to(tl.int32))


@triton.jit
def _scaled(acc, part, x, group, scales, zeros, mins, own, scale_column, UNIT: tl.constexpr):
    """acc + a group's products by its scales. Zero points and minima of weights come in by the sum of x."""
    sums = part.to(tl.float32)
    if zeros is not None:
        shift = (tl.load(zeros + group * scale_column).to(tl.float32) - 8.0) / UNIT
        sums -= shift[:, None] * tl.sum(x.to(tl.float32), 0)[None, :]
    sums *= (tl.load(scales + group * scale_column).to(tl.float32) * UNIT)[:, None]
    if mins is not None:
        lowest = tl.load(mins + group * scale_column).to(tl.float32)
        sums += lowest[:, None] * tl.sum(x.to(tl.float32), 0)[None, :]
    if own is not None:
        sums *= tl.load(own + group)[None, :]
    return acc + sums


@triton.jit
def _eights(
    acc, x, own, weight, scales, mins, table, inputs, first, last, scale_column,
    GROUP: tl.constexpr, PART: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, COMPUTE: tl.constexpr,
    UNIT: tl.constexpr, EVEN: tl.constexpr, FLOAT8_X: tl.constexpr,
):  # fmt: skip
    """Weights of 8 bits."""
    for step in range(first, last):
        k = step * PART + tl.arange(0, PART)
        raw = _bytes(weight, k, inputs, EVEN)
        if table is not None:
            values = _looked_up(table, raw)
        elif MANTISSA > 0:
            values = eight(raw, COMPUTE, MANTISSA, BIAS)
        else:
            values = whole(raw, COMPUTE)
        if FLOAT8_X:
            cut = eight(_inputs(x, k, inputs, EVEN, tl.uint8), COMPUTE, MANTISSA, BIAS)
        else:
            cut = _inputs(x, k, inputs, EVEN, COMPUTE)
        if GROUP == 0:
            acc = tl.dot(values, cut, acc, input_precision="ieee", out_dtype=acc.dtype)
        else:
            part = tl.dot(values, cut, input_precision="ieee")
            acc = _scaled(acc, part, cut, step * PART // GROUP, scales, None, mins, own, scale_column, UNIT)
    return acc


@triton.jit
def _fours(
    acc, x, own, weight, scales, zeros, mins, table, inputs, row, first, last, scale_column,
    GROUP: tl.constexpr, PART: tl.constexpr, PAIRS: tl.constexpr, COMPUTE: tl.constexpr, UNIT: tl.constexpr,
    EVEN: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Weights of 4 bits: PART bytes hold twice as many inputs in a row; low and high bits are neighbours, or halves.

    APART: no two products go into one accumulator.
    """
    many: tl.constexpr = 2 * PART
    beside = tl.zeros_like(acc)  # of high bits, with one group and APART
    for step in range(first, last):
        at = tl.arange(0, PART)
        raw = _bytes(weight, step * PART + at, row, EVEN)
        if PAIRS:
            k = step * many + 2 * at
            beyond = 1
        else:
            k = step * many + at
            beyond = PART
        if table is not None:
            low, high = _looked_up(table, raw & 15), _looked_up(table, raw >> 4)
        else:
            low, high = fours(raw, COMPUTE)
        x_low = _inputs(x, k, inputs, EVEN, COMPUTE)
        x_high = _inputs(x, k + beyond, inputs, EVEN, COMPUTE)
        if GROUP == 0:
            acc = tl.dot(low, x_low, acc, input_precision="ieee", out_dtype=acc.dtype)
            if APART:
                beside = tl.dot(high, x_high, beside, input_precision="ieee", out_dtype=acc.dtype)
            else:
                acc = tl.dot(high, x_high, acc, input_precision="ieee", out_dtype=acc.dtype)
        else:
            group = step * many // GROUP
            part = tl.dot(low, x_low, input_precision="ieee")
            if (GROUP % many == 0 or PAIRS) and not APART:
                part = tl.dot(high, x_high, part, input_precision="ieee", out_dtype=part.dtype)
                both = x_low
                if zeros is not None or mins is not None:
                    both = x_low.to(tl.float32) + x_high.to(tl.float32)
                acc = _scaled(acc, part, both, group, scales, zeros, mins, own, scale_column, UNIT)
            else:
                acc = _scaled(acc, part, x_low, group, scales, zeros, mins, own, scale_column, UNIT)
                part = tl.dot(high, x_high, input_precision="ieee")
                after = group
                if GROUP % many != 0 and not PAIRS:
                    after = tl.minimum((step * many + PART) // GROUP, (inputs - 1) // GROUP)  # past the end x is 0
                acc = _scaled(acc, part, x_high, after, scales, zeros, mins, own, scale_column, UNIT)
    if GROUP == 0 and APART:
        acc += beside
    return acc


@triton.jit(do_not_specialize=["tokens", "steps", "share"])  # or some numbers of tokens would compile anew
def product(
    out, x, own, weight, scales, zeros, mins, table, bias, tokens, outputs, inputs, steps, share, x_row, weight_row,
    scale_row, scale_column, own_row, BITS: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr,
    PAIRS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, FLOAT8_X: tl.constexpr, COMPUTE: tl.constexpr,
    UNIT: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    APART: tl.constexpr = False,
):  # fmt: skip
    """x [tokens, K] by weight [N, K] -> out [tokens, N], or the sums [S, tokens, N] of S stretches of `share` steps.

    GROUP inputs share a scale (0: all). EVEN: no row ends within a step. With a table, weights are places in it.
    """
    wide, tall = tile_of(tl.program_id(0), tl.cdiv(outputs, BN), tl.cdiv(tokens, BM))
    split = tl.program_id(1)
    columns, rows = wide * BN + tl.arange(0, BN), tall * BM + tl.arange(0, BM)
    n = tl.minimum(columns, outputs - 1).to(tl.int64)  # what is past the end is computed twice, and not stored
    m = tl.minimum(rows, tokens - 1).to(tl.int64)
    first, last = split * share, tl.minimum(split * share + share, steps)
    weight += n[:, None] * weight_row
    x += m[None, :] * x_row
    at_scales, at_own, at_zeros, at_mins = scales + n * scale_row, own, zeros, mins
    if own is not None:
        at_own = own + m * own_row
    if zeros is not None:
        at_zeros = zeros + n * scale_row
    if mins is not None:
        at_mins = mins + n * scale_row
    sums = tl.zeros((BN, BM), tl.int32 if COMPUTE == tl.int8 and GROUP == 0 else tl.float32)
    if BITS == 4:
        sums = _fours(sums, x, at_own, weight, at_scales, at_zeros, at_mins, table, inputs, weight_row, first, last,
                      scale_column, GROUP, PART, PAIRS, COMPUTE, UNIT, EVEN, APART)  # fmt: skip
    else:
        sums = _eights(sums, x, at_own, weight, at_scales, at_mins, table, inputs, first, last, scale_column,
                       GROUP, PART, MANTISSA, BIAS, COMPUTE, UNIT, EVEN, FLOAT8_X)  # fmt: skip
    if GROUP == 0 and UNIT != 1.0:
        sums *= UNIT
    sums = tl.trans(sums)  # [BM, BN]
    if not SPLIT:
        if GROUP == 0:
            sums = finish(sums, m, n, own, scales, bias, own_row, scale_row)
        else:
            sums = finish(sums, m, n, None, None, bias, 0, 0)
    else:
        out += split.to(tl.int64) * tokens * outputs
    there = (rows < tokens)[:, None] & (columns < outputs)[None, :]
    tl.store(out + m[:, None] * outputs + columns[None, :], sums.to(out.dtype.element_ty), mask=there)


@dataclass(frozen=True)
class PackedWeight:
    """A quantized weight: [N, bytes] or, with 4 bits in halves, [N, steps, PART]; scales, zeros and minima [N, G]."""

    weight: Tensor
    scales: Tensor
    outputs: int
    bits: int = 8
    group: int = 0  # inputs that share a scale; 0: all
    zeros: Tensor | None = None
    kind: torch.dtype = torch.int8  # with 8 bits, int8 or a float8
    mins: Tensor | None = None
    table: tuple[float, ...] = ()  # what the values are places in

    def named(self, whole: bool) -> str:
        """In a chip's table: int4, int8, fp8, table4, table8; int4a8 and so on, where activations have 8 bits too."""
        what = "table" if self.table else "int" if self.kind == torch.int8 else "fp"
        return f"{what}{self.bits}{'a8' if whole else ''}"

    def part(self, tile: ProductTile = TILES[0][1]) -> int:
        """Bytes of a row in one step; 0 where a step cannot hold 16 numbers of one group."""
        if self.bits == 4 and self.weight.dim() == 3:
            return self.weight.shape[2]
        within, wanted = (self.group // 2, 64) if self.bits == 4 else (self.group, 128)
        apart = self.group in (0, WHOLE)
        if tile.tokens > (16 if self.table or self.kind != torch.int8 else wanted if apart else SPLIT_UP_TO):
            # what is unpacked one by one, in float8 or by tables, fills the registers; so do sums of groups
            wanted = 64
        if apart:
            return wanted
        size = min(wanted, within & -within)  # the largest power of two that divides it
        return size if size >= LEAST_PART else 0

    def compute(self, whole: bool, dtype: torch.dtype) -> Any:
        """Type of the factors; `whole`: activations have 8 bits, which float16 holds as well as int8."""
        if not whole or (self.table and dtype == torch.float32):
            return computed(dtype, self.weight.device)
        exact = self.kind == torch.int8 and not self.table and self.part() >= LEAST_WHOLE
        return tl.int8 if exact else tl.float16

    def stand_for(self, compute: Any) -> Tensor | None:
        """The table, as factors are; zeros in places that it has not."""
        if not self.table:
            return None
        dtype = next(each for each, other in TYPES.items() if other == compute)
        return table_on(self.table + (0.0,) * (2**self.bits - len(self.table)), dtype, self.weight.device)


@functools.cache
def table_on(table: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A graph that reads it is captured after a step that made it."""
    return torch.tensor(table, dtype=dtype, device=device)


def multiplied(
    x: Tensor,
    own: Tensor | None,
    packed: PackedWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    splits: int | None = None,
    tiled: int | None = None,
) -> Tensor:
    """x [T, K] in floats of `dtype`, or in 8 bits with scales own [T, G], by the weight -> [T, N] in `dtype`.

    `tiled`: tokens for which the tile is chosen, if not for these.
    """
    (tokens, inputs), outputs, bits, cut = x.shape, packed.outputs, packed.bits, chip_limits_for(x.device)
    out = torch.empty((tokens, outputs), dtype=dtype, device=x.device)
    if not out.numel():
        return out
    compute = packed.compute(own is not None, dtype)
    summed = bits == 4 and not (packed.zeros is None and packed.mins is None and not packed.table)
    heavy = own is not None and packed.group > 0 or summed or compute == tl.float32
    tile = tile_for(tiled or tokens, heavy, packed.named(own is not None), cut)
    part = packed.part(tile)
    assert part, "the provider asks for part() before"
    steps = triton.cdiv(inputs, part * 8 // bits)
    wide, tall = triton.cdiv(outputs, tile.outputs), triton.cdiv(tokens, tile.tokens)
    splits = splits or _splits(tokens, wide, steps, tile, inputs * bits // 8, units(x.device))
    share = triton.cdiv(steps, splits)
    count = triton.cdiv(steps, share)
    whole = compute == tl.int8 and not packed.group
    sums = out
    if count > 1:
        kind = torch.int32 if whole else torch.float32
        sums = torch.empty((count, tokens, outputs), dtype=kind, device=x.device)
    mantissa, exponent, _ = FLOAT8.get(packed.kind, (0, 0, 0))
    weight = packed.weight if packed.kind == torch.int8 else packed.weight.view(torch.uint8)
    scales = packed.scales
    product[wide * tall, count](
        sums, x, own, weight, scales, packed.zeros, packed.mins, packed.stand_for(compute), bias, tokens, outputs,
        inputs, steps, share, x.stride(0), weight.stride(0), scales.stride(0) if len(scales) > 1 else 0,
        scales.stride(1), 0 if own is None else own.stride(0),
        BITS=bits, GROUP=packed.group, PART=part, PAIRS=bits == 4 and weight.dim() == 2,
        MANTISSA=mantissa, BIAS=exponent, FLOAT8_X=own is not None and mantissa > 0, COMPUTE=compute,
        UNIT=1.0 if packed.table else unit_of(compute, mantissa), EVEN=inputs % (part * 8 // bits) == 0,
        SPLIT=count > 1, BN=tile.outputs, BM=tile.tokens, APART=bits == 4 and cut.apart, num_warps=tile.warps,
        num_stages=min(SHALLOW, tile.stages) if compute == tl.float32 else tile.stages, **dict(cut.options),
    )  # fmt: skip
    if count == 1:
        return out
    scale = scales.expand(outputs, 1) if not packed.group else None
    return added(out, sums, None if packed.group else own, scale, bias)


def unit_of(compute: Any, mantissa: int) -> float:
    """Returns the unit of a weight's values: 1 but for whole numbers in half precision."""
    return 1.0 if mantissa else UNITS.get(compute, 1.0)


def _splits(tokens: int, wide: int, steps: int, tile: ProductTile, row: int, processors: int) -> int:
    """Returns splits of the inputs, so that enough programs run. Sums, 8 bytes each, stay below half of the weight."""
    if tokens > SPLIT_UP_TO:
        return 1
    most = min(steps // LEAST, row // (16 * tile.tokens))
    return max(1, min(most, triton.cdiv(WAVES * processors, wide)))


TABLES = {tl.bfloat16: "*bf16", tl.float16: "*fp16"}  # of variants, by what they compute in


def variants(cut: ChipLimits = ChipLimits()) -> list[Variant]:  # noqa: B008
    """Variants for what place() packs and float8 checkpoints hold, by each tile; with splits where tokens are few."""
    found = []
    for dtype in ("bf16", "fp16"):
        compute = tl.bfloat16 if dtype == "bf16" else tl.float16
        kinds = {  # BITS, GROUP, PART, MANTISSA, BIAS, COMPUTE, the weight, the scales, x
            "int8": (8, 128, 128, 0, 0, compute, "*i8", "*fp32", f"*{dtype}"),
            "int4": (4, 128, 64, 0, 0, compute, "*u8", "*fp16", f"*{dtype}"),
            "int4 of 32": (4, 32, 32, 0, 0, compute, "*u8", "*fp16", f"*{dtype}"),
            "int4 apart": (4, 128, 64, 0, 0, compute, "*u8", "*fp16", f"*{dtype}"),
            "int4 of rows apart": (4, 0, 64, 0, 0, compute, "*u8", "*fp16", f"*{dtype}"),
            "w8a8": (8, 0, 128, 0, 0, tl.int8, "*i8", "*fp32", "*i8"),
            "w4a8": (4, 32, 32, 0, 0, tl.int8, "*u8", "*fp16", "*i8"),
            "fp8": (8, 128, 128, 3, 7, compute, "*u8", "*fp32", f"*{dtype}"),
            "fp8 dynamic": (8, 128, 128, 3, 7, tl.float16, "*u8", "*fp32", "*u8"),
            "int8 with minima": (8, 32, 32, 0, 0, compute, "*i8", "*fp32", f"*{dtype}"),
            "int4 with zero points": (4, 128, 64, 0, 0, compute, "*u8", "*fp32", f"*{dtype}"),
            "int4 with minima": (4, 32, 32, 0, 0, compute, "*u8", "*fp32", f"*{dtype}"),
            "w4a8 with minima": (4, 32, 32, 0, 0, tl.int8, "*u8", "*fp32", "*i8"),
            "w8a8 of 16": (8, 16, 16, 0, 0, tl.float16, "*i8", "*fp32", "*i8"),
            "table4": (4, 64, 64, 0, 0, compute, "*u8", "*fp32", f"*{dtype}"),
            "table4 dynamic": (4, 32, 32, 0, 0, tl.float16, "*u8", "*fp32", "*i8"),
            "table8": (8, 32, 32, 0, 0, compute, "*u8", "*fp32", f"*{dtype}"),
        }
        for what, kind in kinds.items():
            heavy = kind[-1] in ("*i8", "*u8") and kind[1] > 0 or what.startswith(("int4 with", "table4"))
            found += [_variant(f"{what} {dtype}", dtype, kind, (most, heavy, cut)) for most, _ in TILES]
    return found


def _variant(what: str, dtype: str, kind: tuple[Any, ...], launch: tuple[int, bool, ChipLimits]) -> Variant:
    """launch: the most tokens that it is for, whether it is heavy, what a chip bears."""
    most, heavy, cut = launch
    tile, split = tile_for(most, heavy, cut=cut), most <= SPLIT_UP_TO
    names = "BITS", "GROUP", "PART", "MANTISSA", "BIAS", "COMPUTE"
    fixed = dict(zip(names, kind[:6], strict=True))
    if tile.tokens > (16 if kind[3] else SPLIT_UP_TO) and kind[1]:
        fixed["PART"] = min(fixed["PART"], 64)
    table = "table" in what
    weight, scales, x = kind[6:]
    whole = kind[5] == tl.int8 and kind[1] == 0
    out = f"*{dtype}" if not split else "*i32" if whole else "*fp32"
    fixed |= {"PAIRS": False, "FLOAT8_X": x == "*u8", "EVEN": True, "SPLIT": split, "bias": None}
    fixed["APART"] = "apart" in what
    fixed |= {"UNIT": 1.0 if table else unit_of(kind[5], kind[3]), "BN": tile.outputs, "BM": tile.tokens}
    signature = {"out": out, "x": x, "weight": weight, "scales": scales}
    beside = {"own": x in ("*i8", "*u8") and "*fp32", "table": table and TABLES[kind[5]]}
    beside |= {"zeros": "zero points" in what and "*u8", "mins": "minima" in what and "*fp32"}
    signature |= {name: each for name, each in beside.items() if each}
    fixed |= {name: None for name, each in beside.items() if not each}
    signature |= dict.fromkeys(("tokens", "steps", "share", "scale_row", "own_row"), "i32")
    signature |= dict.fromkeys(("outputs", "inputs", "x_row", "weight_row", "scale_column"), "i32:16")
    few = 2 if kind[0] == 8 and tile.tokens > SPLIT_UP_TO or fixed["APART"] else 0  # outside of the loop
    name = f"product {what} for {most if split else 'more'}"
    return Variant(name, product, signature, fixed, tile.warps, tile.stages, few)
