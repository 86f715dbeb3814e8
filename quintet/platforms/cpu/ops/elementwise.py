"""Activations, and what else is computed number by number, by quintet._cpu: a number's result is its own alone.

An activation that the extension lacks is computed as the specification says; the others stay native.
"""

import functools
import logging

import torch
from torch import Tensor

from quintet.ops.activation import KINDS, activate, gated, split_limit
from quintet.ops.elementwise import add, add_row, scale, scale_heads, softcap
from quintet.platforms.cpu.arena import empty
from quintet.platforms.cpu.ops.extension import extension, kind_of, missing

logger = logging.getLogger(__name__)

NATIVE = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}  # where the extension's name is another


def probe() -> str | None:
    """Checks that every activation of 0 is 0."""
    if reason := missing("elementwise"):
        return reason
    names: tuple[str, ...] = extension().ELEMENTWISE
    got = torch.stack([_activate(torch.zeros(1), kind) for kind in KINDS if NATIVE.get(kind, kind) in names])
    return None if not got.any() else f"activations of 0 gave {got.tolist()}"


@functools.cache
def is_missing(kind: str) -> bool:
    """True if the extension has no such activation; logs a warning once."""
    kind, _ = split_limit(kind)
    if NATIVE.get(kind, kind) in extension().ELEMENTWISE:
        return False
    logger.warning(
        "activation %s: quintet._cpu has no kernel for it, so torch computes it, and steps with it are not recorded",
        kind,
    )
    return True


def gate_arguments(kind: str) -> tuple[int, int, int, float, float]:
    """Returns what the extension's experts() take for a kind of gated(): its number, no biases, alpha, the limit."""
    name, limit = split_limit(kind)
    return _kind_index(name), 0, 0, 0.0, limit or 0.0


@activate.provide("native", probe)
def _activate(x: Tensor, kind: str) -> Tensor:
    """Computed in float32, rounded once."""
    if is_missing(kind):
        plain: Tensor = activate.reference(x, kind)
        return plain
    return _flat(_kind_index(kind), x, x, False, 0.0)


@gated.provide("native", probe)
def _gated(x: Tensor, kind: str) -> Tensor:
    if is_missing(kind):
        plain: Tensor = gated.reference(x, kind)
        return plain
    tokens, both = x.shape
    width, size = both // 2, x.element_size()
    if both % 2:
        raise ValueError(f"gate beside up are {both} wide, which is odd")
    if x.stride(1) != 1:
        x = x.contiguous()
    out = empty((tokens, width), x.dtype)
    name, limit = split_limit(kind)
    stride, gate = x.stride(0), x.data_ptr()
    extension().elementwise(
        kind_of(x.dtype),
        _kind_index(name),
        True,
        out.data_ptr(),
        gate,
        gate + width * size,
        tokens,
        width,
        stride,
        stride,
        limit or 0.0,
    )
    return out


@add.provide("native", probe)
def _add(x: Tensor, y: Tensor) -> Tensor:
    if x.shape != y.shape or x.dtype != y.dtype:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} and y {tuple(y.shape)} {y.dtype} do not match")
    return _flat(_kind_index("add"), x, y, True, 0.0)


@add_row.provide("native", probe)
def _add_row(x: Tensor, row: Tensor) -> Tensor:
    if row.dtype != x.dtype or row.shape != x.shape[1:]:
        raise ValueError(f"a row {tuple(row.shape)} {row.dtype} does not fit {tuple(x.shape)} {x.dtype}")
    if x.stride(1) != 1 and x.shape[1] > 1:
        x = x.contiguous()
    row, out = row.contiguous(), empty(x.shape, x.dtype)
    extension().elementwise(
        kind_of(x.dtype), _kind_index("add"), False, out.data_ptr(), x.data_ptr(), row.data_ptr(), *x.shape,
        x.stride(0), 0, 0.0,
    )  # fmt: skip
    return out


@scale.provide("native", probe)
def _scale(x: Tensor, factor: float) -> Tensor:
    return _flat(_kind_index("scale"), x, x, True, factor)


@softcap.provide("native", probe)
def _softcap(x: Tensor, cap: float) -> Tensor:
    return _flat(_kind_index("softcap"), x, x, True, cap)


def probe_heads() -> str | None:
    """Two heads of one number, times 2 and 3."""
    if reason := missing("scale_heads"):
        return reason
    got = _scale_heads(torch.ones(1, 2, 1), torch.tensor([[2.0], [3.0]])).flatten().tolist()
    return None if got == [2.0, 3.0] else f"1 and 1 times 2 and 3 gave {got}"


@scale_heads.provide("native", probe_heads)
def _scale_heads(x: Tensor, factors: Tensor) -> Tensor:
    tokens, heads, dim = x.shape
    if factors.dtype != torch.float32 or not factors.is_contiguous() or not 0 < len(factors) <= heads:
        raise ValueError(f"factors {tuple(factors.shape)} {factors.dtype} do not fit {heads} heads")
    if x.stride(2) != 1 and dim > 1:
        x = x.contiguous()
    out = empty(x.shape, x.dtype)
    extension().scale_heads(
        kind_of(x.dtype), out.data_ptr(), x.data_ptr(), factors.data_ptr(), tokens, heads, len(factors), dim,
        x.stride(0), x.stride(1),
    )  # fmt: skip
    return out


def _flat(op: int, x: Tensor, y: Tensor, overwrites: bool, factor: float) -> Tensor:
    """`overwrites`: the result is in x's memory, if no other tensor shares that."""
    count, dtype = x.numel(), x.dtype
    if not x.is_contiguous():
        x, overwrites = x.contiguous(), False
    if not y.is_contiguous():
        y = y.contiguous()
    whole = overwrites and x.untyped_storage().nbytes() == count * x.element_size()
    out = x if whole else empty(x.shape, dtype)
    extension().elementwise(
        kind_of(dtype), op, False, out.data_ptr(), x.data_ptr(), y.data_ptr(), 1, count, count, count, factor
    )
    return out


@functools.cache
def _kind_index(kind: str) -> int:
    names: tuple[str, ...] = extension().ELEMENTWISE
    return names.index(NATIVE.get(kind, kind))
