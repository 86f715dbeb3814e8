"""Specifications of adapters (LoRA, Hu et al. 2021; DoRA, Liu et al. 2024): several in one batch."""

import torch
from torch import Tensor

from quintet.ops.registry import Op


@Op
def add_lora(  # noqa: PLR0913  # a product's output and input, and six facts about the adapters
    y: Tensor,
    x: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    ranks: Tensor,
    slots: Tensor,
    first: int,
    columns: tuple[tuple[int, int], ...],
) -> Tensor:
    """y [T, N] + B (A x) of each token's adapter, of which there is room for S; x [T, K] -> [T, N].

    lora_a [S, P, R, K] and lora_b [S, R, N], in x's type, hold P parts of each adapter, which have up to R rows; B is
    scaled. ranks [S, M] int32: an adapter's rows in each part of all products, this one's from column `first` on; rows
    beyond are not read. slots [T] int32: 1 + the adapter of a token; 0: none, and its y stays to the bit. `columns`:
    (part, width) of stretches of y side by side, N wide together: each is multiplied by the rows of its part.

    Sums are in float32 and rounded once, after y is added. A token's result does not depend on other tokens. May
    overwrite y.
    """
    parts, rank = lora_a.shape[1], lora_a.shape[2]
    result, count = y.float(), torch.arange(rank, device=x.device)
    for adapter in range(lora_a.shape[0]):
        used = count < ranks[adapter, first : first + parts, None]  # [P, R]
        low = torch.einsum("tk,prk->tpr", x.float(), torch.where(used[..., None], lora_a[adapter].float(), 0.0))
        start, pieces = 0, []
        for part, width in columns:
            rows = torch.where(used[part][:, None], lora_b[adapter, :, start : start + width].float(), 0.0)
            pieces.append(low[:, part] @ rows)
            start += width
        mine = (slots == adapter + 1)[:, None]
        result = torch.where(mine, y.float() + torch.cat(pieces, -1), result)
    return torch.where((slots > 0)[:, None], result.to(y.dtype), y)


@Op
def scale_adapted(y: Tensor, gains: Tensor, offsets: Tensor, slots: Tensor) -> Tensor:
    """y [T, N] * gains + offsets of each token's adapter, both float32 [S, N]; slots [T] int32 as add_lora() has them:
    without an adapter a token's y stays to the bit. Rounded once. May overwrite y."""
    adapter = (slots.long() - 1).clamp(min=0)
    changed = y.float() * gains[adapter] + offsets[adapter]
    return torch.where((slots > 0)[:, None], changed.to(y.dtype), y)


@Op
def adapter_rows(ids: Tensor, slots: Tensor, adapters: int, rows: int, first: int) -> Tensor:
    """Rows of tokens' ids in the tables of `adapters` adapters, one after the other, which have `rows` rows each, from
    id `first` on -> [T] int32: -1 for a token without an adapter, or an id that has no row; ids and slots int32."""
    there = (slots > 0) & (slots <= adapters) & (ids >= first) & (ids < first + rows)
    return torch.where(there, (slots - 1) * rows + ids - first, -1)
