"""Shared parts of the quintet._cpu providers: the extension, its numbers for types, the layout of a tensor's rows."""

import functools
from typing import Any

import torch
from torch import Tensor

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as csrc/cpu/kernels/floats.h numbers them
Rows = tuple[int, int, int]  # row r begins r // inner * outer_stride + r % inner * inner_stride elements in


@functools.cache
def extension() -> Any:
    from quintet import _cpu

    return _cpu


def missing(name: str) -> str | None:
    """Why the extension does not serve a provider that calls `name`, or None."""
    try:
        from quintet import _cpu
    except ImportError as error:
        return f"the compiled extension is not there: {error}"
    if not hasattr(_cpu, name):
        return "the compiled extension is older than this provider; build it again with `make`"
    return None


def kind_of(dtype: torch.dtype) -> int:
    kind = KINDS.get(dtype)
    if kind is None:
        raise ValueError(f"native kernels compute in {', '.join(map(str, KINDS))}, not in {dtype}")
    return kind


def rows_of(x: Tensor) -> tuple[Tensor, Rows]:
    """x and its (inner, outer_stride, inner_stride); x itself wherever rows lie evenly on one axis or two."""
    if x.is_contiguous():
        return x, (1, x.shape[-1], 0)
    strides = x.stride()
    if strides[-1] == 1 and len(strides) == 2:
        return x, (1, strides[0], 0)
    if strides[-1] == 1 and len(strides) == 3:
        return x, (x.shape[1] or 1, strides[0], strides[1])
    return x.contiguous(), (1, x.shape[-1], 0)


def dense_operands(x: Tensor, bias: Tensor | None, outputs: int) -> tuple[Tensor, Tensor | None]:
    """x [T, K] with each row's numbers side by side, and the bias [outputs] in its type."""
    if x.stride(1) != 1 or x.stride(0) < x.shape[1]:
        x = x.contiguous()
    if bias is None:
        return x, None
    if bias.shape != (outputs,):
        raise ValueError(f"a bias of shape {tuple(bias.shape)} does not fit {outputs} outputs")
    return x, bias.to(x.dtype).contiguous()


def indices(x: Tensor) -> int:
    """The address of positions or ids."""
    if x.dtype != torch.int32 or not x.is_contiguous():
        raise ValueError(f"positions and ids are contiguous int32, not {x.dtype} with strides {x.stride()}")
    return x.data_ptr()
