"""Normalisations by quintet._cpu: a row is added up in one order, whatever stands beside it."""

import torch
from torch import Tensor

from quintet.ops.norm import add_rms_norm, layer_norm, rms_norm
from quintet.platforms.cpu.arena import empty
from quintet.platforms.cpu.ops.extension import extension, kind_of, missing, rows_of


def probe() -> str | None:
    """Checks a row with a mean square of 1, and one with a variance of 1."""
    if reason := missing("rms_norm"):
        return reason
    row = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    got = _rms_norm(row, torch.full((4,), 2.0), 0.0, 0.0), _layer_norm(row + 1, torch.full((4,), 2.0), None, 0.0)
    return None if all(torch.equal(each, 2 * row) for each in got) else f"twice {row.tolist()} came out as {got}"


@rms_norm.provide("native", probe)
def _rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    width = _width(x, weight)
    x, rows = rows_of(x)
    out = empty(x.shape, x.dtype)
    extension().rms_norm(
        kind_of(x.dtype), out.data_ptr(), 0, x.data_ptr(), 0, weight.data_ptr(), x.numel() // width, width, *rows,
        eps, offset,
    )  # fmt: skip
    return out


@add_rms_norm.provide("native", probe)
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    width = _width(x, weight)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} and {tuple(residual.shape)} {residual.dtype} do not match")
    x, rows = rows_of(x)
    if not residual.is_contiguous():
        residual = residual.contiguous()
    out, total = empty(x.shape, x.dtype), empty(x.shape, x.dtype)
    extension().rms_norm(
        kind_of(x.dtype), out.data_ptr(), total.data_ptr(), x.data_ptr(), residual.data_ptr(), weight.data_ptr(),
        x.numel() // width, width, *rows, eps, offset,
    )  # fmt: skip
    return out, total


@layer_norm.provide("native", probe)
def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    width = _width(x, weight)
    if bias is not None:
        _width(x, bias)
    x, rows = rows_of(x)
    out = empty(x.shape, x.dtype)
    extension().layer_norm(
        kind_of(x.dtype), out.data_ptr(), x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(),
        x.numel() // width, width, *rows, eps,
    )  # fmt: skip
    return out


def _width(x: Tensor, weight: Tensor) -> int:
    """x's last axis, which the weight covers."""
    width = x.shape[-1]
    if weight.shape != (width,) or weight.dtype != x.dtype or not weight.is_contiguous():
        raise ValueError(f"a weight {tuple(weight.shape)} {weight.dtype} does not fit x {tuple(x.shape)} {x.dtype}")
    return width
