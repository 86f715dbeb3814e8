"""Specifications of what Gemma 3n computes around its layers: streams of hidden states, and gates that are cut.

Google 2025; the streams are AltUp's (Baykal et al. 2023).
"""

import torch
from torch import Tensor
from torch.nn import functional

from quintet.ops.registry import Op

MIN_MEAN_SQUARE = 1e-5  # of a mean of squares that is divided by


@Op
def predict_streams(streams: tuple[Tensor, ...], coefs: Tensor) -> tuple[Tensor, ...]:
    """N streams [T, H] -> as many: the i-th and the sum over j of coefs[:, i N + j] times the j-th, coefs [T, N N] in
    their type. In float32, in the order of j, rounded once."""
    wide, count = [each.float() for each in streams], len(streams)
    made = []
    for i, own in enumerate(wide):
        gained = torch.zeros_like(own)
        for j, each in enumerate(wide):
            gained = gained + each * coefs[:, i * count + j, None].float()
        made.append((gained + own).to(streams[0].dtype))
    return tuple(made)


@Op
def correct_streams(
    streams: tuple[Tensor, ...], made: Tensor, coefs: Tensor, weight: Tensor, active: int
) -> tuple[Tensor, ...]:
    """N streams [T, H] -> as many: the i-th and coefs[:, i] + 1 times what `made` [T, H] is above the active one; coefs
    [T, N] in their type. In float32, rounded once. Behind them the new active one times `weight` [H]."""
    gained = made.float() - streams[active].float()
    out = [(gained * (coefs[:, i, None].float() + 1) + each.float()).to(each.dtype) for i, each in enumerate(streams)]
    return (*out, out[active] * weight)


@Op
def as_large(x: Tensor, like: Tensor) -> Tensor:
    """x [T, H] times rms(like) / rms(x), by rows; the mean of x's squares counts as 1e-5 at least. In float32, rounded
    once."""
    wanted = like.float().pow(2).mean(-1, keepdim=True).sqrt()
    there = x.float().pow(2).mean(-1, keepdim=True).clamp(min=MIN_MEAN_SQUARE).sqrt()
    return (x.float() * wanted / there).to(x.dtype)


@Op
def keep_above(x: Tensor, deviations: float) -> Tensor:
    """x [T, 2 I] is gate beside up: the gate's numbers become what they are above their row's mean and so many standard
    deviations, 0 at least; up stays. In float32, rounded once."""
    gate, up = x.chunk(2, dim=-1)
    wide = gate.float()
    mean = wide.mean(-1, keepdim=True)
    least = mean + (wide - mean).pow(2).mean(-1, keepdim=True).sqrt() * deviations
    return torch.cat([functional.relu(wide - least).to(x.dtype), up], -1)


@Op
def known_ids(ids: Tensor, count: int) -> Tensor:
    """ids [T] int32, those outside of 0..count-1 as 0."""
    return torch.where((ids >= 0) & (ids < count), ids, 0)
