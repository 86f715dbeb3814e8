"""Torch providers for host memory, each batch invariant.

An element is computed in one order whatever the batch, so that a request's results do not depend on its neighbours,
bit for bit.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from quintet.interface.weights import Matrix
from quintet.ops.activation import KINDS, ClampedGate, activate, gated, split_limit
from quintet.ops.linear import by_heads, linear
from quintet.ops.moe import biased_experts, clamped, expert_matrix, experts

TILED_ROWS = 64  # that oneDNN multiplies at a time with AMX


def _try_linear() -> str | None:
    try:
        _linear(torch.ones(1, 8), Matrix(torch.ones(8, 8)), None, (8,))
    except RuntimeError as error:
        return f"oneDNN refuses a float32 product: {str(error).splitlines()[0]}"
    return None


@linear.provide("torch", _try_linear)
def _linear(x: Tensor, weight: Matrix, bias: Tensor | None, outputs: tuple[int, ...]) -> Tensor:
    """oneDNN's inner product.

    In float32 it adds in another order for one row alone, so one row goes twice; in bfloat16, on AVX-512 without
    instructions for that, for numbers of rows that are no multiple of 8; with AMX the order hangs on how many rows
    there are, so equally many go at a time.
    """
    if x.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        pieces = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % TILED_ROWS)).split(TILED_ROWS)
        return torch.cat([torch.nn.functional.linear(each, weight.values, bias) for each in pieces])[: x.shape[0]]
    if x.dtype == torch.bfloat16 and torch.cpu._is_avx512_supported() and not torch.cpu._is_avx512_bf16_supported():
        filled = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % 8))
        return torch.nn.functional.linear(filled, weight.values, bias)[: x.shape[0]]
    if x.dtype != torch.float32:
        return torch.nn.functional.linear(x, weight.values, bias)
    product = torch.ops.mkldnn._linear_pointwise
    if x.shape[0] == 1:
        alone: Tensor = product(x.expand(2, -1).contiguous(), weight.values, bias, "none", [], "")
        return alone[:1]
    result: Tensor = product(x, weight.values, bias, "none", [], "")
    return result


# torch's own silu and gelu round the last few elements of a tensor, which do not fill a vector, otherwise than the
# rest, so a request's results would depend on where it stands. exp, erf, tanh and plain arithmetic do not.


def _silu(x: Tensor) -> Tensor:
    return x / x.neg().exp_().add_(1)


def _gelu(x: Tensor) -> Tensor:
    return (x * math.sqrt(0.5)).erf_().add_(1).mul_(x).mul_(0.5)


def _gelu_tanh(x: Tensor) -> Tensor:
    inner = (x * x).mul_(0.044715).add_(1).mul_(x).mul_(math.sqrt(2 / math.pi))  # of x + 0.044715 x**3
    return inner.tanh_().add_(1).mul_(x).mul_(0.5)


EVEN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "silu": _silu,
}


@activate.provide("torch")
def _activate(x: Tensor, kind: str) -> Tensor:
    """In float32, rounded once."""
    return EVEN[kind](x.float()).to(x.dtype) if kind in EVEN else KINDS[kind](x)


@gated.provide("torch")
def _gated(x: Tensor, kind: str) -> Tensor:
    if ClampedGate.of(kind) is not None:
        plain: Tensor = gated.reference(x, kind)
        return plain
    name, limit = split_limit(kind)
    gate, up = x.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return _activate(gate, name) * up


@experts.provide("torch")
def _experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, kind: str) -> Tensor:
    """Expert by expert, each on the tokens that it serves."""
    each = x.new_zeros(*ids.shape, x.shape[1])  # [T, k, D]
    for expert, (first, second) in enumerate(zip(gate_up, down, strict=True)):
        served = (ids == expert).nonzero(as_tuple=True)  # tokens, and the places that the expert has among theirs
        if len(served[0]):
            inner = _gated(_linear(x[served[0]], Matrix(first), None, (len(first),)), kind)
            each[served] = _linear(inner, Matrix(second), None, (len(second),))
    return (each.float() * weights[..., None]).sum(1).to(x.dtype)


@by_heads.provide("torch")
def _by_heads(x: Tensor, weight: Tensor, outputs: int, transposed: bool) -> Tensor:
    """Head by head."""
    weights = weight.mT.contiguous() if transposed else weight
    each = [_linear(x[:, h].contiguous(), Matrix(own), None, (len(own),)) for h, own in enumerate(weights)]
    return torch.stack(each, 1)


@biased_experts.provide("torch")
def _biased_experts(
    x: Tensor,
    stacks: tuple[Matrix, Matrix],
    biases: tuple[Tensor, Tensor],
    weights: Tensor,
    ids: Tensor,
    clamp: tuple[float, float],
) -> Tensor:
    """Expert by expert, each on the tokens that it serves."""
    each = x.new_zeros(*ids.shape, x.shape[1])  # [T, k, D]
    for expert, (first, second) in enumerate(zip(*biases, strict=True)):
        served = (ids == expert).nonzero(as_tuple=True)
        if len(served[0]):
            both = _product(x[served[0]], expert_matrix(stacks[0], expert)) + first
            each[served] = _product(clamped(both, clamp), expert_matrix(stacks[1], expert)) + second
    return (each.float() * weights[..., None]).sum(1).to(x.dtype)


def _product(x: Tensor, weight: Matrix) -> Tensor:
    serve = _linear if weight.format.plain else linear.reference
    product: Tensor = serve(x, weight, None, (len(weight.values),))
    return product
