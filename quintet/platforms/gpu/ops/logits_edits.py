"""Edits of a few logits by Triton, in place: the specification copies all of them and takes a dozen launches."""

import torch
from torch import Tensor

from quintet.ops.sampling import ban_tokens, bias_tokens, keep_tokens, penalize
from quintet.platforms.gpu.ops.probe import probing

NEVER = float("-inf")


def _check(device: torch.device) -> str | None:
    """Three tokens: one that is penalized, given twice; one that is banned; one that a mask leaves."""
    logits = torch.tensor([[4.0, 4.0, 4.0]], device=device)
    one, zero = (torch.full((1,), value, dtype=torch.int32, device=device) for value in (1, 0))
    penalties = torch.tensor([[2.0, 0.5, 0.25]], device=device)
    logits = _penalize(logits, zero.repeat(2), zero.repeat(2), one.repeat(2), penalties)
    logits = _bias_tokens(_ban_tokens(logits, zero, one), zero, zero, penalties[0, :1])
    got = [logits.tolist(), _keep_tokens(logits, (one + one)[None]).tolist()]
    good = got == [[[3.25, NEVER, 4.0]], [[NEVER] * 3]]
    return None if good else f"4 divided, less 0.75 and more 2, is {got}"


@penalize.provide("triton", probing(_check))
def _penalize(logits: Tensor, rows: Tensor, ids: Tensor, counts: Tensor, penalties: Tensor) -> Tensor:
    from quintet.platforms.gpu.kernels.edits import penalize as launch

    logits = _checked(logits)
    launch(logits, rows.contiguous(), ids.contiguous(), counts.contiguous(), penalties.contiguous())
    return logits


@bias_tokens.provide("triton", probing(_check))
def _bias_tokens(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    from quintet.platforms.gpu.kernels.edits import bias_tokens as launch

    logits = _checked(logits)
    launch(logits, rows.contiguous(), ids.contiguous(), values.contiguous())
    return logits


@ban_tokens.provide("triton", probing(_check))
def _ban_tokens(logits: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    from quintet.platforms.gpu.kernels.edits import ban_tokens as launch

    logits = _checked(logits)
    launch(logits, rows.contiguous(), ids.contiguous())
    return logits


@keep_tokens.provide("triton", probing(_check))
def _keep_tokens(logits: Tensor, bits: Tensor) -> Tensor:
    from quintet.platforms.gpu.kernels.edits import keep_tokens as launch

    logits = _checked(logits)
    if bits.shape != (logits.shape[0], -(-logits.shape[1] // 32)):
        raise ValueError(f"logits {tuple(logits.shape)} and bits {tuple(bits.shape)} do not fit")
    launch(logits, bits if bits.stride(1) == 1 else bits.contiguous())
    return logits


def _checked(logits: Tensor) -> Tensor:
    """Returns logits [R, V] float32 with dense rows."""
    if logits.dim() != 2 or logits.dtype != torch.float32:
        raise ValueError(f"logits are [R, V] of float32, not {tuple(logits.shape)} {logits.dtype}")
    return logits if logits.stride(1) == 1 else logits.contiguous()
