"""ggml's blocks (llama.cpp, ggml-common.h) of floats: K-quants by a plain search of scales, the others by package gguf.

Without an importance matrix: each value weighs as much as it is large. A super-block has 256 values of a row.
"""

from collections.abc import Callable

import torch
from torch import Tensor

SUPER = 256
VALUES = 2**17  # that are encoded at a time: they stay in a processor's caches
SMALLEST = 1e-30
KINDS = ("Q4_K", "Q5_K", "Q6_K")


def encoded(weight: Tensor, kind: str) -> Tensor:
    """weight [N, K], K a multiple of SUPER -> uint8 [N, bytes of a row], of Q4_K, Q5_K or Q6_K."""
    rows = max(1, VALUES // weight.shape[1])
    parts = [_BLOCKS[kind](part.float().reshape(-1, SUPER)) for part in weight.split(rows)]
    return torch.cat(parts).reshape(len(weight), -1)


def _q4_k(x: Tensor) -> Tensor:
    """16-bit scale and scale of minima, 6 bits of each for 8 groups of 32, 4 bits of each value."""
    head, values = _affine(x, 15)
    pairs = values.reshape(-1, 4, 2, 32)
    return torch.cat([head, (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)], 1)


def _q5_k(x: Tensor) -> Tensor:
    """The same with a fifth bit of each value, of group i at height i."""
    head, values = _affine(x, 31)
    fifth = (values.reshape(-1, 8, 32) >> 4 << torch.arange(8, dtype=torch.uint8)[:, None]).sum(1).to(torch.uint8)
    pairs = (values & 15).reshape(-1, 4, 2, 32)
    return torch.cat([head, fifth, (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)], 1)


def _q6_k(x: Tensor) -> Tensor:
    """Low 4 bits, high 2 bits, 8-bit scales of 16 groups of 16, a 16-bit scale of these."""
    groups = x.reshape(-1, 16, 16)
    scales = _symmetric(groups, 32)
    largest = torch.take_along_dim(scales, scales.abs().argmax(1, keepdim=True), 1)
    whole = _half(largest / -128)
    steps = torch.where(whole == 0, 0.0, scales / _safe(whole)).round().clamp(-128, 127)
    each = (whole * steps)[..., None]
    values = (torch.where(each == 0, 0.0, groups / _safe(each)).round().clamp(-32, 31) + 32).to(torch.uint8)
    halves = values.reshape(-1, 2, 4, 32)
    low = (halves[:, :, :2] & 15) | (halves[:, :, 2:] & 15) << 4
    high = (halves >> 4 << torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]).sum(2).to(torch.uint8)
    return torch.cat([low.flatten(1), high.flatten(1), steps.to(torch.int8).view(torch.uint8), _bytes(whole)], 1)


_BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}


def _affine(x: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Super-blocks [B, 256] as value * scale - minimum, values up to `top` -> their first 16 bytes, uint8 [B, 256]."""
    groups = x.reshape(-1, 8, 32)
    scales, mins = _fitted(groups, top)
    both = [_half(each.amax(1, keepdim=True) / 63) for each in (scales, mins)]
    pairs = zip((scales, mins), both, strict=True)
    steps = [torch.where(whole == 0, 0.0, each / _safe(whole)).round().clamp(0, 63) for each, whole in pairs]
    scale, low = ((whole * step)[..., None] for whole, step in zip(both, steps, strict=True))
    values = torch.where(scale == 0, 0.0, (groups + low) / _safe(scale)).round().clamp(0, top)
    s, m = (step.to(torch.uint8) for step in steps)
    packed = [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4]
    return torch.cat([*(_bytes(each) for each in both), *packed], 1), values.flatten(1).to(torch.uint8)


def _fitted(x: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Groups [B, G, C] -> scale and minimum >= 0 [B, G] of the least weighted squared error: for some numbers of
    steps, values are rounded, and both fitted to them by least squares."""
    weights = x.square().mean(-1, keepdim=True).sqrt() + x.abs()
    low = x.amin(-1).clamp(max=0.0)
    reach = x.amax(-1).clamp(min=0.0) - low
    best, found = None, (reach / top, -low)
    for step in [top + each / 10 for each in range(-8, 9, 2)]:
        values = ((x - low[..., None]) * (step / _safe(reach))[..., None]).round().clamp(0, top)
        scale, minimum = _least_squares(x, values, weights)
        error = (weights * (values * scale[..., None] - minimum[..., None] - x).square()).sum(-1)
        if best is None:
            plain = (x - low[..., None]) * (top / _safe(reach))[..., None]
            best = (weights * (plain.round() - plain).square()).sum(-1) * (reach / top).square()
        better = (error < best) & (scale >= 0)
        best = torch.where(better, error, best)
        found = torch.where(better, scale, found[0]), torch.where(better, minimum, found[1])
    return found


def _least_squares(x: Tensor, values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum, the latter 0 where it would be below."""
    w, wv, wx = weights.sum(-1), (weights * values).sum(-1), (weights * x).sum(-1)
    wvv, wvx = (weights * values * values).sum(-1), (weights * values * x).sum(-1)
    determinant = w * wvv - wv * wv
    scale = (w * wvx - wx * wv) / _safe(determinant)
    minimum = (wv * wvx - wvv * wx) / _safe(determinant)
    alone = wvx / _safe(wvv)
    usable = (minimum > 0) & (determinant > 0)
    return torch.where(usable, scale, alone), torch.where(usable, minimum, 0.0)


def _symmetric(x: Tensor, middle: int) -> Tensor:
    """Groups [B, G, C] -> scales [B, G] of the least weighted squared error, for values of -middle .. middle - 1."""
    largest = torch.take_along_dim(x, x.abs().argmax(-1, keepdim=True), -1)
    weights = x.square()
    best, found = torch.zeros(x.shape[:-1]), torch.zeros(x.shape[:-1])
    for step in [-middle + each / 10 for each in range(-8, 9, 2)]:
        values = (x * (step / _safe(largest))).round().clamp(-middle, middle - 1)
        product, square = (weights * values * x).sum(-1), (weights * values * values).sum(-1)
        gain = product.square() / _safe(square)
        better = (gain > best) & (square > 0)
        best, found = torch.where(better, gain, best), torch.where(better, product / _safe(square), found)
    return found


def _safe(x: Tensor) -> Tensor:
    return torch.where(x.abs() < SMALLEST, 1.0, x)


def _half(x: Tensor) -> Tensor:
    return x.half().float()


def _bytes(x: Tensor) -> Tensor:
    return x.half().contiguous().view(torch.uint8)
