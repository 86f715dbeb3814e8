"""Puts tokens that the step before sampled into this step's token ids: one launch between steps."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintet.platforms.gpu.kernels.variant import Variant

BLOCK = 256  # tokens of a program. Untuned


@triton.jit(do_not_specialize=["count"])
def _place(token_ids, sampled, rows, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    row = tl.load(rows + at, mask=there, other=-1)
    known = tl.load(token_ids + at, mask=there, other=0)
    taken = tl.load(sampled + row, mask=row >= 0, other=0)
    tl.store(out + at, tl.where(row < 0, known, tl.maximum(taken, 0)), mask=there)


def place_tokens(token_ids: Tensor, sampled: Tensor, rows: Tensor) -> Tensor:
    """See the specification; all int32 and dense."""
    out = torch.empty_like(token_ids)
    count = token_ids.shape[0]
    if count:
        _place[(triton.cdiv(count, BLOCK),)](token_ids, sampled, rows, out, count, BLOCK=BLOCK)
    return out


def variants() -> list[Variant]:
    """The one variant."""
    ids = dict.fromkeys(("token_ids", "sampled", "rows", "out"), "*i32")
    return [Variant("place tokens", _place, {**ids, "count": "i32"}, {"BLOCK": BLOCK})]
