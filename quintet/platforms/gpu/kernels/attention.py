"""Paged attention of requests with several tokens in a step: prompts, whole or in chunks.

A program takes a tile of one request's tokens with the query heads of one KV head, or an equal part of them, and goes
through its context in one order. Which request a tile is of follows from `starts`, so that the grid depends on shapes
alone.
"""

import triton
import triton.language as tl

from quintet.platforms.gpu.kernels.attention_layer import (
    CHUNK,
    E4M3,
    INT8,
    PLAIN,
    RARE,
    AttentionBlocks,
    AttentionLaunch,
    AttentionLayer,
    DeviceLimits,
    fitting,
)
from quintet.platforms.gpu.kernels.attention_parts import LOG2E, divided, fold, key_rows, query_rows
from quintet.platforms.gpu.kernels.variant import Variant


def tile_blocks(layer: AttentionLayer, limits: DeviceLimits) -> AttentionBlocks:
    """Guesses, untuned: the largest that spill no registers on any of the architectures we compile for.

    Those that widen what they read, or have wide heads, hold more at a time. float32 is multiplied without tensor
    cores, from registers; the interpreter has no registers.
    """
    wide = layer.block_dim > 128
    rows, slots = (32, 32) if layer.block_dim > 256 else (64, 32) if wide else (128, 64)
    if layer.stored != PLAIN:
        slots = 16 if wide else 32
        rows = rows if wide or layer.stored == INT8 else 64  # bytes become floats in three registers more
    elif layer.capped or layer.sloped or layer.local:
        slots = 32
    if layer.block_dim == 16:
        rows = 64
    fp32 = layer.dtype == "fp32" and not layer.wide
    if fp32:
        rows, slots = 16, 16 if layer.block_dim >= 128 or layer.stored != PLAIN else 32
    rows = max(min(rows, limits.cut.rows), triton.next_power_of_2(layer.group))
    stages = fitting(layer, limits.shared, rows, slots)
    blocks = AttentionBlocks(rows, slots, 4 if fp32 else 8, min(stages, 3) if fp32 or slots == 64 else stages)
    return blocks.within(limits.cut).tuned(layer, limits.cut.table.prompts)


@triton.jit
def _request_of(starts, requests, tile, TOKENS: tl.constexpr, CHUNK: tl.constexpr):
    """Request r has its tiles from starts[r] // TOKENS + r on: at least as many as it needs, and its alone."""
    count = 0
    for chunk in range(0, requests, CHUNK):
        rows = chunk + tl.arange(0, CHUNK)
        firsts = tl.load(starts + rows, mask=rows < requests, other=0) // TOKENS + rows
        count += tl.sum(((firsts <= tile) & (rows < requests)).to(tl.int32))
    return count - 1


@triton.jit
def _first_seen(position, WINDOW: tl.constexpr, LOCAL: tl.constexpr):
    """Returns the first position that a token sees: within a window, or in a chunk of LOCAL positions."""
    first = position * 0
    if WINDOW:
        first = tl.maximum(position - WINDOW + 1, 0)
    if LOCAL:
        first = position // LOCAL * LOCAL
    return first


@triton.jit(do_not_specialize=["requests", "pages"])
def attend_tiles(
    out, q, kv, scales, table, starts, lengths, sinks, slopes, requests, pages, q_stride, gain, cap,
    GROUP: tl.constexpr, PIECES: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, VALUE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    V_ROWS: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr, STORED: tl.constexpr, COMPUTE: tl.constexpr,
    WINDOW: tl.constexpr, LOCAL: tl.constexpr, CAUSAL: tl.constexpr, CAPPED: tl.constexpr, SLOPED: tl.constexpr,
    HAS_SINKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    LEAST: tl.constexpr = 2,
):  # fmt: skip
    """Grid (KV_HEADS * PIECES * (T // TOKENS + R),), on the one axis that has room for more than 65,535 tiles.
    Requests with fewer than LEAST tokens are left to attention_split.py."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    PROGRAMS: tl.constexpr = KV_HEADS * PIECES
    head = tl.program_id(0) % PROGRAMS
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // PROGRAMS  # a prompt's last have most to do: they start first
    request = _request_of(starts, requests, tile, TOKENS, CHUNK)
    first = tl.load(starts + request)
    count = tl.load(starts + request + 1) - first
    offset = (tile - (first // TOKENS + request)) * TOKENS
    if count < LEAST or offset >= count:
        return
    shift = tl.load(lengths + request) - count  # position of the request's first token in this step
    row = tl.arange(0, BLOCK_M)
    token = offset + row // GROUP
    real = (row < TOKENS * GROUP) & (token < count)
    token = tl.minimum(token, count - 1)
    heads = head * GROUP + row % GROUP
    columns = tl.arange(0, BLOCK_D)
    of_token = (first + token).to(tl.int64)
    begins = of_token * q_stride + heads * DIM
    x = query_rows(q, begins, real, columns, 0, VALUE, COMPUTE)
    x_rest = x
    if BLOCK_R:
        x_rest = query_rows(q, begins, real, tl.arange(0, BLOCK_R), VALUE, DIM - VALUE, COMPUTE)
    position = shift + token

    lowest = shift + offset
    end = shift + tl.minimum(offset + TOKENS, count)
    begin = 0
    full = (lowest + 1) // BLOCK_N * BLOCK_N  # every row sees every slot before it
    if not CAUSAL:
        end = tl.minimum(end + WINDOW - 1, shift + count) if WINDOW else shift + count
        full = end // BLOCK_N * BLOCK_N
    if WINDOW or LOCAL:
        begin = _first_seen(lowest, WINDOW, LOCAL) // BLOCK_N * BLOCK_N
        full = begin
    own = table + request.to(tl.int64) * pages
    slope = 0.0
    if SLOPED:
        slope = tl.load(slopes + heads) * LOG2E
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for n in range(begin, full, BLOCK_N):
        slots = n + tl.arange(0, BLOCK_N)
        rows = key_rows(own, slots, end, head, KV_HEADS, PIECES, PAGE_SIZE, V_ROWS)
        distance = (slots[None, :] - position[:, None]).to(tl.float32)
        acc, best, total = fold(
            acc, best, total, x, x_rest, kv, scales, rows, slots < end, True, distance, slope, gain, cap,
            V_ROWS, WIDTH, DIM, VALUE, BLOCK_D, BLOCK_R, STORED, CAPPED, SLOPED, False,
        )  # fmt: skip
    for n in range(full, end, BLOCK_N):
        slots = n + tl.arange(0, BLOCK_N)
        rows = key_rows(own, slots, end, head, KV_HEADS, PIECES, PAGE_SIZE, V_ROWS)
        distance = (slots[None, :] - position[:, None]).to(tl.float32)
        inside = slots < end
        seen = inside[None, :]
        if CAUSAL:
            seen = slots[None, :] <= position[:, None]
        if WINDOW or LOCAL:
            inside &= slots >= _first_seen(lowest, WINDOW, LOCAL)
            seen &= slots[None, :] >= _first_seen(position, WINDOW, LOCAL)[:, None]
            if not CAUSAL:
                seen &= slots[None, :] < position[:, None] + WINDOW
        acc, best, total = fold(
            acc, best, total, x, x_rest, kv, scales, rows, inside, seen, distance, slope, gain, cap,
            V_ROWS, WIDTH, DIM, VALUE, BLOCK_D, BLOCK_R, STORED, CAPPED, SLOPED, True,
        )  # fmt: skip
    acc = divided(acc, best, total, sinks, heads, HAS_SINKS)
    at = (of_token * (KV_HEADS * PIECES * GROUP) + heads) * VALUE
    wanted = real[:, None] & (columns < VALUE)[None, :]
    tl.store(out + at[:, None] + columns[None, :], acc.to(out.dtype.element_ty), mask=wanted)


def launch(call: AttentionLaunch, least: int = 2) -> None:
    """Over the requests that bring so many tokens."""
    of, tokens, requests = call.layer, call.q.shape[0], call.requests
    blocks = tile_blocks(of, call.limits)
    attend_tiles[(of.programs * (tokens // (blocks.rows // of.group) + requests),)](
        call.out, *call.arrays, requests, call.pages, *call.numbers,
        **of.constants, **of.sight, CAUSAL=of.causal, BLOCK_M=blocks.rows, BLOCK_N=blocks.slots, CHUNK=CHUNK,
        LEAST=least, num_warps=blocks.warps, num_stages=blocks.stages, **dict(call.limits.cut.options),
    )  # fmt: skip


def variants(limits: DeviceLimits = DeviceLimits()) -> list[Variant]:  # noqa: B008
    layers = [
        AttentionLayer(32, 8, 128, 16, "bf16"),
        AttentionLayer(32, 8, 128, 16, "fp16", INT8),
        AttentionLayer(32, 8, 128, 16, "bf16", E4M3),
        AttentionLayer(32, 8, 128, 16, "bf16", e4m3=True),
        AttentionLayer(16, 8, 256, 16, "bf16", window=4096, capped=True),
        AttentionLayer(64, 8, 64, 16, "bf16", window=128, sinks=True),
        AttentionLayer(40, 8, 128, 16, "bf16", local=8192),
        AttentionLayer(16, 16, 64, 16, "bf16", causal=False),
        AttentionLayer(128, 1, 576, 16, "bf16", shared=512),
        AttentionLayer(16, 1, 576, 16, "bf16", INT8, shared=512),
    ]
    made = []
    for of in (*layers, *RARE):
        blocks = tile_blocks(of, limits)
        signature, constants = of.signature(("out",), ("requests", "pages"))
        constants |= {"BLOCK_M": blocks.rows, "BLOCK_N": blocks.slots, "CHUNK": CHUNK} | of.sight
        constants |= {"CAUSAL": of.causal, "LEAST": 2}
        spills = 2 if of.block_dim == 16 else 0  # on 8.0: ptxas keeps to 80 registers, and rather parts with two
        how = signature, constants, blocks.warps, blocks.stages, spills, of in RARE
        made.append(Variant(f"attend_tiles {of}", attend_tiles, *how))
    return made
