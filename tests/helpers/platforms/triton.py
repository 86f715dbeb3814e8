"""What the tests of Triton kernels share: tensors go to where kernels run here, results come back to the host.

That is a GPU, or Triton's interpreter on the host. The interpreter cuts float32 down to bfloat16 where hardware rounds
to the nearest, so bfloat16 is held to two steps of its precision, and float16 to the specification's roundings.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quintet.ops.registry import Op
from quintet.platforms.gpu.ops.probe import device_here

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROUNDINGS = {torch.float32: 10, torch.float16: 2, torch.bfloat16: 3}  # in steps of the type at the result's size


def needs_triton() -> torch.device:
    """Where kernels run here; leaves the module out if nowhere."""
    pytest.importorskip("triton")
    device = device_here()
    if device is None:
        pytest.skip("torch finds no GPU, and Triton does not interpret", allow_module_level=True)
    return device


def uploaded(x: Any, device: torch.device) -> Any:
    """x with a copy of each tensor on the device; one that is not contiguous may be the same where it is there."""
    if isinstance(x, Tensor):
        return x.to(device, copy=True) if x.is_contiguous() else x.to(device)
    if not isinstance(x, tuple):
        return x
    parts = [uploaded(each, device) for each in x]
    return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)


def triton_op(name: str, device: torch.device) -> Callable[..., Any]:
    """An op's Triton provider for host tensors; it is given copies."""
    provider = Op.registry[name].providers["triton"]

    def run(*args: Any) -> Any:
        got = provider(*(uploaded(each, device) for each in args))
        return tuple(x.cpu() for x in got) if isinstance(got, tuple) else got.cpu()

    return run


def randn(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def assert_rounded(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """got has this type and differs from want by no more than a few of the type's roundings."""
    assert got.dtype == dtype and got.shape == want.shape
    size = torch.maximum(want.double().abs(), torch.tensor(1e-2))
    off = ((got.double() - want.double()).abs() / size).max() if got.numel() else torch.tensor(0.0)
    assert float(off) <= ROUNDINGS[dtype] * torch.finfo(dtype).eps, f"off by {float(off):.3g}"
