"""Adapters (LoRA) by quintet._cpu: a token's result does not depend on the other tokens."""

import functools

import torch
from torch import Tensor

from quintet.ops.lora import adapter_rows, add_lora, scale_adapted
from quintet.platforms.cpu.arena import empty
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


def probe_scale() -> str | None:
    """Checks two tokens, one of which has an adapter."""
    if reason := missing("scale_adapted"):
        return reason
    y, slots = torch.tensor([[3.0], [3.0]]), torch.tensor([0, 2], dtype=torch.int32)
    got = _scale_adapted(y, torch.tensor([[9.0], [2.0]]), torch.tensor([[9.0], [1.0]]), slots).tolist()
    return None if got == [[3.0], [7.0]] else f"two tokens gave {got}, not [[3], [7]]"


@scale_adapted.provide("native", probe_scale)
def _scale_adapted(y: Tensor, gains: Tensor, offsets: Tensor, slots: Tensor) -> Tensor:
    """ValueError for shapes or types that do not fit. y is overwritten, as add_lora() does; slots are read anew when a
    recorded call is replayed."""
    tokens, outputs = y.shape
    for what, each in (("gains", gains), ("offsets", offsets)):
        if each.shape != (len(gains), outputs) or each.dtype != torch.float32 or not each.is_contiguous():
            raise ValueError(
                f"{what} {tuple(each.shape)} {each.dtype} do not fit y {tuple(y.shape)}; they are contiguous float32 "
                "[S, N]"
            )
    if slots.shape != (tokens,):
        raise ValueError(f"slots {tuple(slots.shape)} do not fit {tokens} tokens")
    y, _ = dense_operands(y, None, outputs)
    extension().scale_adapted(
        kind_of(y.dtype), y.data_ptr(), y.stride(0), gains.data_ptr(), offsets.data_ptr(), indices(slots), tokens,
        outputs, len(gains),
    )  # fmt: skip
    return y


def probe_rows() -> str | None:
    """Checks three tokens: of the second adapter, of none, and of an id that a table has not."""
    if reason := missing("adapter_rows"):
        return reason
    ids, slots = (torch.tensor(each, dtype=torch.int32) for each in ([5, 5, 9], [2, 0, 1]))
    got = _adapter_rows(ids, slots, 2, 3, 4).tolist()
    return None if got == [4, -1, -1] else f"three tokens gave rows {got}, not [4, -1, -1]"


@adapter_rows.provide("native", probe_rows)
def _adapter_rows(ids: Tensor, slots: Tensor, adapters: int, rows: int, first: int) -> Tensor:
    """ValueError where ids and slots do not fit; both are read anew when a recorded call is replayed."""
    if ids.shape != slots.shape or ids.dim() != 1:
        raise ValueError(f"ids {tuple(ids.shape)} and slots {tuple(slots.shape)} do not fit; both are [T]")
    out = empty((len(ids),), torch.int32)
    extension().adapter_rows(out.data_ptr(), indices(ids), indices(slots), len(ids), adapters, rows, first)
    return out
