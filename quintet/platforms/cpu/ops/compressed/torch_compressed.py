"""Compressed entries in torch: a product's shape depends on the token's position, and sums have one order.

What is elementwise, or copies rows, is the specification itself.
"""

import torch
from torch import Tensor

from quintet.interface.types import AttentionSpec, StepContext
from quintet.ops.compressed.attention import Entries, WindowRows, compressed_attention, rotate_last
from quintet.ops.compressed.entries import (
    EntryPages,
    choose_entries,
    gather_entries,
    join_windows,
    pool_windows,
    recent_rows,
    write_entries,
)
from quintet.ops.moe import route_hashed, route_softplus
from quintet.platforms.cpu.ops.torch_attention import best_places, rows_of

for each in (recent_rows, write_entries, rotate_last, route_hashed, route_softplus):
    each.provide("torch")(each.reference)


@pool_windows.provide("torch")
def _pool_windows(kv: Tensor, gate: Tensor, bias: Tensor, state: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
    """All windows of the step side by side, token by token, as the specification has it."""
    rate, dim, out = len(bias), state.shape[2], state.new_zeros(len(kv), state.shape[2])
    requests = list(rows_of(context))
    if not requests:
        return out, state
    # windows that have tokens in this step: (first token, tokens), in order, and each request's first and last window
    windows: list[tuple[int, int]] = []
    ranges: list[tuple[int, int]] = []
    for _, first, positions in requests:
        begin, at = len(windows), first
        while at < first + len(positions):
            count = min(rate - positions[at - first] % rate, first + len(positions) - at)
            windows.append((at, count))
            at += count
        ranges.append((begin, len(windows) - 1))
    table = context.group.block_table.tolist()
    kept = torch.stack([state[table[row][0]] if table[row][0] else torch.zeros_like(state[0]) for row, *_ in requests])
    parts = 1 if kv.shape[1] == dim else 2
    own = state.new_zeros(len(windows), 3, parts * dim)
    for index, ((begin, _), (_, _, positions)) in enumerate(zip(ranges, requests, strict=True)):
        if positions[0] % rate:  # the window goes on
            own[begin] = kept[index, -3 * parts :].unflatten(0, (parts, 3)).transpose(0, 1).flatten(1)
    starts, counts = (torch.tensor(each) for each in zip(*windows, strict=True))
    for step in range(int(counts.max())):
        going = (counts > step).nonzero()[:, 0]
        tokens = starts[going] + step
        gates = gate[tokens].float() + bias[context.batch.positions[tokens].long() % rate]
        token = torch.stack([gates, torch.ones_like(gates), kv[tokens].float()], 1)
        own[going] = join_windows(own[going], token)
    if parts == 1:
        whole, after = own, own
    else:
        ahead, mine = own.split(dim, 2)
        last = torch.cat([torch.zeros_like(ahead[:1]), ahead[:-1]])
        for index, ((begin, _), (_, _, positions)) in enumerate(zip(ranges, requests, strict=True)):
            last[begin] = kept[index, :3] if positions[0] % rate else kept[index, 3:6]
        whole, after = join_windows(last, mine), torch.cat([last, ahead, mine], 1)
    ends = starts + counts - 1
    full = (context.batch.positions[ends] + 1) % rate == 0
    out[ends[full]] = whole[full, 2] / whole[full, 1]
    for (row, *_), (_, end) in zip(requests, ranges, strict=True):
        state[table[row][1]] = after[end]
    return out, state


@choose_entries.provide("torch")
def _choose_entries(
    q: Tensor, weights: Tensor, pages: Tensor, context: StepContext, count: int, layout: EntryPages
) -> Tensor:
    """Token by token, over the entries up to its own place alone."""
    table = context.group.block_table
    out = torch.full((len(q), min(count, table.shape[1] * layout.page_size // layout.rate)), -1, dtype=torch.int32)
    for row, first, positions in rows_of(context):
        there = torch.arange((positions[-1] + 1) // layout.rate)
        keys = gather_entries(pages, table[row], layout, there).float()
        for index, position in enumerate(positions, first):
            seen = (position + 1) // layout.rate
            chosen = torch.arange(seen)
            if seen > count:
                chosen = best_places(keys[:seen], q[index], weights[index], count)
            out[index, : len(chosen)] = chosen
    return out


@compressed_attention.provide("torch")
def _compressed_attention(
    q: Tensor, rows: WindowRows, entries: Entries | None, context: StepContext, spec: AttentionSpec, sinks: Tensor
) -> Tensor:
    """Token by token: the rows of its window, then entries."""
    assert spec.window is not None
    out, width, sink = torch.empty_like(q), rows.before.shape[1], sinks.float()[:, None]
    for row, first, positions in rows_of(context):
        last = first + len(positions)
        local = torch.cat([rows.before[row], rows.k[first:last]]).float()  # from position positions[0] - width on
        made = None
        if entries is not None:
            there = torch.arange((positions[-1] + 1) // entries.layout.rate)
            made = gather_entries(entries.pages, context.group.block_table[row], entries.layout, there).float()
        for index, position in enumerate(positions, first):
            end = index - first + width + 1
            keys = local[end - min(spec.window, position + 1) : end]
            if entries is not None and made is not None:
                seen = made[: (position + 1) // entries.layout.rate]
                if entries.chosen is not None:
                    seen = made[entries.chosen[index, : len(seen)].long()]
                keys = torch.cat([keys, seen])
            scores = torch.cat([(q[index].float() * spec.scale) @ keys.t(), sink], 1)
            out[index] = scores.softmax(-1)[:, :-1] @ keys
    return out
