"""Matrices of GGUF's blocks, unpacked by quintet._cpu: to canonical ones, or straight to where products find them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quintet.interface.weights import BlockRows, Matrix, Weight, WeightFormat
from quintet.ops.quantize import canonicals as by_reader
from quintet.ops.quantize import concat_outputs
from quintet.platforms.cpu.arena import empty_weight
from quintet.platforms.cpu.ops.extension import extension, missing
from quintet.platforms.cpu.weight_layout import COLUMNS, W8A8, empty_packed, is_laid, kernel_number, scale_type, shapes
from quintet.platforms.cpu.weight_layout import pack as pack_canonical

STRETCH = 2**20  # numbers that are unpacked and packed at a time: a core's cache holds them


def canonical(weight: Weight, parts: Mapping[str, Tensor]) -> Matrix:
    """This rank's matrix, in the weight's format: what the reader would give, bit for bit."""
    rows = _native_blocks(weight, parts)
    return (
        concat_outputs(by_reader(weight, parts)) if rows is None else _unpacked(rows, weight.shape[-1], weight.format)
    )


def canonicals(weight: Weight, parts: Mapping[str, Tensor]) -> list[Matrix]:
    """The same, each part by itself."""
    rows = _native_blocks(weight, parts)
    if rows is None:
        return by_reader(weight, parts)
    return [_unpacked([each], weight.shape[-1], weight.format) for each in rows]


def _native_blocks(weight: Weight, parts: Mapping[str, Tensor]) -> list[BlockRows] | None:
    """As the file has them, if they are in blocks that the extension unpacks."""
    rows = weight.local_blocks(parts)
    if rows is None or missing("unpack_blocks") or not {each.kind for each in rows} <= set(extension().BLOCKS):
        return None
    return rows


def _unpacked(
    rows: Sequence[BlockRows], inputs: int, fmt: WeightFormat, into: tuple[Tensor, Tensor] | None = None
) -> Matrix:
    """One after the other by their outputs. `into`: memory for values and scales of as many rows, or more."""
    outputs, groups, first = sum(len(each.bytes) for each in rows), inputs // fmt.group, 0
    values, scales = (each[:outputs] for each in into or _canonical_memory(outputs, inputs, fmt))
    mins = torch.empty(outputs, groups) if fmt.mins else None
    for each in rows:
        places = (0 if x is None else x[first:].data_ptr() for x in (values, scales, mins))
        count = len(each.bytes)
        extension().unpack_blocks(each.kind, *places, each.bytes.data_ptr(), count, inputs, _stride(each))
        first += count
    zeros = torch.zeros(scales.shape, dtype=torch.uint8) if fmt.zeros else None
    return Matrix(values if fmt.bits == 4 else values.view(torch.int8), scales, zeros, format=fmt, mins=mins)


def _canonical_memory(outputs: int, inputs: int, fmt: WeightFormat) -> tuple[Tensor, Tensor]:
    """Memory for a canonical matrix's values and scales."""
    values = torch.empty(outputs, inputs * fmt.bits // 8, dtype=torch.uint8)
    return values, torch.empty(outputs, inputs // fmt.group)


def pack_by_stretches(weight: Weight, parts: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The same as weight_layout.pack() of canonical(), some rows at a time: what is unpacked stays in the processor's
    cache, and the canonical matrix, which may be larger than the file, is never in memory as a whole.

    None for formats with minima, which may be packed by what the whole matrix holds, for those that pack() takes, and
    for other readers' weights.
    """
    rows, fmt, inputs = _native_blocks(weight, parts), weight.format, weight.shape[-1]
    if rows is None or fmt.mins or is_laid(fmt) or fmt.kind == "fp8" or kernel_number(fmt) == W8A8:
        return None
    outputs = sum(len(each.bytes) for each in rows)
    step = max(1, STRETCH // inputs // COLUMNS) * COLUMNS
    whole = empty_packed(outputs, inputs, fmt)
    memory = _canonical_memory(min(step, outputs), inputs, fmt)  # once: the system clears pages that it gives
    for first in range(0, outputs, step):
        own = slice(first // COLUMNS, -(-min(first + step, outputs) // COLUMNS))
        unpacked = _unpacked(_between(rows, first, first + step), inputs, fmt, memory)
        piece = pack_canonical(unpacked, {name: x[own] for name, x in whole.items()})
        if "zeros" in piece:
            zeros = whole.setdefault("zeros", piece["zeros"].new_empty(len(whole["weight"]), *piece["zeros"].shape[1:]))
            zeros[own] = piece["zeros"]
    return whole


def _between(rows: Sequence[BlockRows], first: int, last: int) -> list[BlockRows]:
    """Rows `first` to `last` of all, one after the other."""
    found, start = [], 0
    for each in rows:
        count = len(each.bytes)
        if start < last and first < start + count:
            found.append(each._replace(bytes=each.bytes[max(0, first - start) : max(0, last - start)]))
        start += count
    return found


def can_pack(weight: Weight) -> bool:
    """True if pack() makes what products with the weight's format want."""
    return is_laid(weight.format) and not missing("lay_blocks")


def pack(weight: Weight, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """K-quants and Q5_0 as tiles.shapes() says, of a stack one matrix after the other: "weight", "scales" and "mins".

    ValueError for scales that are not finite.
    """
    rows = weight.local_blocks(parts)
    assert rows is not None, "a format of blocks is of whole ones"
    count, (outputs, inputs) = weight.stack or 1, weight.shape[-2:]
    (blocks, *packed), (_, *levels) = shapes(outputs, inputs, weight.format)
    found = {"weight": empty_weight((count * blocks, *packed), torch.uint8)}
    found["scales"] = torch.empty(count * blocks, *levels, dtype=scale_type(kernel_number(weight.format)))
    if weight.format.mins:
        found["mins"] = torch.empty_like(found["scales"])
    each = len(rows) // count
    for index in range(count):
        first = index * blocks
        for own in _whole_blocks(rows[index * each : (index + 1) * each]):
            places = [found[name][first:].data_ptr() if name in found else 0 for name in NAMES]
            if not extension().lay_blocks(
                own.kind, *places, own.bytes.data_ptr(), len(own.bytes), inputs, _stride(own)
            ):
                raise ValueError("its scales or minima are not finite")
            first += -(-len(own.bytes) // COLUMNS)
    return found


NAMES = ("weight", "scales", "mins")


def _whole_blocks(rows: Sequence[BlockRows]) -> Sequence[BlockRows]:
    """The rows as they are, if each but the last fills blocks of outputs; else a copy of all, one after the other."""
    if all(len(each.bytes) % COLUMNS == 0 for each in rows[:-1]):
        return rows
    return [BlockRows(rows[0].kind, torch.cat([each.bytes for each in rows]))]


def _stride(rows: BlockRows) -> int:
    """Bytes from a row to the next."""
    return rows.bytes.stride(0) if len(rows.bytes) > 1 else rows.bytes.shape[1]
