"""Paged attention of requests with one token in a step: their contexts are split, and the parts merged.

How a context is split depends on its length alone, and parts are merged in one order: a request's
result is the same bits whatever else is in the batch.
"""

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor

from quintet.interface.types import StepContext
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

# Guesses, untuned: nothing here has been measured on a GPU.
SPLIT = 256  # slots at least: reading them takes far longer than writing and merging their part
SPLITS_OF_ALL_HEADS = 128  # of one request at most: about the processors of a large GPU; it bounds the workspace
PER_PROCESSOR = 2  # programs at a time: each has some 32 KiB on the way
STEP = 16  # parts that are merged together
ROOM = 128 * 2**20  # bytes of parts at once: 512 requests of 32 heads of 128 fill it; more go in turns


def most_splits(layer: AttentionLayer) -> int:
    """Returns the most splits of one head of one request; a power of two."""
    return triton.next_power_of_2(max(4, SPLITS_OF_ALL_HEADS // layer.programs))


def least_blocks(blocks: AttentionBlocks, limits: DeviceLimits) -> int:
    return max(1, (limits.cut.table.split or SPLIT) // blocks.slots)


def split_blocks(layer: AttentionLayer, limits: DeviceLimits) -> AttentionBlocks:
    """Rows are one token's heads: 16 is the least of a tensor core. Wide heads take fewer slots at a time."""
    rows = max(16, triton.next_power_of_2(layer.group))
    plain = layer.stored == PLAIN and not layer.e4m3 and not layer.e4m3fnuz  # what is widened is held twice
    slots = 64 if plain and layer.block_dim * layer.bytes <= 256 and rows < 128 else 32
    if layer.block_dim > 256 and not layer.shared:
        slots = 16
    if layer.dtype == "fp32" and not layer.wide:  # multiplied without tensor cores, from registers
        slots = 32 if layer.block_dim <= 128 else 16
    many = layer.block_dim > 256 or rows >= 64  # the results of all rows are held in registers
    warps = 8 if many else limits.cut.single
    blocks = AttentionBlocks(rows, slots, warps, fitting(layer, limits.shared // PER_PROCESSOR, rows, slots))
    return blocks.within(limits.cut).tuned(layer, limits.cut.table.decode)


def merge_warps(layer: AttentionLayer) -> int:
    return 8 if layer.block_dim > 256 else 2


@triton.jit
def _share(
    length, WINDOW: tl.constexpr, LOCAL: tl.constexpr, BLOCK_N: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr
):  # fmt: skip
    """Returns first slot, slots per split and splits for a last token: LEAST blocks in each, and at most MOST.

    One split where there is no context: what pads a step may have a token, and gets zeros.
    """
    begin = length * 0
    if WINDOW:
        begin = tl.maximum(length - WINDOW, 0) // BLOCK_N * BLOCK_N
    if LOCAL:
        begin = tl.maximum(length - 1, 0) // LOCAL * LOCAL // BLOCK_N * BLOCK_N
    blocks = (length - begin + BLOCK_N - 1) // BLOCK_N
    each = tl.maximum(LEAST, (blocks + MOST - 1) // MOST)
    return begin, each * BLOCK_N, tl.maximum(1, (blocks + each - 1) // each)


@triton.jit
def _zero_padding(out, starts, tokens, requests, WIDTH: tl.constexpr):
    """Tokens after the last request's are padding, which goes through the rest of the model all the same."""
    BLOCK: tl.constexpr = 1024
    zeros = tl.zeros([BLOCK], out.dtype.element_ty)
    end = tl.load(starts + requests)
    for past in range(tl.program_id(0), tokens - end, tl.num_programs(0)):
        at = (end + past).to(tl.int64) * WIDTH
        for first in range(0, WIDTH, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            tl.store(out + at + columns, zeros, mask=columns < WIDTH)


@triton.jit(do_not_specialize=["tokens", "requests", "pages"])
def attend_splits(
    out, parts, stats, q, kv, scales, table, starts, lengths, sinks, slopes, tokens, requests, pages, q_stride,
    gain, cap,
    GROUP: tl.constexpr, PIECES: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, VALUE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    V_ROWS: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr, STORED: tl.constexpr, COMPUTE: tl.constexpr,
    WINDOW: tl.constexpr, LOCAL: tl.constexpr, CAPPED: tl.constexpr, SLOPED: tl.constexpr, HAS_SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Any number of programs share out the splits of all requests with one token: as many as run at a time is best.

    A request with one split gets its result; of others, parts [R, H, MOST, VALUE] and stats [2, R, H, MOST] (the
    highest score, the sum of weights) of each split. Both are float32.
    """
    PROGRAMS: tl.constexpr = KV_HEADS * PIECES
    HEADS: tl.constexpr = PROGRAMS * GROUP
    _zero_padding(out, starts, tokens, requests, HEADS * VALUE)
    columns = tl.arange(0, BLOCK_D)
    g = tl.arange(0, BLOCK_M)
    wanted = (g < GROUP)[:, None] & (columns < VALUE)[None, :]
    place, step = tl.program_id(0), tl.num_programs(0)
    for chunk in range(0, requests, CHUNK):
        row = chunk + tl.arange(0, CHUNK)
        there = row < requests
        count = tl.load(starts + row + 1, mask=there, other=0) - tl.load(starts + row, mask=there, other=0)
        _, _, shares = _share(tl.load(lengths + row, mask=there, other=0), WINDOW, LOCAL, BLOCK_N, LEAST, MOST)
        shares = tl.where(count == 1, shares, 0)
        ends = tl.cumsum(shares, 0)
        items = tl.sum(shares) * PROGRAMS
        for item in range(place, items, step):
            before = ends <= item // PROGRAMS
            head = item % PROGRAMS
            request = chunk + tl.sum(before.to(tl.int32))
            split = item // PROGRAMS - tl.sum(tl.where(before, shares, 0))
            token = tl.load(starts + request).to(tl.int64)
            length = tl.load(lengths + request)
            begin, size, splits = _share(length, WINDOW, LOCAL, BLOCK_N, LEAST, MOST)
            begin += split * size
            end = tl.minimum(begin + size, length)
            heads = head * GROUP + tl.minimum(g, GROUP - 1)
            x = query_rows(q + token * q_stride, heads * DIM, g < GROUP, columns, 0, VALUE, COMPUTE)
            x_rest = x
            if BLOCK_R:
                of_rest = tl.arange(0, BLOCK_R)
                x_rest = query_rows(
                    q + token * q_stride, heads * DIM, g < GROUP, of_rest, VALUE, DIM - VALUE, COMPUTE
                )  # fmt: skip
            slope = 0.0
            if SLOPED:
                slope = tl.load(slopes + heads) * LOG2E
            own = table + request.to(tl.int64) * pages
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            best = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            for n in range(begin, end, BLOCK_N):
                slots = n + tl.arange(0, BLOCK_N)
                rows = key_rows(own, slots, end, head, KV_HEADS, PIECES, PAGE_SIZE, V_ROWS)
                seen = slots < end
                if WINDOW:
                    seen &= slots >= length - WINDOW
                if LOCAL:
                    seen &= slots >= (length - 1) // LOCAL * LOCAL
                distance = (slots - (length - 1)).to(tl.float32)[None, :]
                acc, best, total = fold(
                    acc, best, total, x, x_rest, kv, scales, rows, seen, seen[None, :], distance, slope, gain, cap,
                    V_ROWS, WIDTH, DIM, VALUE, BLOCK_D, BLOCK_R, STORED, CAPPED, SLOPED, True,
                )  # fmt: skip
            if splits == 1:
                acc = divided(acc, best, total, sinks, heads, HAS_SINKS)
                at = (token * HEADS + heads) * VALUE
                tl.store(out + at[:, None] + columns[None, :], acc.to(out.dtype.element_ty), mask=wanted)
            else:
                at = (request.to(tl.int64) * HEADS + heads) * MOST + split
                tl.store(parts + (at * VALUE)[:, None] + columns[None, :], acc, mask=wanted)
                tl.store(stats + at, best, mask=g < GROUP)
                tl.store(stats + at + requests.to(tl.int64) * (HEADS * MOST), total, mask=g < GROUP)
        place = (place + step - items % step) % step  # goes on where the chunk's last program stopped


@triton.jit(do_not_specialize=["requests"])
def merge_splits(
    out, parts, stats, starts, lengths, sinks, requests,
    HEADS: tl.constexpr, VALUE: tl.constexpr, BLOCK_D: tl.constexpr, WINDOW: tl.constexpr,
    LOCAL: tl.constexpr, HAS_SINKS: tl.constexpr,
    BLOCK_N: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Grid (R, H): puts the parts of requests with one token and several splits together, STEP at a time."""
    request, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(starts + request)
    _, _, splits = _share(tl.load(lengths + request), WINDOW, LOCAL, BLOCK_N, LEAST, MOST)
    if tl.load(starts + request + 1) - token != 1 or splits < 2:
        return
    first = (request.to(tl.int64) * HEADS + head) * MOST
    everyone = tl.arange(0, MOST)
    bests = tl.load(stats + first + everyone, mask=everyone < splits, other=float("-inf"))
    totals = tl.load(
        stats + first + everyone + requests.to(tl.int64) * (HEADS * MOST), mask=everyone < splits, other=0.0
    )
    best = tl.max(bests, 0)
    sink = 0.0
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        best = tl.maximum(best, sink)
    best = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(totals * tl.exp2(bests - best), 0)
    if HAS_SINKS:
        total += tl.exp2(sink - best)
    columns = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for n in range(0, splits, STEP):
        some = n + tl.arange(0, STEP)
        weights = tl.exp2(tl.load(stats + first + some, mask=some < splits, other=float("-inf")) - best)
        wanted = (some < splits)[:, None] & (columns < VALUE)[None, :]
        part = tl.load(parts + ((first + some) * VALUE)[:, None] + columns[None, :], mask=wanted, other=0.0)
        acc += tl.sum(part * weights[:, None], 0)
    acc /= tl.where(total == 0.0, 1.0, total)
    at = out + (token.to(tl.int64) * HEADS + head) * VALUE
    tl.store(at + columns, acc.to(out.dtype.element_ty), mask=columns < VALUE)


def may_split(call: AttentionLaunch) -> bool:
    """True if a context of the step may have several splits: not in a short window or chunk, nor in a narrow table.

    It follows from the layer and from shapes, so that a graph knows it, too.
    """
    of, blocks = call.layer, split_blocks(call.layer, call.limits)
    seen = call.pages * of.page_size
    if of.window or of.local:  # they begin at a multiple of a block
        seen = min(seen, (of.window or of.local) + blocks.slots - 1)
    return seen > least_blocks(blocks, call.limits) * blocks.slots


def launch(call: AttentionLaunch, parts: Tensor, stats: Tensor) -> None:
    """Both kernels over a step, the first alone where nothing is split; `parts` and `stats` are what needed() says, for
    as many requests at a time."""
    together, (batch, group) = parts.shape[0] or max(1, call.requests), call.context
    for first in range(0, max(1, call.requests), together):
        end = min(first + together, call.requests)
        some = group._replace(block_table=group.block_table[first:end], seq_lens=group.seq_lens[first:end])
        context = StepContext(batch._replace(query_start_loc=batch.query_start_loc[first : end + 1]), some)
        _launch(replace(call, context=context), parts, stats, call.q.shape[0] if end == call.requests else 0)


def _launch(call: AttentionLaunch, parts: Tensor, stats: Tensor, tokens: int) -> None:
    """`tokens` of the step, those of padding among them, if the last of its requests are here; else 0."""
    of, (batch, group) = call.layer, call.context
    blocks, most = split_blocks(of, call.limits), most_splits(of)
    common = {**of.sight, "BLOCK_N": blocks.slots, "LEAST": least_blocks(blocks, call.limits), "MOST": most}
    requests = call.requests
    attend_splits[(call.limits.processors * PER_PROCESSOR,)](
        call.out, parts, stats, *call.arrays, tokens, requests, call.pages, *call.numbers,
        **of.constants, **common, BLOCK_M=blocks.rows, CHUNK=CHUNK, num_warps=blocks.warps, num_stages=blocks.stages,
        **dict(call.limits.cut.options),
    )  # fmt: skip
    if not may_split(call):
        return
    merge_splits[(requests, of.heads)](
        call.out, parts, stats, batch.query_start_loc, group.seq_lens, call.sinks, requests,
        HEADS=of.heads, VALUE=of.value, BLOCK_D=of.block_dim, HAS_SINKS=of.sinks, STEP=min(STEP, most), **common,
        num_warps=merge_warps(of), num_stages=2,
    )  # fmt: skip


def needed(call: AttentionLaunch) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """workspace() of a step; nothing where nothing is split."""
    return workspace(call.layer, call.requests) if may_split(call) else ((0,), (0,))


def workspace(layer: AttentionLayer, requests: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of parts and stats, float32; for as many of the requests as have room at once.

    A multiple of 16, so that where each turn's arrays begin is one of 16 bytes.
    """
    most = most_splits(layer)
    together = max(16, ROOM // (4 * layer.heads * most * layer.value) // 16 * 16)
    requests = max(1, min(requests, together))
    return (requests, layer.heads, most, layer.value), (2, requests, layer.heads, most)


def variants(limits: DeviceLimits = DeviceLimits()) -> list[Variant]:  # noqa: B008
    layers = [
        AttentionLayer(32, 8, 128, 16, "bf16"),
        AttentionLayer(32, 8, 128, 16, "fp16", INT8),
        AttentionLayer(32, 8, 128, 16, "bf16", E4M3),
        AttentionLayer(32, 8, 128, 16, "bf16", e4m3=True),
        AttentionLayer(64, 8, 64, 16, "bf16", window=128, sinks=True),
        AttentionLayer(40, 8, 128, 16, "bf16", local=8192),
        AttentionLayer(128, 1, 576, 16, "bf16", shared=512),
        AttentionLayer(16, 1, 576, 16, "bf16", INT8, shared=512),
    ]
    made = []
    for of in (*layers, *RARE):
        blocks = split_blocks(of, limits)
        signature, constants = of.signature(("out", "parts", "stats"), ("tokens", "requests", "pages"))
        constants |= {"BLOCK_M": blocks.rows, "BLOCK_N": blocks.slots, "CHUNK": CHUNK}
        constants |= {"LEAST": least_blocks(blocks, limits), "MOST": most_splits(of)} | of.sight
        spills = 2  # ptxas keeps to 128 or 168 of a thread's 255 registers, and rather parts with one or two
        how = signature, constants, blocks.warps, blocks.stages, spills, of in RARE
        made.append(Variant(f"attend_splits {of}", attend_splits, *how))
    return [*made, *(_merge_variant(of, limits) for of in (layers[0], layers[6]))]


def _merge_variant(of: AttentionLayer, limits: DeviceLimits) -> Variant:
    blocks, most = split_blocks(of, limits), most_splits(of)
    signature = {"out": f"*{of.dtype}", "parts": "*fp32", "stats": "*fp32", "starts": "*i32", "lengths": "*i32"}
    signature |= {"requests": "i32"}
    constants = {"sinks": None, "HEADS": of.heads, "VALUE": of.value, "BLOCK_D": of.block_dim, **of.sight}
    constants |= {"HAS_SINKS": False, "BLOCK_N": blocks.slots, "LEAST": least_blocks(blocks, limits), "MOST": most}
    return Variant(
        f"merge_splits {of}", merge_splits, signature, constants | {"STEP": min(STEP, most)}, merge_warps(of), 2
    )
