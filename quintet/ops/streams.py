"""Specifications of what is computed around layers of several streams of hidden states, and of gates that are cut.

Gemma 3n's (Google 2025), whose streams are AltUp's (Baykal et al. 2023), and those of hyper-connections (Zhu et al.
2024; with doubly stochastic matrices, Xie et al. 2026).
"""

from typing import NamedTuple

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


class StreamGateSizes(NamedTuple):
    """Constants of stream_gates()."""

    streams: int  # N
    eps: float  # added to the sigmoids of inputs, and to what is divided by
    magnitude: float = 0.0  # factor of the sigmoids of outputs
    output_eps: float = 0.0  # added to them
    iterations: int = 0  # Sinkhorn-Knopp's, of the matrices


@Op
def stream_gates(logits: Tensor, scale: Tensor, base: Tensor, sizes: StreamGateSizes) -> Tensor:
    """Weights [T, K] of N streams before, after and across a layer, of logits [T, K]; everything is float32.

    K is N, 2 N or 2 N + N N: N inputs are sigmoid + eps, N outputs magnitude * sigmoid + output_eps, and N N the rows
    of a matrix, softmax + eps, whose columns and rows then are divided by their sums + eps in turns: iterations times,
    first and last the columns. The logits of each kind are multiplied by its scale ([1], [2] or [3]), and base [K] is
    added.
    """
    count, eps = sizes.streams, sizes.eps
    wide = zip(scale.split(1), (count, count, count * count), strict=False)
    logits = logits * torch.cat([each.expand(width) for each, width in wide]) + base
    # torch's own sigmoid rounds the last few elements of a tensor otherwise
    plain = 1 / (1 + logits[:, : 2 * count].neg().exp())
    found = [plain[:, :count] + eps]
    if logits.shape[1] > count:
        found.append(plain[:, count:] * sizes.magnitude + sizes.output_eps)
    if logits.shape[1] > 2 * count:
        found.append(_doubly_stochastic(logits[:, 2 * count :].reshape(-1, count, count), sizes).flatten(1))
    return torch.cat(found, -1)


def _doubly_stochastic(matrices: Tensor, sizes: StreamGateSizes) -> Tensor:
    """[T, N, N], by Sinkhorn-Knopp (Sinkhorn and Knopp 1967)."""
    columns, rows = 1, 2

    def divided(x: Tensor, axis: int) -> Tensor:
        total = sum(x.unbind(axis)[1:], x.unbind(axis)[0])  # in order, whatever the number of tokens
        return x / (total.unsqueeze(axis) + sizes.eps)

    powers = (matrices - matrices.amax(rows, keepdim=True)).exp()
    x = powers / sum(powers.unbind(rows)[1:], powers.unbind(rows)[0]).unsqueeze(rows) + sizes.eps
    x = divided(x, columns)
    for _ in range(sizes.iterations - 1):
        x = divided(divided(x, rows), columns)
    return x


@Op
def collapse_streams(x: Tensor, gates: Tensor, streams: int) -> Tensor:
    """N streams, x [T, N H] -> their sum [T, H], the i-th times gates[:, i]; gates [T or 1, >= N] float32. In float32,
    in order, rounded once."""
    total: Tensor | None = None
    for i, stream in enumerate(x.chunk(streams, dim=-1)):
        part = stream.float() * gates[:, i, None]
        total = part if total is None else total + part
    assert total is not None, "there is a stream"
    return total.to(x.dtype)


@Op
def expand_streams(x: Tensor, layer_output: Tensor, gates: Tensor) -> Tensor:
    """N streams after a layer: x [T, N H] and what the layer made of them [T, H] -> [T, N H].

    The k-th is layer_output times the k-th output of gates (see stream_gates) and the sum over j of the j-th stream
    times entry [j, k] of the matrix, or without matrices the k-th stream. In float32, in order, rounded once.
    """
    count = x.shape[1] // layer_output.shape[1]
    wide, made = [each.float() for each in x.chunk(count, dim=-1)], layer_output.float()
    found = []
    for k, stream in enumerate(wide):
        total = made * gates[:, count + k, None]
        if gates.shape[1] == 2 * count:
            found.append(total + stream)
            continue
        for j, each in enumerate(wide):
            total = total + each * gates[:, 2 * count + j * count + k, None]
        found.append(total)
    return torch.cat(found, -1).to(x.dtype)


@Op
def repeat_streams(x: Tensor, streams: int) -> Tensor:
    """x [T, H] -> N streams [T, N H], each of them x."""
    return x.repeat(1, streams)
