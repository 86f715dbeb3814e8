"""Specifications of block-sparse attention: blocks of keys that an indexer chooses, and attention to these alone."""

from dataclasses import replace

import torch
from torch import Tensor

from quintet.interface.platform import Mixer, State
from quintet.interface.types import AttentionSpec, BlockChoiceSpec, Layout, RotaryArgs, StepContext
from quintet.ops.attention import from_cache_rows, masked_attention
from quintet.ops.norm import rms_norm
from quintet.ops.registry import Op, Ops
from quintet.ops.rotary import rotary


@Op
def choose_blocks(q: Tensor, keys: Tensor, context: StepContext, spec: BlockChoiceSpec) -> Tensor:
    """Returns the blocks [T, G, C] int32 of its request that score highest for each token and head of q [T, G, D].

    keys [P, 1, 1, page_size, D], pages of one key for each token. Block b is places b * block to b * block + block - 1,
    and scores the largest q . k of its places up to the token's own, in float32; of equal ones the earlier counts as
    higher. The token's own block and the spec.local - 1 before it count as the highest. C is the smaller of spec.count
    and the blocks of the table. Blocks ascend, -1 stands behind them. Source: MiniMax-M3 (2026).
    """
    k = _gathered(keys, context, spec.block)  # [T, N, B, D]
    own = context.batch.positions
    places = torch.arange(k.shape[1] * spec.block, device=q.device).reshape(k.shape[1], spec.block)
    scores = torch.einsum("tgd,tnbd->tgnb", q.float(), k).nan_to_num(float("inf"), float("inf"), float("-inf"))
    scores = torch.where((places <= own[:, None, None])[:, None], scores, float("-inf")).amax(-1)
    blocks, last = places[:, 0] // spec.block, torch.div(own, spec.block, rounding_mode="floor")[:, None]
    near = (blocks <= last) & (blocks > last - spec.local)
    best = _highest(torch.where(near[:, None], float("inf"), scores), blocks <= last, spec.count)
    return torch.where(best < k.shape[1], best, -1).to(torch.int32)


@Op
def choose_mean_blocks(
    q: Tensor, keys: Tensor, turn: RotaryArgs, context: StepContext, spec: BlockChoiceSpec
) -> Tensor:
    """Returns the blocks [T, 1, C] int32 of its request that score highest for each token of q [T, H, D].

    A block is choose_blocks()'s, and complete up to the token's place. Its key is the mean of its keys in float32, as
    turn.norms.k normalises it and turn.cos_sin turns it by its first place; its score is the sum over heads of
    max(0, q . k), in float32. Behind the spec.count highest stands the block that the token's place is in, where that
    is not complete. C is 1 + the smaller of spec.count and the blocks of the table. Blocks ascend, -1 stands behind
    them. Source: Qwen4-Exp (2026).
    """
    k = mean_keys(_gathered(keys, context, spec.block), turn, keys.dtype)  # [T, N, D]
    seen, num = context.batch.positions[:, None] + 1, k.shape[1]
    blocks = torch.arange(num, device=q.device)
    scores = torch.einsum("thd,tnd->thn", q.float(), k.float()).clamp(min=0).sum(1)
    scores = scores.nan_to_num(float("inf"), float("inf"), float("-inf"))
    best = _highest(scores[:, None], (blocks + 1) * spec.block <= seen, spec.count)
    tail = torch.where(seen % spec.block > 0, torch.div(seen, spec.block, rounding_mode="floor"), num)
    best = torch.cat([best, tail[:, None]], -1).sort(-1).values
    return torch.where(best < num, best, -1).to(torch.int32)


def mean_keys(blocks: Tensor, turn: RotaryArgs, dtype: torch.dtype) -> Tensor:
    """Keys [..., N, B, D] of N blocks from the first on -> the key of each block [..., N, D], of `dtype`."""
    assert turn.norms is not None, "an indexer normalises the means of its keys"
    *_, num, block, dim = blocks.shape
    means = blocks.float().mean(-2).to(dtype)
    means = rms_norm.reference(means, turn.norms.k, turn.norms.eps, turn.norms.offset).reshape(-1, 1, dim)
    first = (torch.arange(num, device=blocks.device) * block).repeat(len(means) // max(num, 1))
    first = first.clamp(max=len(turn.cos_sin) - 1)  # blocks past the table are past the request, too
    return rotary.reference(means, means, turn.cos_sin, first)[1].reshape(*blocks.shape[:-2], dim)


def _gathered(keys: Tensor, context: StepContext, block: int) -> Tensor:
    """Each token's request's keys, in blocks [T, N, B, D] float32, zeros behind the table."""
    rows = torch.index_select(context.group.block_table, 0, context.batch.token_to_seq)
    k = keys[rows, 0, 0].flatten(1, 2).float()
    return torch.nn.functional.pad(k, (0, 0, 0, -k.shape[1] % block)).unflatten(1, (-1, block))


def _highest(scores: Tensor, there: Tensor, count: int) -> Tensor:
    """The `count` highest of scores [T, G, N], of those that are `there` [T, N] -> [T, G, C] ascending, N for none."""
    num = scores.shape[-1]
    there = there[:, None].expand(scores.shape)
    order = torch.where(there, scores, float("-inf")).sort(dim=-1, descending=True, stable=True).indices
    order = order[..., : min(count, num)]
    return torch.where(there.gather(-1, order), order, num).sort(-1).values


@Op
def block_sparse_attention(q: Tensor, kv: Tensor, chosen: Tensor, context: StepContext, spec: AttentionSpec) -> Tensor:
    """q [T, H, D] over the places of the blocks `chosen` [T, G, C] of each token's request, those up to its own ->
    [T, H, D]: sparse attention, of what choose_blocks or choose_mean_blocks has chosen.

    kv [P, 2, Hkv, page_size, row_width] as paged_attention has it. Block b is places b * spec.chosen_block on, and -1
    none. G is Hkv, each KV head's own blocks, or 1, the same for all.
    """
    own, size = context.batch.positions, spec.page_size
    places = (chosen[..., None] * spec.chosen_block + torch.arange(spec.chosen_block, device=q.device)).flatten(2)
    seen = (chosen >= 0).repeat_interleave(spec.chosen_block, -1) & (places <= own[:, None, None])
    places = torch.where(seen, places, 0).long()
    tables = torch.index_select(context.group.block_table, 0, context.batch.token_to_seq).long()
    group, out = spec.heads // spec.kv_heads, []
    one = replace(spec, heads=group, kv_heads=1, alibi=None)
    for head in range(spec.kv_heads):
        at, visible = (each[:, head % chosen.shape[1]] for each in (places, seen))  # [T, S]
        pages = torch.gather(tables, 1, torch.div(at, size, rounding_mode="floor"))
        k, v = (from_cache_rows(kv[pages, side, head, at % size], q.shape[2])[:, :, None] for side in (0, 1))
        rows = q[:, head * group : (head + 1) * group]
        out.append(masked_attention(rows, k, v, (at - own[:, None], visible), (one, None)))
    return torch.cat(out, 1)


class BlockChoice(Mixer):
    """write_kv of an indexer's keys, then the spec's op. Called as a StateSpec's mixer: with (q, k), and for
    choose_mean_blocks with its RotaryArgs as settings."""

    def __init__(self, spec: BlockChoiceSpec, ops: Ops) -> None:
        self.layouts = (Layout(spec.dtype, (1, 1, spec.page_size, spec.head_dim)),)
        self._spec, self._write, self._choose = spec, ops.write_kv, getattr(ops, spec.op)

    def __call__(  # type: ignore[override]  # what it is called with is an op's
        self, given: tuple[Tensor, Tensor], settings: tuple[RotaryArgs, ...], state: State, context: StepContext
    ) -> tuple[Tensor, State]:
        q, k = given
        keys = self._write(state[0], k, None, context)
        return self._choose(q, keys, *settings, context, self._spec), (keys,)
