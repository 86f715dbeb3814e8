"""Specification of the sampled tokens that one step passes to the next without the host."""

import torch
from torch import Tensor

from quintet.ops.registry import Op


@Op
def place_tokens(token_ids: Tensor, sampled: Tensor, rows: Tensor) -> Tensor:
    """token_ids [T], with sampled[rows] where rows [T] is not -1; sampled [S], S > 0. All int32, and T may be any size.

    A sampled -1 (no token could be drawn) counts as 0: its request ends, and until then no row -1 may be read.
    """
    taken = torch.index_select(sampled, 0, rows.clamp(min=0))
    return torch.where(rows < 0, token_ids, taken.clamp(min=0))
