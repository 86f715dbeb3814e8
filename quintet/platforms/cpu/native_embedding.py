"""Rows by number, by quintet._cpu."""

import torch
from torch import Tensor

from quintet.ops.embedding import embedding
from quintet.ops.rows import take_rows
from quintet.platforms.cpu import quantized
from quintet.platforms.cpu.arena import empty
from quintet.platforms.cpu.native import extension, indices, missing


def probe() -> str | None:
    """The second row of two."""
    if reason := missing("embedding"):
        return reason
    table = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    got = _embedding(torch.ones(1, dtype=torch.int32), table, 0, False)
    return None if torch.equal(got, table[1:]) else f"the second row of {table.tolist()} came out as {got.tolist()}"


@embedding.provide("native", probe)
def _embedding(ids: Tensor, weight: Tensor, first: int, partial: bool) -> Tensor:
    """ValueError for an id that a whole table does not hold."""
    if weight.dim() == 3:  # packed for a product that shares it
        blocks, depth, lanes = weight.shape
        return quantized.rows(
            weight, None, ids, blocks * quantized.COLUMNS, depth * lanes // quantized.COLUMNS, weight.dtype
        )
    count, (rows, width), size = ids.numel(), weight.shape, weight.element_size()
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    out = empty((count, width), weight.dtype)
    extension().embedding(
        out.data_ptr(), indices(ids), weight.data_ptr(), count, rows, width * size, weight.stride(0) * size,
        first if partial else 0, partial,
    )  # fmt: skip
    return out


@take_rows.provide("native", probe)
def _take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """ValueError for a row that there is not."""
    taken: Tensor = _embedding(rows, x, 0, False)
    return taken
