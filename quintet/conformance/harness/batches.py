"""Batches for attention alone: requests with so much in the cache and so many new tokens, on shuffled pages."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.interface.types import AttentionSpec, Batch, Group, StepContext
from quintet.ops.attention import to_cache_rows


@dataclass(frozen=True)
class AttentionRequest:
    cached: int
    new: int


def spec(heads: int, kv_heads: int, head_dim: int, **more: object) -> AttentionSpec:
    """`alibi=True` gives each head its slope, as in Press et al. 2022."""
    settings = {"scale": head_dim**-0.5, "dtype": torch.float32, "page_size": 16, **more}
    if settings.get("alibi") is True:
        settings["alibi"] = tuple(2.0 ** (-8 * (head + 1) / heads) for head in range(heads))
    return AttentionSpec(heads, kv_heads, head_dim, **settings)


class RandomKVCache:
    """Requests' K and V at random, written to pages; every request has the same content whatever batch it is in."""

    def __init__(self, of: AttentionSpec, lengths: Sequence[int], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = of.page_size
        counts = [-(-length // size) for length in lengths]
        free = list(range(1, sum(counts) + 1))
        random.Random(seed).shuffle(free)
        self.spec, self._pages = of, [[free.pop() for _ in range(count)] for count in counts]
        shape = (sum(counts) + 1, 1 if of.shared else 2, of.kv_heads, size, of.head_dim)
        self.kv = to_cache_rows(torch.randn(shape, generator=generator), of.cache_dtype)
        self._q = [torch.randn(length, of.heads, of.head_dim, generator=generator).to(of.dtype) for length in lengths]

    def batch(self, requests: dict[int, AttentionRequest]) -> tuple[Tensor, StepContext]:
        """q [T, H, D] and the step of these requests' new tokens, by the request's number."""
        size, kept = self.spec.page_size, {row: self._pages[row] for row in requests}
        places = [(row, p) for row, r in requests.items() for p in range(r.cached, r.cached + r.new)]
        rows, counts = list(requests), [r.new for r in requests.values()]
        width = max(len(pages) for pages in kept.values())
        q = torch.cat([self._q[row][r.cached : r.cached + r.new] for row, r in requests.items()])
        group = Group(
            slot_mapping=_int32([kept[row][p // size] * size + p % size for row, p in places]),
            block_table=_int32([pages + [0] * (width - len(pages)) for pages in kept.values()]),
            seq_lens=_int32([r.cached + r.new for r in requests.values()]),
        )
        batch = Batch(
            token_ids=_int32([0] * len(places)),
            positions=_int32([p for _, p in places]),
            token_to_seq=_int32([rows.index(row) for row, _ in places]),
            query_start_loc=_int32([sum(counts[:i]) for i in range(len(counts) + 1)]),
            logits_indices=_int32([]),
            groups=(group,),
        )
        return q, StepContext(batch, group)


def _int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
