"""Arguments of the ops around compressed entries: windows that begin, go on and end in a step."""

from collections.abc import Iterator, Sequence

import torch

from quintet.conformance.cases.attention import MIXES
from quintet.conformance.cases.random_arguments import Case, Cases, randn
from quintet.conformance.harness.batches import AttentionRequest, RandomKVCache, spec
from quintet.interface.types import StepContext
from quintet.ops.compressed.attention import Entries, WindowRows
from quintet.ops.compressed.entries import EntryPages
from quintet.ops.compressed.entries import choose_entries as choose

WINDOWS = {
    "decoding": [AttentionRequest(cached, 1) for cached in (0, 6, 127, 128, 143)],
    "a mix": [AttentionRequest(*each) for each in ((124, 9), (0, 8), (3, 1), (255, 2))],
}
LAYOUTS = (EntryPages(4, 16), EntryPages(128, 16), EntryPages(3, 8))


def _contexts(requests: Sequence[AttentionRequest], page_size: int = 16) -> tuple[StepContext, StepContext]:
    """The step of these requests with a group of pages, and with one of states."""
    cache = RandomKVCache(spec(1, 1, 8, page_size=page_size, shared=8), [each.cached + each.new for each in requests])
    _, context = cache.batch(dict(enumerate(requests)))
    units = [[2 * row + 1 if each.cached else 0, 2 * row + 2] for row, each in enumerate(requests)]
    table = torch.tensor(units, dtype=torch.int32)
    plan = torch.zeros(0, max(each.new for each in requests), dtype=torch.int32)
    group = context.group._replace(
        slot_mapping=torch.zeros_like(context.group.slot_mapping), block_table=table, plan=(plan,)
    )
    return context, StepContext(context.batch, group)


def recent_rows(dtype: torch.dtype) -> Iterator[Case]:
    for width, dim in ((1, 8), (9, 16), (128, 5)):
        for mix, requests in MIXES.items():
            tokens, (_, context) = sum(each.new for each in requests), _contexts(requests)
            given = randn(tokens, dim, dtype=dtype), randn(2 * len(requests) + 1, width, dim, dtype=dtype), context
            yield f"{width} rows of {dim}, {mix}", given


def pool_windows(dtype: torch.dtype) -> Iterator[Case]:
    """Few tokens: a platform that dispatches each operation of the specification takes them one by one."""
    for rate, parts, dim in ((4, 2, 16), (24, 1, 5), (7, 2, 8), (128, 1, 16)):
        for mix, requests in WINDOWS.items():
            tokens, (_, context) = sum(each.new for each in requests), _contexts(requests)
            kv, gate = (randn(tokens, parts * dim, dtype=dtype, scale=size) for size in (1.0, 3.0))
            state = randn(2 * len(requests) + 1, 9 if parts == 2 else 3, dim, dtype=torch.float32)
            state[:, 1::3] = state[:, 1::3].abs() + 1  # sums of weights
            bias = randn(rate, parts * dim, dtype=torch.float32)
            yield f"{rate} tokens, {parts} parts of {dim}, {mix}", (kv, gate, bias, state, context)


def write_entries(dtype: torch.dtype) -> Iterator[Case]:
    for layout in LAYOUTS:
        for mix, requests in MIXES.items():
            context, _ = _contexts(requests, layout.page_size)
            pages = randn(int(context.group.block_table.max()) + 1, 1, 1, layout.entries, 8, dtype=dtype)
            # all rows that go to page 0 are alike
            ends = (context.batch.positions + 1) % layout.rate == 0
            rows = torch.where(ends[:, None], randn(len(ends), 8, dtype=dtype), 1.0)
            yield f"{layout}, {mix}", (pages, rows, context, layout)


def choose_entries(dtype: torch.dtype) -> Iterator[Case]:
    """Fewer entries than are seen, as many, and more."""
    for layout, count in zip(LAYOUTS, (5, 4, 60), strict=True):
        for mix, requests in MIXES.items():
            context, _ = _contexts(requests, layout.page_size)
            pages = randn(int(context.group.block_table.max()) + 1, 1, 1, layout.entries, 8, dtype=dtype)
            tokens = len(context.batch.positions)
            q, weights = randn(tokens, 3, 8, dtype=dtype), randn(tokens, 3, dtype=torch.float32)
            yield f"{count} entries, {layout}, {mix}", (q, weights, pages, context, count, layout)


def compressed_attention(dtype: torch.dtype) -> Iterator[Case]:
    for layout, window in zip(LAYOUTS, (9, 40, 2), strict=True):
        of = spec(6, 1, 8, dtype=dtype, page_size=layout.page_size, shared=8, window=window, sinks=True, rate=4)
        for mix, requests in MIXES.items():
            context, _ = _contexts(requests, layout.page_size)
            pages = randn(int(context.group.block_table.max()) + 1, 1, 1, layout.entries, 8, dtype=dtype)
            tokens = len(context.batch.positions)
            q, k = randn(tokens, 6, 8, dtype=dtype), randn(tokens, 8, dtype=dtype)
            rows, sinks = WindowRows(k, randn(len(requests), window - 1, 8, dtype=dtype)), randn(6, dtype=torch.float32)
            few = choose.reference(q[:, :1], torch.ones(len(q), 1), pages, context, 3, layout)
            kinds = {"no entries": None, "all": Entries(pages, None, layout), "chosen": Entries(pages, few, layout)}
            for what, entries in kinds.items():
                yield f"{what}, {layout}, window {window}, {mix}", (q, rows, entries, context, of, sinks)


def rotate_last(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, heads, dim, turned in ((1, 1, 8, 8), (9, 3, 16, 6), (33, 2, 24, 8)):
        angles = torch.arange(64)[:, None] * torch.linspace(0.1, 1, turned // 2)
        table, places = torch.cat([angles.cos(), angles.sin()], -1), torch.arange(tokens, dtype=torch.int32) * 3 % 64
        for shift, inverse in ((0, False), (3, False), (0, True)):
            given = randn(tokens, heads, dim, dtype=dtype), table, places, shift, inverse
            yield f"{turned} of {dim}, {heads} heads, {tokens} tokens, by {shift}, {inverse}", given


def route_softplus(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, num, k in ((1, 4, 1), (9, 16, 4), (33, 64, 6)):
        logits = randn(tokens, num, dtype=dtype, scale=8.0)
        yield f"{tokens} tokens, {k} of {num}", (logits, randn(num, dtype=torch.float32, scale=0.1), k)


def route_hashed(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, num, k in ((1, 4, 1), (9, 16, 4), (33, 64, 6)):
        table = (torch.arange(50 * k, dtype=torch.int32) * 7 % num).reshape(50, k)
        ids = torch.arange(tokens, dtype=torch.int32) * 11 % 53  # some are past the table
        yield f"{tokens} tokens, {k} of {num}", (randn(tokens, num, dtype=dtype, scale=8.0), ids, table)


COMPRESSED: dict[str, Cases] = {
    "choose_entries": choose_entries,
    "compressed_attention": compressed_attention,
    "pool_windows": pool_windows,
    "recent_rows": recent_rows,
    "rotate_last": rotate_last,
    "route_hashed": route_hashed,
    "route_softplus": route_softplus,
    "write_entries": write_entries,
}
