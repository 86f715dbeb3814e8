"""Weights with an adapter's change added: what a model without LoRA computes the adapter's results with."""

import torch
from torch import Tensor

from quintet.lora import stacks
from quintet.lora.adapter import LoRAWeights

_ROWS = 1024  # that are computed at a time, in float32


def merged_weight(weight: Tensor, lora: LoRAWeights, transposed: bool, dtype: torch.dtype) -> Tensor:
    """Returns weight + scaling * B A in `dtype`, computed in float32 and rounded once; with DoRA, each output's weights
    then have the norm that its magnitude gives.

    `weight` is [N, K], or [K, N] if `transposed` (Conv1D), or [V, H] of an embedding.
    """
    by_column = transposed or lora.embedding  # an output's weights are a column
    up, down = (lora.lora_a.T, lora.lora_b.T) if by_column else (lora.lora_b, lora.lora_a)
    down = lora.scaling * down.float()

    def merged_rows(rows: slice) -> Tensor:
        return weight[rows].float() + up[rows].float() @ down

    blocks = [slice(begin, begin + _ROWS) for begin in range(0, weight.shape[0], _ROWS)]
    factors: Tensor | None = None
    if lora.magnitude is not None and by_column:
        squares = torch.stack([merged_rows(rows).square().sum(0) for rows in blocks])
        factors = lora.magnitude / squares.sum(0).sqrt()
    merged = torch.empty(weight.shape, dtype=dtype)
    for rows in blocks:
        part = merged_rows(rows)
        if factors is not None:
            part *= factors
        elif lora.magnitude is not None:
            part *= (lora.magnitude[rows] / part.norm(dim=1))[:, None]
        merged[rows] = part.to(dtype)
    return merged


def merged_stack(weight: Tensor, lora: LoRAWeights, transposed: bool, dtype: torch.dtype) -> Tensor:
    """Returns merged_weight() of a stack of experts [E, N, K], or [E, K, N]."""
    each = zip(weight, stacks.experts_of(lora, 1), strict=True)
    return torch.stack([merged_weight(one, own, transposed, dtype) for one, own in each])


def merged_bias(bias: Tensor, lora: LoRAWeights) -> Tensor:
    """Returns bias + scaling * (bias of B), [N] in the bias's dtype; computed in float32."""
    assert lora.bias is not None
    return (bias.float() + lora.scaling * lora.bias.float()).to(bias.dtype)
