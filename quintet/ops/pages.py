"""Specification of KV pages as bytes: rows of a 4-bit cache, and pages that leave the cache or are loaded into it."""

import torch
from torch import Tensor

from quintet.ops.registry import Op

WORD = 4  # bytes: host and device hand each other int32


@Op
def gather_pages(kept: Tensor, pages: Tensor) -> Tensor:
    """kept [P, ...] of any type, pages [n] int32 -> each page's bytes, zeros up to a whole word, [n, words] int32."""
    taken = torch.index_select(_wide(kept), 0, pages).view(torch.uint8)
    missing = -taken.shape[1] % WORD
    if missing:
        taken = torch.nn.functional.pad(taken, (0, missing))
    return taken.view(torch.int32)


@Op
def scatter_pages(kept: Tensor, pages: Tensor, content: Tensor) -> Tensor:
    """The same with gather_pages()' content [n, words] in these pages, no two of which are one. It may be written
    where it is: callers go on with what is returned."""
    rows = _wide(kept)
    rows.index_copy_(0, pages.long(), content.view(rows.dtype)[:, : rows.shape[1]])
    return kept


def _wide(kept: Tensor) -> Tensor:
    """A page as a row of the widest whole numbers that it is made of: they are copied one by one."""
    flat = kept.reshape(kept.shape[0], -1).view(torch.uint8)
    return flat.view(
        next(each for each in (torch.int64, torch.int32, torch.uint8) if flat.shape[1] % each.itemsize == 0)
    )


GROUP = 32  # values of a 4-bit cache that share a scale and a minimum, at most: the last group of a row may have fewer
HIGHEST = 15  # code
FLOAT16_MAX = 65504.0


def int4_row_bytes(head_dim: int) -> int:
    """Bytes of head_dim values in a 4-bit cache. ValueError if head_dim is odd: a byte has two codes."""
    if head_dim % 2:
        raise ValueError(f"a 4-bit KV cache keeps pairs of values: head_dim {head_dim} is odd; use another type")
    return head_dim // 2 + 4 * -(-head_dim // GROUP)


def to_int4_rows(x: Tensor) -> Tensor:
    """x [..., D] -> rows of a 4-bit cache [..., int4_row_bytes(D)] uint8: codes, then scale and minimum of each group.

    Values are cut into groups of 32; the last may be smaller. A group is turned by a Hadamard matrix (hadamard()),
    which spreads large values over it; then a value is minimum + code * scale, with the nearest code from 0 to 15. Byte
    j of a group of n has code j in its low half and code j + n / 2 in its high half. Scale and minimum are float16,
    both NaN where a value of the group is not finite.
    """
    codes, factors = [], []
    for group in x.float().split(GROUP, -1):
        turned = hadamard(group, inverse=False)
        finite = turned.isfinite().all(-1, keepdim=True)
        turned = torch.where(finite, turned, 0.0)
        least = (turned.amin(-1, keepdim=True) + 0.0).clamp(-FLOAT16_MAX, FLOAT16_MAX).half()
        span = turned.amax(-1, keepdim=True) - least.float()
        scale = (span / HIGHEST).clamp(0.0, FLOAT16_MAX).half()
        wide = scale.float()
        steps = (turned - least.float()) / torch.where(wide > 0, wide, 1.0)
        code = torch.where(wide > 0, steps.round().clamp(0, HIGHEST), 0.0).to(torch.uint8)
        low, high = code.chunk(2, -1)
        codes.append(low | high << 4)
        factors.append(torch.where(finite, torch.cat([scale, least], -1), torch.nan).view(torch.uint8))
    return torch.cat([*codes, *factors], -1)


def from_int4_rows(rows: Tensor, head_dim: int) -> Tensor:
    """Undoes to_int4_rows(): rows -> [..., D] in float32."""
    factors = rows[..., head_dim // 2 :].contiguous().view(torch.float16).float()
    groups = []
    for i, packed in enumerate(rows[..., : head_dim // 2].split(GROUP // 2, -1)):
        code = torch.cat([packed & HIGHEST, packed >> 4], -1).float()
        groups.append(hadamard(code * factors[..., 2 * i, None] + factors[..., 2 * i + 1, None], inverse=True))
    return torch.cat(groups, -1)


def hadamard(x: Tensor, inverse: bool) -> Tensor:
    """x [..., n] -> its product with the Hadamard matrix of n, divided by a power of two; as it is if n is none.

    n = 2 ** k: forwards the product is divided by 2 ** floor(k / 2), backwards by 2 ** ceil(k / 2): the two together
    are exactly 1. A rounding of a sum is all that is lost.
    """
    size = x.shape[-1]
    if size & (size - 1):
        return x
    stages = size.bit_length() - 1
    for stage in range(stages):
        low, high = x.unflatten(-1, (-1, 2, 2**stage)).unbind(-2)
        x = torch.stack([low + high, low - high], -2).flatten(-3)
    return x * 2.0 ** -((stages + inverse) // 2)
