"""Specifications of compressed entries: what a request keeps of tokens that no entry holds yet, and entries in pages.

Entry e of a request is made of its tokens e rate : (e + 1) rate, with overlap of those before them too. It stands
in the page of its last token, so a page's entries follow from the tokens up to its end. Source: DeepSeek-V4 (2026),
sections 2.3.1 (overlap, indexer) and 2.3.2.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quintet.interface.types import StepContext
from quintet.ops.registry import Op
from quintet.ops.states import Advanced, _read_states, _scan_tokens, _write_states

NOTHING = -1e30  # the largest of no gates; finite, so that differences with it are not NaN


class EntryPages(NamedTuple):
    """Places of entries in pages [P, 1, 1, entries, D]."""

    rate: int  # tokens of an entry
    page_size: int  # tokens of a page

    @property
    def entries(self) -> int:
        """Entries that a page has room for."""
        return -(-self.page_size // self.rate)


@Op
def recent_rows(x: Tensor, state: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
    """Rows of the last W tokens before the step -> [R, W, D], the oldest first, and the state after the step.

    x [T, D]: the step's rows; state [units, W, D] in their type. Of a request with fewer tokens the first rows are
    zeros.
    """
    before, starts = _read_states(state, context), context.batch.query_start_loc
    width, counts = before.shape[1], (starts[1:] - starts[:-1])[:, None]
    places = torch.arange(width, device=x.device)[None] + counts  # [R, W] of the rows before and the step's behind them
    kept = before.gather(1, places.clamp(max=width - 1).long()[:, :, None].expand(-1, -1, x.shape[1]))
    rows = (starts[:-1, None] + places - width).clamp(0, len(x) - 1)
    after = torch.where((places < width)[:, :, None], kept, x[rows.long()])
    return before, _write_states(state, after, context)


@Op
def pool_windows(kv: Tensor, gate: Tensor, bias: Tensor, state: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
    """Each window's mean of kv [T, S D], number by number by the softmax of gate [T, S D] + bias [rate, S D] -> [T, D]
    float32 at the tokens that end a window, 0 at others, and the state.

    With S 2, an entry is of the second half of its own window's numbers and the first half of those of the window
    before. state [units, 3, D] float32 is the largest gate, the sum of weights and the weighted sum of a window that is
    not full yet; with S 2 [units, 9, D]: these of the window before by its first half, and of its own by both. Token by
    token, in one order.
    """
    rate, dim, positions = len(bias), state.shape[2], context.batch.positions

    def step(at: Tensor, before: Tensor) -> Advanced:
        places = torch.index_select(positions, 0, at) % rate
        gates = torch.index_select(gate, 0, at).float() + torch.index_select(bias, 0, places)
        values, first = torch.index_select(kv, 0, at).float(), (places == 0)[:, None, None]
        token = torch.stack([gates, torch.ones_like(gates), values], 1)
        if token.shape[2] == dim:
            whole = after = join_windows(torch.where(first, 0.0, before), token)
        else:
            last, ahead, own = before.split(3, 1)
            last = torch.where(first, ahead, last)
            ahead = join_windows(torch.where(first, 0.0, ahead), token[:, :, :dim])
            own = join_windows(torch.where(first, 0.0, own), token[:, :, dim:])
            whole, after = join_windows(last, own), torch.cat([last, ahead, own], 1)
        out = torch.where((places == rate - 1)[:, None], whole[:, 2] / whole[:, 1], 0.0)
        return out, after, after

    pooled, kept, _ = _scan_tokens(step, _read_states(state, context), context)
    return pooled, _write_states(state, kept, context)


def join_windows(x: Tensor, y: Tensor) -> Tensor:
    """Joins largest gates, sums of weights and weighted sums [R, 3, D] of two sets of tokens; a sum of 0 is of none."""
    (high, total, mean), (other_high, other_total, other_mean) = x.unbind(1), y.unbind(1)
    high = torch.where(total > 0, high, NOTHING)
    other_high = torch.where(other_total > 0, other_high, NOTHING)
    most = torch.maximum(high, other_high)
    shrink, other_shrink = torch.exp(high - most), torch.exp(other_high - most)
    return torch.stack(
        [most, total * shrink + other_total * other_shrink, mean * shrink + other_mean * other_shrink], 1
    )


@Op
def write_entries(pages: Tensor, rows: Tensor, context: StepContext, layout: EntryPages) -> Tensor:
    """pages [P, 1, 1, entries, D] with the rows [T, D] of those tokens that end a window; may write in place, use its
    result. The rows of others go to page 0."""
    ends = (context.batch.positions + 1) % layout.rate == 0
    slots = torch.where(ends, context.group.slot_mapping, 0).long()
    pages[slots // layout.page_size, 0, 0, slots % layout.page_size // layout.rate] = rows.to(pages.dtype)
    return pages


@Op
def choose_entries(
    q: Tensor, weights: Tensor, pages: Tensor, context: StepContext, count: int, layout: EntryPages
) -> Tensor:
    """choose_tokens() among the entries that hold no token after a token's own -> their numbers [T, C] int32.

    q [T, H, D] and weights [T, H] float32; pages [P, 1, 1, entries, D] of one key for each entry.
    """
    tables = torch.index_select(context.group.block_table, 0, context.batch.token_to_seq)
    keys, there = gather_entries(pages, tables, layout).float(), seen_entries(context, layout)[:, None]
    scores = (torch.einsum("thd,ted->the", q.float(), keys).clamp(min=0) * weights[:, :, None]).sum(1)
    places = torch.arange(keys.shape[1], device=q.device)
    scores = torch.where(places < there, scores, float("-inf"))
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, : min(count, keys.shape[1])]
    best = torch.where(best < there, best, keys.shape[1]).sort(-1).values
    return torch.where(best < keys.shape[1], best, -1).to(torch.int32)


def seen_entries(context: StepContext, layout: EntryPages) -> Tensor:
    """Returns how many entries each token sees [T]: those of whole windows up to its own place."""
    return torch.div(context.batch.positions + 1, layout.rate, rounding_mode="floor")


def gather_entries(pages: Tensor, tables: Tensor, layout: EntryPages, numbers: Tensor | None = None) -> Tensor:
    """Entries of requests with tables [..., N] -> [..., C, D]: all that these pages have, or by `numbers` [..., C]."""
    if numbers is None:
        numbers = torch.arange(tables.shape[-1] * layout.page_size // layout.rate, device=pages.device)
        numbers = numbers.expand(*tables.shape[:-1], -1)
    last = numbers.long() * layout.rate + layout.rate - 1
    owners = torch.gather(tables.long(), -1, last // layout.page_size)
    return pages[owners, 0, 0, last % layout.page_size // layout.rate]
