"""Batch-invariant providers, to the bit: one tile for all sizes, no splits, sums in one order.

Bound where EngineConfig.batch_invariant asks for them, after the idea of He et al. 2025 ("Defeating Nondeterminism in
LLM Inference"). The vendor's library chooses another kernel for another number of rows; these do not, and are slower:
by how much is unmeasured. Unverified on a GPU.
"""

import torch
from torch import Tensor

from quintet.interface.types import AttentionSpec, StepContext
from quintet.interface.weights import Matrix
from quintet.ops.attention import paged_attention
from quintet.ops.linear import KINDS, by_heads, linear
from quintet.ops.moe import experts, grouped_linear
from quintet.platforms.gpu.ops import attention as triton_attention
from quintet.platforms.gpu.ops.moe import by_experts, by_groups
from quintet.platforms.gpu.ops.probe import probing
from quintet.platforms.gpu.ops.quantized import by_matrix


def _check(device: torch.device) -> str | None:
    """Three rows by one matrix, together and one by one."""
    x = torch.arange(6.0, device=device).reshape(3, 2).half()
    weight = torch.eye(2, device=device).half() * 2
    got, each = _times(x, weight, None), torch.cat([_times(row[None], weight, None) for row in x])
    return None if torch.equal(got, 2 * x) and torch.equal(got, each) else f"doubled {x.tolist()}: {got.tolist()}"


@linear.provide("invariant", probing(_check))
def _linear(x: Tensor, weight: Matrix, bias: Tensor | None, outputs: tuple[int, ...]) -> Tensor:
    return _times(x, weight.values, bias)


@linear.provide("invariant", probing(_check), kinds=KINDS)
def _quantized(x: Tensor, weight: Matrix, bias: Tensor | None, outputs: tuple[int, ...]) -> Tensor:
    return by_matrix(x, weight, bias, outputs, True)


@by_heads.provide("invariant", probing(_check))
def _by_heads(x: Tensor, weight: Tensor, outputs: int, transposed: bool) -> Tensor:
    """Heads stand one behind the other, as the rows of experts do."""
    tokens, heads, inputs = x.shape
    rows = x.transpose(0, 1).reshape(tokens * heads, inputs)
    counts = torch.full((heads,), tokens, dtype=torch.int32, device=x.device)
    out = by_groups(rows, weight.transpose(1, 2).contiguous() if transposed else weight, counts, True)
    return out.view(heads, tokens, outputs).transpose(0, 1).contiguous()


@grouped_linear.provide("invariant", probing(_check))
def _grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return by_groups(x, weight, counts, True)


@experts.provide("invariant", probing(_check))
def _experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, kind: str) -> Tensor:
    from quintet.platforms.gpu.kernels.activation import KINDS

    if kind not in KINDS:
        raise ValueError(f"batch_invariant=True: experts with {kind} are torch's here; leave it out")
    return by_experts(x, (gate_up, down), weights, ids, kind, True)


@paged_attention.provide("invariant", probing(triton_attention._check))
def _paged_attention(q: Tensor, kv: Tensor, context: StepContext, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    return triton_attention.attend_batch_invariant(q, kv, context, spec, sinks)


def _times(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K] by weight [N, K], which is the only expert's."""
    from quintet.platforms.gpu.kernels.moe import FIXED, grouped

    rows = x if x.stride(-1) == 1 else x.contiguous()
    counts = torch.full((1,), len(rows), dtype=torch.int32, device=x.device)
    return grouped(rows, weight.contiguous()[None], counts, FIXED, None if bias is None else bias.contiguous()[None])
