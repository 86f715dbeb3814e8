"""Low-rank adapters beside a product, by quintet._cpu: a token's result does not depend on the other tokens."""

import functools

import torch
from torch import Tensor

from quintet.ops.lora import add_lora
from quintet.platforms.cpu.ops.extension import dense_operands, extension, indices, kind_of, missing

Columns = tuple[tuple[int, int], ...]


def probe() -> str | None:
    """Checks three tokens of two inputs: one without an adapter, and one of each of two adapters of rank 1."""
    if reason := missing("add_lora"):
        return reason
    y, x = torch.tensor([[1.0], [1.0], [1.0]]), torch.tensor([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]])
    lora_a, lora_b = torch.tensor([[[[1.0, 1.0]]], [[[1.0, 2.0]]]]), torch.tensor([[[2.0]], [[4.0]]])
    ranks, slots = torch.ones(2, 1, dtype=torch.int32), torch.tensor([2, 0, 1], dtype=torch.int32)
    got = _add_lora(y, x, lora_a, lora_b, ranks, slots, 0, ((0, 1),)).tolist()
    return None if got == [[21.0], [1.0], [7.0]] else f"two adapters gave {got}, not [[21], [1], [7]]"


@add_lora.provide("native", probe)
def _add_lora(  # noqa: PLR0913  # as the specification
    y: Tensor,
    x: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    ranks: Tensor,
    slots: Tensor,
    first: int,
    columns: Columns,
) -> Tensor:
    """ValueError for shapes, types or strides that do not fit.

    y is overwritten; if the numbers of its rows are not contiguous, the result is a copy. A recorded call reads ranks
    and slots when it is replayed.
    """
    (tokens, outputs), inputs = y.shape, x.shape[1]
    stretches, width = _stretches(columns, lora_a.shape[1])
    _check_adapters(x, lora_a, lora_b, outputs)
    if len(x) != tokens or y.dtype != x.dtype or width != outputs:
        raise ValueError(
            f"y {tuple(y.shape)} {y.dtype} does not fit x {tuple(x.shape)} {x.dtype} and columns {columns}; "
            "y has x's rows and type, and the columns' width"
        )
    adapters, parts, rank, _ = lora_a.shape
    if slots.shape != (tokens,) or ranks.dtype != torch.int32 or ranks.stride(1) != 1 or len(ranks) != adapters:
        raise ValueError(
            f"slots {tuple(slots.shape)} and ranks {tuple(ranks.shape)} {ranks.dtype} do not fit {tokens} tokens and "
            f"{adapters} adapters; both are int32, and each row of ranks is contiguous"
        )
    if not 0 <= first <= ranks.shape[1] - parts:
        raise ValueError(f"ranks {tuple(ranks.shape)} have no columns {first} to {first + parts - 1} for {parts} parts")
    (x, _), (y, _) = dense_operands(x, None, inputs), dense_operands(y, None, outputs)
    extension().add_lora(
        kind_of(x.dtype), y.data_ptr(), y.stride(0), x.data_ptr(), x.stride(0), lora_a.data_ptr(), lora_b.data_ptr(),
        ranks.data_ptr() + first * ranks.element_size(), ranks.stride(0), indices(slots), stretches.data_ptr(),
        len(columns), tokens, inputs, outputs, adapters, parts, rank,
    )  # fmt: skip
    return y


@functools.cache
def _stretches(columns: Columns, parts: int) -> tuple[Tensor, int]:
    """Returns columns as int32 [stretches, 2], and their width. They stay in memory: recorded calls read them there."""
    if not columns or any(not 0 <= part < parts or width < 0 for part, width in columns):
        raise ValueError(f"columns {columns} do not name parts 0 to {parts - 1}, with widths of 0 or more")
    return torch.tensor(columns, dtype=torch.int32), sum(width for _, width in columns)


def _check_adapters(x: Tensor, lora_a: Tensor, lora_b: Tensor, outputs: int) -> None:
    adapters, _, rank, inputs = lora_a.shape
    if (
        x.shape[1] != inputs
        or lora_b.shape != (adapters, rank, outputs)
        or not x.dtype == lora_a.dtype == lora_b.dtype
        or not (lora_a.is_contiguous() and lora_b.is_contiguous())
    ):
        raise ValueError(
            f"lora_a {tuple(lora_a.shape)} {lora_a.dtype} and lora_b {tuple(lora_b.shape)} {lora_b.dtype} do not fit "
            f"x {tuple(x.shape)} {x.dtype} and {outputs} outputs; they are contiguous [S, P, R, K] and [S, R, N] in "
            "x's type"
        )
