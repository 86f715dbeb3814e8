"""Specification of attention to a window and to compressed entries, its positions, and the mixer of bound ops."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from quintet.interface.platform import Mixer, State
from quintet.interface.types import AttentionSpec, Layout, StepContext, TokenChoiceSpec
from quintet.ops.attention import masked_attention
from quintet.ops.compressed.entries import EntryPages, gather_entries, seen_entries
from quintet.ops.registry import Op, Ops


@Op
def rotate_last(x: Tensor, table: Tensor, positions: Tensor, shift: int, inverse: bool) -> Tensor:
    """x [T, H, D] with pairs of neighbours among its last features turned, or turned back, where they are.

    table [max_position, rot] as rotary() has it; each token turns by its position - shift, 0 at least.
    """
    cos, sin = torch.index_select(table, 0, (positions - shift).clamp(min=0))[:, None, :].chunk(2, dim=-1)
    plain, turned = x.split([x.shape[2] - table.shape[1], table.shape[1]], dim=-1)
    first, second = turned.float().unflatten(-1, (-1, 2)).unbind(-1)
    sin = -sin if inverse else sin
    pairs = torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)
    return torch.cat([plain, pairs.to(x.dtype)], dim=-1)


class WindowRows(NamedTuple):
    """K of a step's tokens, which is V too, and of those before them."""

    k: Tensor  # [T, D]
    before: Tensor  # [R, window - 1, D], as recent_rows() gives it


class Entries(NamedTuple):
    """Compressed entries, which are K and V."""

    pages: Tensor  # [P, 1, 1, entries, D]
    chosen: Tensor | None  # [T, C] int32: numbers of those that each token sees, -1: none; None: all up to its place
    layout: EntryPages


@Op
def compressed_attention(
    q: Tensor,
    rows: WindowRows,
    entries: Entries | None,
    context: StepContext,
    spec: AttentionSpec,
    sinks: Tensor,
) -> Tensor:
    """q [T, H, D] over the last spec.window tokens of each token's request and over entries -> [T, H, D].

    One softmax over both, and over a sink of each head [H]. An entry of tokens in the window counts beside them.
    """
    batch, owners, width = context.batch, context.batch.token_to_seq.long(), rows.before.shape[1]
    count = len(q)
    starts = batch.query_start_loc[:-1].clamp(max=count - 1).long()
    places = (batch.positions[starts] - width)[:, None] + torch.arange(width, device=q.device)
    places = torch.cat([places[owners], batch.positions.expand(count, count)], 1)  # of keys [T, W + T]
    own = (owners[None, :] == owners[:, None]) & (torch.arange(count, device=q.device) < batch.query_start_loc[-1])
    seen = torch.cat([torch.ones_like(places[:, :width], dtype=torch.bool), own], 1) & (places >= 0)
    apart = places - batch.positions[:, None]
    keys, seen = torch.cat([rows.before[owners], rows.k.expand(count, -1, -1)], 1), seen & (apart <= 0)
    if entries is not None:
        tables, chosen = torch.index_select(context.group.block_table, 0, batch.token_to_seq), entries.chosen
        made = gather_entries(entries.pages, tables, entries.layout, None if chosen is None else chosen.clamp(min=0))
        if chosen is None:
            there = torch.arange(made.shape[1], device=q.device) < seen_entries(context, entries.layout)[:, None]
        else:
            there = chosen >= 0
        keys, seen = torch.cat([keys, made], 1), torch.cat([seen, there], 1)
        apart = torch.cat([apart, torch.zeros_like(there, dtype=apart.dtype)], 1)
    keys = keys.float()[:, :, None]
    return masked_attention(q, keys, keys, (apart, seen), (spec, sinks))


class CompressedAttentionMixer(Mixer):
    """write_entries, then compressed_attention, on pages of entries; without a rate nothing is kept here."""

    def __init__(self, spec: AttentionSpec, ops: Ops) -> None:
        assert spec.rate is not None and spec.window is not None
        ops.take("write_entries", "compressed_attention")
        self._spec, self._ops = spec, ops
        self._layout = EntryPages(spec.rate, spec.page_size) if spec.rate else None
        if self._layout is not None:
            self.layouts = (Layout(spec.dtype, (1, 1, self._layout.entries, spec.head_dim)),)

    def __call__(  # type: ignore[override]  # what it is called with is an op's
        self, given: tuple[Any, ...], settings: tuple[()], state: State, context: StepContext
    ) -> tuple[Tensor, State]:
        """given: q, WindowRows, this step's entries [T, D] or None, those chosen or None, sinks."""
        q, rows, made, chosen, sinks = given
        entries = None
        if self._layout is not None:
            state = (self._ops.write_entries(state[0], made, context, self._layout),)
            entries = Entries(state[0], chosen, self._layout)
        return self._ops.compressed_attention(q, rows, entries, context, self._spec, sinks), state


class EntryChoice(Mixer):
    """write_entries of an indexer's keys, then choose_entries. Called as TokenChoice is."""

    def __init__(self, spec: TokenChoiceSpec, ops: Ops) -> None:
        ops.take("write_entries", "choose_entries")
        self._ops, self._count, self._layout = ops, spec.count, EntryPages(spec.rate, spec.page_size)
        self.layouts = (Layout(spec.dtype, (1, 1, self._layout.entries, spec.head_dim)),)

    def __call__(  # type: ignore[override]  # what it is called with is an op's
        self, given: tuple[Tensor, Tensor, Tensor], settings: tuple[()], state: State, context: StepContext
    ) -> tuple[Tensor, State]:
        q, weights, rows = given
        keys = self._ops.write_entries(state[0], rows, context, self._layout)
        return self._ops.choose_entries(q, weights, keys, context, self._count, self._layout), (keys,)
