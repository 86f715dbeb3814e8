"""Specifications of attention to whose scores numbers for distances are added, which depend on tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quintet.interface.platform import State
from quintet.interface.types import AttentionSpec, Batch, StepContext
from quintet.ops.attention import PagedAttention, masked_attention, paged_rows
from quintet.ops.registry import Op, Ops


@Op
def disentangled_attention(  # noqa: PLR0913  # the parts of a score
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: Batch,
    spec: AttentionSpec,
    of_queries: Tensor | None,
    of_keys: Tensor | None,
    columns: Tensor,
) -> Tensor:
    """As `attention`, and numbers of distances are added to a score before it is scaled: the query's and the key's own.

    of_queries and of_keys [T, H, N], or None. columns [2 * reach + 1] int32: the column of keys reach positions before
    the query's, and so on to those as far behind it; keys that are further away have the first or the last. The layer
    has as many KV heads as heads, no window, soft-cap, sinks nor slopes. Source: DeBERTa (He et al. 2021).
    """
    tokens, reach = q.shape[0], columns.shape[0] // 2
    apart = batch.positions[None, :] - batch.positions[:, None]
    seen = batch.token_to_seq[None, :] == batch.token_to_seq[:, None]
    seen = seen & (torch.arange(tokens, device=q.device) < batch.query_start_loc[-1])
    if spec.causal:
        seen = seen & (apart <= 0)
    places = torch.index_select(columns, 0, (apart.clamp(-reach, reach) + reach).reshape(-1)).reshape(tokens, tokens)
    scores = torch.einsum("thd,shd->hts", q.float(), k.float())
    for numbers, index in ((of_queries, places), (of_keys, places.T)):
        if numbers is not None:
            wide = numbers.float().transpose(0, 1)  # [H, T, N]
            added = wide.gather(2, index.long().expand(wide.shape[0], -1, -1))
            scores = scores + (added if index is places else added.transpose(1, 2))
    weights = torch.where(seen, scores * spec.scale, -1e30).softmax(-1)
    out = [torch.where(seen[:, :, None], v[None, :, h].float(), 0.0) for h in range(v.shape[1])]  # [T, S, D] each
    return torch.stack([torch.einsum("ts,tsd->td", *each) for each in zip(weights, out, strict=True)], 1).to(q.dtype)


@Op
def paged_distance_attention(
    q: Tensor, kv: Tensor, numbers: Tensor, context: StepContext, spec: AttentionSpec
) -> Tensor:
    """As paged_attention of causal layers, and numbers [T, H, N] of the query are added to its scores: number i to that
    of the key i positions behind it, none to keys that are further away. Source: Inkling (Thinking Machines 2026)."""
    batch = context.batch
    k, v = paged_rows(q, kv, context, spec)
    apart = torch.arange(k.shape[1], device=q.device)[None, :] - batch.positions[:, None]
    index = (-apart).clamp(0, numbers.shape[2] - 1)[:, None].expand(-1, numbers.shape[1], -1)
    near = (apart <= 0) & (apart > -numbers.shape[2])
    added = torch.where(near[:, None], numbers.float().gather(2, index.long()), 0.0)
    return masked_attention(q, k, v, (apart, apart <= 0), (spec, None), added)


class DistanceAttention(PagedAttention):
    """write_kv, then paged_distance_attention: of a layer whose queries have numbers for distances."""

    def __init__(self, spec: AttentionSpec, ops: Ops, also: Sequence[torch.dtype] = ()) -> None:
        super().__init__(spec, ops, also)
        self._attend_distances = ops.paged_distance_attention

    def attend_distances(
        self, q: Tensor, k: Tensor, v: Tensor, numbers: Tensor, state: State, context: StepContext
    ) -> tuple[Tensor, State]:
        kv = self._write(state[0], k, v, context)
        return self._attend_distances(q, kv, numbers, context, self._spec), (kv,)
