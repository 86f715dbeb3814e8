"""Low-rank adapters beside a product by Triton. Not verified on a GPU yet."""

import torch
from torch import Tensor

from quintet.ops.lora import add_lora
from quintet.platforms.gpu.ops.probe import probing

Columns = tuple[tuple[int, int], ...]


def _check(device: torch.device) -> str | None:
    """Three tokens of two inputs: one without an adapter, and one of each of two adapters of rank 1."""
    y, x = torch.ones(3, 1, device=device).half(), torch.tensor([[1.0, 2.0]] * 3, device=device).half()
    lora_a = torch.tensor([[[[1.0, 1.0]]], [[[1.0, 2.0]]]], device=device).half()
    lora_b = torch.tensor([[[2.0]], [[4.0]]], device=device).half()
    ranks, slots = (torch.tensor(each, dtype=torch.int32, device=device) for each in ([[1], [1]], [2, 0, 1]))
    got = _add_lora(y, x, lora_a, lora_b, ranks, slots, 0, ((0, 1),)).tolist()
    return None if got == [[21.0], [1.0], [7.0]] else f"two adapters gave {got}, not [[21], [1], [7]]"


@add_lora.provide("triton", probing(_check))
def _add_lora(  # noqa: PLR0913  # as the specification
    y: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor, ranks: Tensor, slots: Tensor, first: int, columns: Columns
) -> Tensor:
    """ValueError for shapes and types that do not fit. y is overwritten, unless the numbers of its rows lie apart."""
    from quintet.platforms.gpu.kernels.lora import add_lora as launch

    adapters, parts, rank, inputs = lora_a.shape
    width = sum(each for _, each in columns)
    if x.shape != (len(y), inputs) or y.shape[1] != width or lora_b.shape != (adapters, rank, width):
        raise ValueError(
            f"y {tuple(y.shape)}, x {tuple(x.shape)}, lora_a {tuple(lora_a.shape)}, lora_b {tuple(lora_b.shape)} and "
            f"columns {columns} do not fit; they are [T, N], [T, K], [S, P, R, K] and [S, R, N], N wide together"
        )
    if not y.dtype == x.dtype == lora_a.dtype == lora_b.dtype:
        kinds = ", ".join(str(each.dtype) for each in (y, x, lora_a, lora_b))
        raise ValueError(f"y, x, lora_a and lora_b have types {kinds}; they have one")
    if slots.shape != y.shape[:1] or len(ranks) != adapters or not 0 <= first <= ranks.shape[1] - parts:
        raise ValueError(
            f"slots {tuple(slots.shape)} and ranks {tuple(ranks.shape)} from column {first} on do not fit {len(y)} "
            f"tokens and {adapters} adapters of {parts} parts"
        )
    return launch(
        _rows(y), _rows(x), lora_a.contiguous(), lora_b.contiguous(), ranks.contiguous(), slots.contiguous(), first,
        columns,
    )  # fmt: skip


def _rows(x: Tensor) -> Tensor:
    """Returns x with contiguous rows; x itself if they are contiguous."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
