"""RMS norms by Triton. layer_norm has no kernel: torch's own is one launch and one pass over memory."""

import torch
from torch import Tensor

from quintet.ops.norm import add_rms_norm, rms_norm
from quintet.platforms.gpu.ops.probe import probing


def _check(device: torch.device) -> str | None:
    """Checks a row with a mean square of 1, given in two halves."""
    row = torch.tensor([[1.0, -1.0, 1.0, -1.0]], device=device)
    normed, total = _add_rms_norm(row / 2, row / 2, torch.full_like(row[0], 2.0), 0.0, 0.0)
    good = torch.allclose(normed, 2 * row) and torch.equal(total, row)
    return None if good else f"twice {row.tolist()} came out as {normed.tolist()}"


@rms_norm.provide("triton", probing(_check))
def _rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    from quintet.platforms.gpu.kernels.norm import rms_norm as launch

    return launch(x, None, _matching_weight(weight, x), eps, offset)[0]


@add_rms_norm.provide("triton", probing(_check))
def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    from quintet.platforms.gpu.kernels.norm import rms_norm as launch

    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} and {tuple(residual.shape)} {residual.dtype} do not match")
    return launch(x, residual.contiguous(), _matching_weight(weight, x), eps, offset)


def _matching_weight(weight: Tensor, x: Tensor) -> Tensor:
    """A weight that covers x's last axis."""
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype or not weight.is_contiguous():
        raise ValueError(f"a weight {tuple(weight.shape)} {weight.dtype} does not fit x {tuple(x.shape)} {x.dtype}")
    return weight
