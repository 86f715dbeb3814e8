"""Rows by number, and rows side by side, by quintet._cpu."""

import torch
from torch import Tensor

from quintet.ops.embedding import embedding
from quintet.ops.rows import beside, choose_rows, place_rows, take_rows
from quintet.platforms.cpu.arena import empty
from quintet.platforms.cpu.ops.extension import extension, indices, missing
from quintet.platforms.cpu.ops.quantized_embedding import plain_rows
from quintet.platforms.cpu.weight_layout import COLUMNS


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
        return plain_rows(weight, ids, (blocks * COLUMNS, depth * lanes // COLUMNS))
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


def probe_places() -> str | None:
    """A row of two that is replaced, by number and by its own."""
    if reason := missing("place_rows"):
        return reason
    x, y, places = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]]), torch.tensor([-1, 0], dtype=torch.int32)
    got = [*_place_rows(x, y, places).flatten().tolist(), *_choose_rows(x, y, places).flatten().tolist()]
    return None if got == [1, 3, 1, 4] else f"1, 3, 1 and 4 came out as {got}"


@place_rows.provide("native", probe_places)
def _place_rows(x: Tensor, given: Tensor, places: Tensor) -> Tensor:
    """ValueError for a place that is not -1 and has no row."""
    return _placed(x, given.to(x.dtype), places, own=False)


@choose_rows.provide("native", probe_places)
def _choose_rows(x: Tensor, y: Tensor, places: Tensor) -> Tensor:
    return _placed(x, y, places, own=True)


def _placed(x: Tensor, given: Tensor, places: Tensor, own: bool) -> Tensor:
    if x.shape[1] != given.shape[1] or x.dtype != given.dtype or len(places) != len(x):
        raise ValueError(
            f"x {tuple(x.shape)} {x.dtype}, rows {tuple(given.shape)} {given.dtype} and {len(places)} places do not fit"
        )
    x, given = (each if each.stride(1) == 1 else each.contiguous() for each in (x, given))
    (tokens, width), size = x.shape, x.element_size()
    out = empty((tokens, width), x.dtype)
    extension().place_rows(
        out.data_ptr(), x.data_ptr(), given.data_ptr(), indices(places), tokens, len(given), width * size,
        x.stride(0) * size, given.stride(0) * size, own,
    )  # fmt: skip
    return out


def probe_beside() -> str | None:
    """Two rows of one number and of two."""
    if reason := missing("beside"):
        return reason
    got = _beside(torch.tensor([[1.0], [4.0]]), torch.tensor([[2.0, 3.0], [5.0, 6.0]]))
    return None if got.flatten().tolist() == [1, 2, 3, 4, 5, 6] else f"1 to 6 came out as {got.tolist()}"


@beside.provide("native", probe_beside)
def _beside(x: Tensor, y: Tensor) -> Tensor:
    if len(x) != len(y) or x.dtype != y.dtype:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} and y {tuple(y.shape)} {y.dtype} have no rows in common")
    x, y = (each if each.stride(1) == 1 else each.contiguous() for each in (x, y))
    (tokens, a), b, size = x.shape, y.shape[1], x.element_size()
    out = empty((tokens, a + b), x.dtype)
    places, strides = (out.data_ptr(), x.data_ptr(), y.data_ptr()), (x.stride(0) * size, y.stride(0) * size)
    extension().beside(*places, tokens, a * size, b * size, *strides)
    return out
