"""Compares a platform's result with the specification's, and reports where it differs."""

import torch
from torch import Tensor

from quintet.conformance.check import ContractViolation, require


def require_close(what: str, got: Tensor, want: Tensor, min_tolerance: float = 0.0) -> None:
    """Both on the host. `want` was computed in float32 on the numbers that the platform had.

    To 6 roundings of got's type at the size of the result, 20 in float32 (a product of a thousand terms needs them);
    `least` allows for more, as a share of that size. Whole numbers are equal, and so is what is not a number.
    """
    require(got.shape == want.shape, f"{what}: the shape is {tuple(got.shape)}, {tuple(want.shape)} is wanted")
    if not got.numel():
        return
    floating = got.dtype.is_floating_point
    size = max(1.0, float(want.double().nan_to_num(0, 0, 0).abs().max()))
    eps = torch.finfo(got.dtype).eps if floating else 0.0
    allowed = max((20 if got.dtype == torch.float32 else 6) * eps, min_tolerance) * size
    off = _distance(got.double(), want.double())
    wrong = off > allowed
    if bool(wrong.any()):
        at = tuple(int(i) for i in torch.nonzero(off == off.max())[0])
        raise ContractViolation(
            f"{what}: element {list(at)} is {float(got[at]):.6g}, {float(want[at]):.6g} is wanted ({allowed:.2g} off "
            f"is allowed, {int(wrong.sum())} of {got.numel()} are further off)"
        )


def _distance(got: Tensor, want: Tensor) -> Tensor:
    """0 where both are the same infinity, or no number; infinite where one is."""
    same = (got == want) | (got.isnan() & want.isnan())
    return torch.where(same, 0.0, (got - want).abs().nan_to_num(torch.inf))


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16"."""
    return str(dtype).removeprefix("torch.")
