"""Specification of the rotary position embedding."""

import torch
from torch import Tensor

from quintet.interface.types import HeadNorms, RotaryArgs
from quintet.ops.norm import rms_norm
from quintet.ops.registry import Op


@Op
def rotary(q: Tensor, k: Tensor, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Turns q [T, H, D] and k [T, Hkv, D] by their positions [T]; Su et al. 2021, the halves paired.

    table [max_position, rot] float32 holds rot/2 cosines and then rot/2 sines per position; features past rot stay.
    """
    cos, sin = torch.index_select(table, 0, positions)[:, None, :].to(q.dtype).chunk(2, dim=-1)
    return _turn(q, cos, sin), _turn(k, cos, sin)


@Op
def pair_rotary(q: Tensor, k: Tensor, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """rotary() where neighbours are paired (GPT-J 2021): features 2 i and 2 i + 1 of the first rot.

    The results have the first of each pair, then the second, as rotary()'s: q and k alike, so that scores are the same.
    """
    rot = table.shape[1]
    return rotary.reference(_split_pairs(q, rot), _split_pairs(k, rot), table, positions)


@Op
def norm_rotary(q: Tensor, k: Tensor, norms: HeadNorms, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """rotary() of q and k, each head's features normalised by rms_norm() before (QK-norm; Dehghani et al. 2023)."""
    q = rms_norm.reference(q, norms.q, norms.eps, norms.offset)
    k = rms_norm.reference(k, norms.k, norms.eps, norms.offset)
    return rotary.reference(q, k, table, positions)


def apply_rotary(q: Tensor, k: Tensor, args: RotaryArgs, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates q and k by the specification that serves these arguments."""
    if args.norms is not None:
        return norm_rotary.reference(q, k, args.norms, args.cos_sin, positions)
    op = pair_rotary if args.interleaved else rotary
    return op.reference(q, k, args.cos_sin, positions)


def _split_pairs(x: Tensor, rot: int) -> Tensor:
    """x [T, H, D] with the first of each pair of its first rot features before the second."""
    pairs = x[..., :rot].unflatten(-1, (rot // 2, 2)).transpose(-1, -2).flatten(-2)
    return torch.cat([pairs, x[..., rot:]], dim=-1)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
