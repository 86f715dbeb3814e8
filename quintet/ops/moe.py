"""Specifications of the mixture of experts: routing of tokens, and the experts' outputs."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from quintet.interface.weights import Matrix
from quintet.ops.activation import activate, gated
from quintet.ops.linear import linear
from quintet.ops.lora import add_lora
from quintet.ops.registry import Op


@Op
def route(logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The k largest of logits [T, E], largest first, equal ones by id -> weights [T, k] float32 and ids [T, k] int32.

    Weights are softmax(logits), in float32; renormalised, those of a token add up to 1. Mixtral (Jiang et al. 2024).
    """
    logits = logits.float()
    ids = _largest(logits, k)
    weights = logits.softmax(-1).gather(1, ids)
    return _renormalized(weights, renormalize), ids.to(torch.int32)


@Op
def route_grouped(
    logits: Tensor, bias: Tensor, k: int, groups: int, kept: int, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """route() with weights sigmoid(logits), chosen by weight + bias [E] from `kept` of the `groups` of experts.

    A group is E / groups neighbours, and ranks by the sum of its two largest. DeepSeek-V3 (2024), section 2.1.2;
    its scaling factor is left to the caller.
    """
    # torch's own sigmoid rounds the last few elements of a tensor otherwise: a token's weight would depend on its place
    weights = 1 / (1 + logits.float().neg().exp())
    ranks = weights + bias.float()
    if kept < groups:
        each = ranks.reshape(-1, groups, ranks.shape[1] // groups)
        best = _largest(each.topk(2, -1).values.sum(-1), kept)
        chosen = torch.zeros_like(each[..., 0], dtype=torch.bool).scatter(1, best, True)
        ranks = torch.where(chosen[..., None], each, float("-inf")).reshape(ranks.shape)
    ids = _largest(ranks, k)
    return _renormalized(weights.gather(1, ids), renormalize), ids.to(torch.int32)


@Op
def route_limited(
    logits: Tensor, bias: Tensor, k: int, groups: int, kept: int, renormalize: bool
) -> tuple[Tensor, Tensor]:
    """route() chosen by weight + bias [E] from `kept` of the `groups` of experts, which rank by their largest.

    DeepSeek-V2 (2024), section 2.2.2, without a bias; Ernie 4.5 (2025) with one, and one group.
    """
    weights = logits.float().softmax(-1)
    ranks = weights + bias.float()
    if kept < groups:
        each = ranks.reshape(-1, groups, ranks.shape[1] // groups)
        best = _largest(each.amax(-1), kept)
        chosen = torch.zeros_like(each[..., 0], dtype=torch.bool).scatter(1, best, True)
        ranks = torch.where(chosen[..., None], each, float("-inf")).reshape(ranks.shape)
    ids = _largest(ranks, k)
    return _renormalized(weights.gather(1, ids), renormalize), ids.to(torch.int32)


@Op
def route_sparse(logits: Tensor, k: int, margin: float) -> tuple[Tensor, Tensor]:
    """Experts one after the other: the largest of logits [T, E], then the largest of the others, ... -> as route().

    Each is weighed by a softmax over those that are left and near it, the larger by `margin` of max(|logit|, largest)
    at most: in float32. SparseMixer's choice without its training (Liu et al. 2023; GRIN, Liu et al. 2024).
    """
    left, weights, ids = logits.float(), [], []
    for _ in range(k):
        best = _largest(left, 1)
        most = left.gather(1, best)
        far = (most - left) / left.abs().maximum(most) > margin
        weights.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(1, best))
        ids.append(best)
        left = left.scatter(1, best, float("-inf"))
    return torch.cat(weights, 1), torch.cat(ids, 1).to(torch.int32)


@Op
def route_softplus(logits: Tensor, bias: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """route() with weights sqrt(softplus(logits)), chosen by weight + bias [E], renormalised. DeepSeek-V4 (2026)."""
    weights = _root_softplus(logits)
    ids = _largest(weights + bias.float(), k)
    return _renormalized(weights.gather(1, ids) + 1e-20, True), ids.to(torch.int32)


@Op
def route_hashed(logits: Tensor, token_ids: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """route_softplus() of the experts table[token] that each token's id has, in that order; table [V, k] int32, ids
    past it count as its last. DeepSeek-V4 (2026), section 2.1."""
    ids = torch.index_select(table, 0, token_ids.clamp(0, len(table) - 1))
    return _renormalized(_root_softplus(logits).gather(1, ids.long()) + 1e-20, True), ids


def _root_softplus(logits: Tensor) -> Tensor:
    x = logits.float()
    return torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20)))).sqrt()


HASHED_FEATURES = 4  # numbers of a token that choose between copies of an expert


@Op
def local_experts(x: Tensor, ids: Tensor, places: Tensor) -> Tensor:
    """This rank's places of the experts ids [T, k] int32 of tokens x [T, D] -> [T, k] int32, -1 for those of others.

    places [E, C] int32 (expert_map): by column, the place in the rank's stacks of an expert's copy, -1 on another rank.
    A token takes the column that the bits of its first numbers give in float32: alike on every rank, in every
    batch. An id outside of 0..E-1 gives -1.
    """
    num, columns = places.shape
    known = (ids >= 0) & (ids < num)
    bits = x[:, :HASHED_FEATURES].float().contiguous().view(torch.int32).long().sum(1)
    column = ((bits >> 8 & 0xFFFFFF) * 0x9E3779B1 >> 20) % columns
    found = places[torch.where(known, ids, 0).long(), column[:, None]]
    return torch.where(known, found, -1)


@Op
def count_experts(ids: Tensor, loads: Tensor) -> Tensor:
    """Adds to loads [E] int32, in place and modulo 2**32, how often each expert is in ids [T, k] int32 -> loads."""
    num = loads.shape[0]
    flat = torch.where((ids >= 0) & (ids < num), ids, num).reshape(-1).long()
    counts = torch.zeros(num + 1, dtype=torch.int32, device=ids.device)
    return loads.add_(counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))[:num])


def _largest(x: Tensor, k: int) -> Tensor:
    """Places of the k largest of each row, largest first, equal ones by place; torch.topk promises no order."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[:, :k]


def _renormalized(weights: Tensor, renormalize: bool) -> Tensor:
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights


@Op
def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x [M, K] by weight [E, N, K] -> [M, N]: the first counts[0] rows by weight[0], the next counts[1] by weight[1]...

    counts [E] int32; rows past their sum give 0. Adds up in float32 and rounds once, as linear does.
    """
    ends = counts.cumsum(0)
    owners = (torch.arange(x.shape[0], device=x.device)[:, None] >= ends).sum(-1, keepdim=True)  # [M, 1]
    out: Tensor | float = 0.0
    for expert, matrix in enumerate(weight.unbind(0)):
        out = torch.where(owners == expert, functional.linear(x, matrix), out)
    assert isinstance(out, Tensor), "there is an expert"
    return out


@Op
def experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, kind: str) -> Tensor:
    """Sum over j of weights[t, j] * down[e] @ gated(gate_up[e] @ x[t]), where e = ids[t, j] -> [T, D] like x.

    x [T, D], gate_up [E, 2 I, D] (gate before up), down [E, D, I], weights [T, k] float32, ids [T, k] int32. An id
    outside of 0..E-1 adds nothing: an expert of another rank, or padding. The sum is float32, in the order of j.
    """

    def serve(rows: Tensor, counts: Tensor) -> Tensor:
        inner = gated.reference(grouped_linear.reference(rows, gate_up, counts), kind)
        found: Tensor = grouped_linear.reference(inner, down, counts)
        return found

    return run_by_expert(x, weights, ids, gate_up.shape[0], serve)


@Op
def ungated_experts(x: Tensor, up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, kind: str) -> Tensor:
    """experts() without gates: down[e] @ kind(up[e] @ x[t]), with up [E, I, D] (Nemotron 3; NVIDIA 2025)."""

    def serve(rows: Tensor, counts: Tensor) -> Tensor:
        inner = activate.reference(grouped_linear.reference(rows, up, counts), kind)
        found: Tensor = grouped_linear.reference(inner, down, counts)
        return found

    return run_by_expert(x, weights, ids, up.shape[0], serve)


@Op
def quantized_experts(x: Tensor, gate_up: Matrix, down: Matrix, weights: Tensor, ids: Tensor, kind: str) -> Tensor:
    """experts() with stacks [E, 2 I, D] and [E, D, I] that are not plain: each product is linear()'s by such a matrix.

    The stacks may be in different formats. Called where Capabilities.weight_formats has "experts"; otherwise experts
    are floats.
    """
    each = x.new_zeros(*ids.shape, x.shape[1])
    for expert in range(len(down.values)):
        served = (ids == expert).nonzero(as_tuple=True)  # tokens, and the places that the expert has among theirs
        if len(served[0]):
            inner = gated.reference(linear.reference(x[served[0]], expert_matrix(gate_up, expert), None, (0,)), kind)
            each[served] = linear.reference(inner, expert_matrix(down, expert), None, (0,))
    return (each.float() * weights[..., None]).sum(1).to(x.dtype)


@Op
def biased_experts(
    x: Tensor,
    stacks: tuple[Matrix, Matrix],
    biases: tuple[Tensor, Tensor],
    weights: Tensor,
    ids: Tensor,
    clamp: tuple[float, float],
) -> Tensor:
    """experts() with biases and another gate (gpt-oss; OpenAI 2025): down[e] @ inner + its bias.

    stacks [E, 2 I, D] and [E, D, I], plain or, where quantized_experts() is called, in any format; biases [E, 2 I] and
    [E, D]. Of the first product's outputs 2 i is gate's and 2 i + 1 up's. With clamp (alpha, limit), inner is
    (up + 1) * gate * sigmoid(alpha * gate), where gate is at most the limit, and up within it.
    """
    gate_up, down = stacks

    def serve(rows: Tensor, counts: Tensor) -> Tensor:
        both = _grouped(rows, gate_up, counts) + _of_owners(biases[0], counts, len(rows))
        inner = clamped(both, clamp)
        return _grouped(inner, down, counts) + _of_owners(biases[1], counts, len(rows))

    # an id outside of 0..E-1 adds nothing, and a bias is added to every row
    known = (ids >= 0) & (ids < len(down.values))
    return run_by_expert(x, torch.where(known, weights, 0.0), ids, len(down.values), serve)


def clamped(both: Tensor, clamp: tuple[float, float]) -> Tensor:
    """biased_experts()'s gate: [M, 2 I] -> [M, I], in float32, rounded once."""
    alpha, limit = clamp
    pairs = both.float().reshape(both.shape[0], -1, 2)
    gate, up = pairs[:, :, 0].clamp(max=limit), pairs[:, :, 1].clamp(-limit, limit)
    return ((up + 1) * (gate / (1 + (gate * -alpha).exp()))).to(both.dtype)


class ExpertGate(NamedTuple):
    """Computation of experts between their two products."""

    kind: str = ""  # gated()'s; "": biased_experts()'s gate
    biases: tuple[Tensor, Tensor] | None = None  # [E, 2 I] and [E, D]
    clamp: tuple[float, float] = (0.0, 0.0)


class ExpertsLoRA(NamedTuple):
    """Adapters of experts as add_lora() takes them: expert e of the adapter in slot s is number (s - 1) E + e."""

    gate_up_a: Tensor  # [S E, P, R, D]
    gate_up_b: Tensor  # [S E, R, 2 I]
    down_a: Tensor  # [S E, 1, R, I]
    down_b: Tensor  # [S E, R, D]
    ranks: Tensor  # [S E, P + 1] int32: rows of each part of gate_up, and of down
    slots: Tensor  # [T] int32: 1 + a token's slot, 0: none
    columns: tuple[tuple[int, int], ...]  # (part, width) of the outputs of gate_up


class ExpertProducts(NamedTuple):
    """Products that lora_experts() is made of."""

    experts: int
    multiply: Callable[[Tensor, int, Tensor], Tensor]  # rows sorted by expert, by stack 0 or 1, and the experts' counts
    add_lora: Callable[..., Tensor]


@Op
def lora_experts(
    x: Tensor, stacks: tuple[Matrix, Matrix], gate: ExpertGate, weights: Tensor, ids: Tensor, lora: ExpertsLoRA
) -> Tensor:
    """experts(), quantized_experts() or, with biases, biased_experts(), with add_lora() after each of both products.

    A token without an adapter has their result, to the bit. Called in steps with adapters, where
    Capabilities.lora_experts is set.
    """

    def multiply(rows: Tensor, stack: int, counts: Tensor) -> Tensor:
        return _grouped(rows, stacks[stack], counts)

    products = ExpertProducts(len(stacks[0].values), multiply, add_lora.reference)
    return run_lora_experts(x, gate, weights, ids, lora, products)


def run_lora_experts(
    x: Tensor, gate: ExpertGate, weights: Tensor, ids: Tensor, lora: ExpertsLoRA, products: ExpertProducts
) -> Tensor:
    """lora_experts() by these products."""
    num, parts = products.experts, lora.ranks.shape[1] - 1
    known = (ids >= 0) & (ids < num)
    adapters = torch.where(known & (lora.slots[:, None] > 0), (lora.slots[:, None] - 1) * num + ids + 1, 0)
    adapters = adapters.reshape(-1)[_by_expert(ids, num)[1]].to(torch.int32)  # of the sorted rows

    def serve(rows: Tensor, counts: Tensor) -> Tensor:
        both = products.multiply(rows, 0, counts)
        both = products.add_lora(both, rows, lora.gate_up_a, lora.gate_up_b, lora.ranks, adapters, 0, lora.columns)
        if gate.biases is None:
            inner = gated.reference(both, gate.kind)
        else:
            inner = clamped(both + _of_owners(gate.biases[0], counts, len(rows)), gate.clamp)
        out, whole = products.multiply(inner, 1, counts), ((0, rows.shape[1]),)
        out = products.add_lora(out, inner, lora.down_a, lora.down_b, lora.ranks, adapters, parts, whole)
        return out if gate.biases is None else out + _of_owners(gate.biases[1], counts, len(rows))

    return run_by_expert(x, torch.where(known, weights, 0.0), ids, num, serve)


def _of_owners(biases: Tensor, counts: Tensor, rows: int) -> Tensor:
    """Each row's bias; of rows without an expert, which count for nothing, the last one's."""
    owners = (torch.arange(rows, device=counts.device)[:, None] >= counts.cumsum(0)).sum(-1)
    return torch.index_select(biases, 0, owners.clamp(max=len(biases) - 1))


def _grouped(x: Tensor, stack: Matrix, counts: Tensor) -> Tensor:
    """grouped_linear() of any format."""
    if stack.format.plain:
        plain: Tensor = grouped_linear.reference(x, stack.values, counts)
        return plain
    firsts = [0, *counts.cumsum(0).tolist()]
    served = [
        linear.reference(x[first:last], expert_matrix(stack, expert), None, (0,))
        for expert, (first, last) in enumerate(zip(firsts[:-1], firsts[1:], strict=True))
    ]
    return torch.cat([*served, x.new_zeros(len(x) - firsts[-1], served[0].shape[1])])


def expert_matrix(stack: Matrix, expert: int) -> Matrix:
    """A stack's matrix [N, K]."""
    values, scales, zeros, _, fmt, mins = stack
    rest = (None if each is None else each[expert] for each in (scales, zeros, mins))
    scales, zeros, mins = rest
    return Matrix(values[expert], scales, zeros, format=fmt, mins=mins)


def run_by_expert(
    x: Tensor, weights: Tensor, ids: Tensor, num: int, serve: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """experts() around `serve`: rows [T k, D], sorted by expert, and counts [num] -> what comes out of each row."""
    k, (flat, order) = ids.shape[1], _by_expert(ids, num)
    counts = (flat[:, None] == torch.arange(num, device=x.device)).sum(0, dtype=torch.int32)
    rows = torch.index_select(x, 0, torch.div(order, k, rounding_mode="floor"))
    back = torch.sort(order).indices  # where each (token, j) went
    each = torch.index_select(serve(rows, counts), 0, back).reshape(*ids.shape, x.shape[1])
    return (each.float() * weights[..., None]).sum(1).to(x.dtype)


def _by_expert(ids: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Experts of all (token, j) [T k], `num` where none is here, and their order by expert."""
    flat = torch.where((ids >= 0) & (ids < num), ids, num).reshape(-1)
    return flat, torch.sort(flat, stable=True).indices
