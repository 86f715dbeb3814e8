"""Specification of KV pages as bytes: those that leave the cache, and those that a KV connector loads into it."""

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
