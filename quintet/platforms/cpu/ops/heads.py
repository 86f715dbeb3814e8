"""Products by heads with a weight each, by quintet._cpu: those of linear(), head by head.

Weights are packed as those of experts are. What was not packed has its own shape, and goes to torch.
"""

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from quintet.interface.weights import Weight
from quintet.ops.linear import by_heads
from quintet.platforms.cpu.arena import empty
from quintet.platforms.cpu.ops import linear
from quintet.platforms.cpu.ops import moe as native_moe
from quintet.platforms.cpu.ops.extension import KINDS, extension, kind_of, missing

USES = ("heads", "transposed heads")


@functools.cache
def probe() -> str | None:
    """Two heads of one token, one doubled and one halved."""
    if reason := missing("linear_by_heads"):
        return reason
    for dtype in KINDS:
        x, scales = torch.tensor([[[1.0, 2.0], [4.0, 8.0]]], dtype=dtype), torch.tensor([2.0, 0.5], dtype=dtype)
        packed = native_moe.pack_experts(torch.eye(2, dtype=dtype) * scales[:, None, None])
        got = _product(x, packed, 2).tolist()
        if got != [[[2.0, 4.0], [2.0, 4.0]]]:
            return f"heads in {dtype} gave {got}"
    return None


def can_pack(weight: Weight) -> bool:
    """True if pack() takes it."""
    return weight.use in USES and probe() is None and not _sizes(weight)[1] % linear.PAIRS[weight.dtype]


def _sizes(weight: Weight) -> tuple[int, int]:
    """Outputs and inputs of a head."""
    first, second = weight.shape[1:]
    return (second, first) if weight.use == USES[1] else (first, second)


def packed_bytes(weight: Weight) -> int:
    """Returns the bytes of pack()'s result."""
    return weight.stack * linear.packed_bytes(_sizes(weight), weight.dtype)


def pack(weight: Weight, tensors: Mapping[str, Tensor]) -> Tensor:
    """Packs the checkpoint's tensors -> [H, blocks, depth, lanes]."""
    local = weight.local(tensors).to(weight.dtype)
    return native_moe.pack_experts(local.mT.contiguous() if weight.use == USES[1] else local)


@by_heads.provide("native", probe)
def _by_heads(x: Tensor, weight: Tensor, outputs: int, transposed: bool) -> Tensor:
    if weight.dim() == 3:
        plain: Tensor = by_heads.providers["torch"](x, weight, outputs, transposed)
        return plain
    return _product(x, weight, outputs)


def _product(x: Tensor, weight: Tensor, outputs: int) -> Tensor:
    """x [T, H, K] by packed weights -> [T, H, outputs]."""
    (tokens, heads, inputs), pair = x.shape, linear.PAIRS.get(x.dtype, 1)
    blocks = -(-outputs // extension().LINEAR_COLUMNS)
    if weight.dtype != x.dtype or weight.shape[:3] != (heads, blocks, -(-inputs // pair)):
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} does not fit packed heads {tuple(weight.shape)} {weight.dtype}")
    if x.stride(2) != 1 or x.stride(1) < inputs or x.stride(0) < heads * inputs:
        x = x.contiguous()
    out = empty((tokens, heads, outputs), x.dtype)
    extension().linear_by_heads(
        kind_of(x.dtype), out.data_ptr(), x.data_ptr(), x.stride(0), x.stride(1), weight.data_ptr(), tokens, heads,
        inputs, outputs,
    )  # fmt: skip
    return out
