"""Log-probabilities of a row's likeliest tokens, without sorting it.

Chunks give their best logit, their part of the sum and of the rank; a bound that few logits pass follows from the best
ones; those are listed, and the best taken off the list one by one. Each sum has one order, which the vocabulary's size
settles.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintet.platforms.gpu.kernels.order import (
    CHUNK,
    LOWEST,
    NEVER,
    SCRATCH,
    key_of,
    kth_largest,
    number_of,
    score_in,
    scored,
    token_in,
)
from quintet.platforms.gpu.kernels.variant import Variant

LISTED = 2048  # of the listed tokens that a program looks at at once. Untuned
MOST = 64  # taken off the list: each costs a pass over it. Who asks for more wants a sort
WARPS = 8  # of a row's last program. Untuned


@triton.jit
def _survey(logits, wanted, own, best, sums, above, step, vocab, parts, CHUNK: tl.constexpr, NORMALIZE: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(wanted + row) != 0:
        token = part * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row * step + token, mask=token < vocab, other=NEVER).to(tl.float32)
        top = tl.max(scored(x, token), 0)
        tl.store(best + row * parts + part, top)
        if NORMALIZE:  # with a peak of -inf, nothing is above it: no NaN of -inf - -inf
            tl.store(sums + row * parts + part, tl.sum(tl.where(x == NEVER, 0.0, tl.exp(x - score_in(top))), 0))
        mine = tl.load(logits + row * step + tl.maximum(tl.load(own + row), 0)).to(tl.float32)
        tl.store(above + row * parts + part, tl.sum((x > mine).to(tl.int32), 0))


@triton.jit(do_not_specialize=["num"])
def _bounds(wanted, best, bounds, counts, num, parts, PARTS: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    if tl.load(wanted + row) != 0:
        keys = (tl.load(best + row * parts + part, mask=part < parts, other=LOWEST) >> 32).to(tl.int32)
        bound = tl.full([], -0x80000000, tl.int32)
        if num <= parts:  # so many chunks reach it
            least = tl.min(tl.where(part < parts, keys, 0x7FFFFFFF), 0)
            bound = kth_largest(keys, num, least, tl.max(keys, 0))
        tl.store(bounds + row, bound)
        tl.store(counts + row, 0)


@triton.jit
def _list(logits, wanted, bounds, counts, listed, step, vocab, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(wanted + row) != 0:
        token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row * step + token, mask=token < vocab, other=NEVER).to(tl.float32)
        live = (token < vocab) & (key_of(x) >= tl.load(bounds + row))
        number = tl.sum(live.to(tl.int32), 0)
        if number > 0:
            first = tl.atomic_add(counts + row, number, sem="relaxed")
            tl.store(listed + row * vocab + first + tl.cumsum(live.to(tl.int32), 0) - 1, token, mask=live)


@triton.jit
def _next_best(logits, listed, count, last, LISTED: tl.constexpr):
    """The best of the listed tokens that come after `last`."""
    top = tl.full([LISTED], LOWEST, tl.int64)
    for start in range(0, count, LISTED):
        i = start + tl.arange(0, LISTED)
        token = tl.load(listed + i, mask=i < count, other=0)
        each = scored(tl.load(logits + token, mask=i < count, other=NEVER).to(tl.float32), token)
        top = tl.maximum(top, tl.where((i < count) & (each < last), each, LOWEST))
    return tl.max(top, 0)


@triton.jit(do_not_specialize=["num"])
def _report(
    logits, wanted, own, best, sums, above, counts, listed, ids, values, ranks, num, step, vocab, parts,
    PARTS: tl.constexpr, LISTED: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    ids += row * (num + 1)
    values += row * (num + 1)
    if tl.load(wanted + row) == 0:
        tl.store(ranks + row, 0)
        for i in range(num + 1):
            tl.store(ids + i, 0)
            tl.store(values + i, 0.0)
    else:
        there, logits = part < parts, logits + row * step
        peak, rest = tl.zeros([], tl.float32), tl.zeros([], tl.float32)
        if NORMALIZE:
            peaks = score_in(tl.load(best + row * parts + part, mask=there, other=LOWEST))
            key = tl.max(tl.where(there, key_of(peaks), -0x80000000), 0)
            peak = number_of(key)
            each = tl.load(sums + row * parts + part, mask=there, other=0.0)
            each = tl.where(there, each * tl.exp(peaks - peak), 0.0)
            rest = tl.log(tl.sum(each, 0))
        mine = tl.maximum(tl.load(own + row), 0)
        tl.store(ids, mine)
        tl.store(values, tl.load(logits + mine).to(tl.float32) - peak - rest)
        tl.store(ranks + row, 1 + tl.sum(tl.load(above + row * parts + part, mask=there, other=0), 0))
        last = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
        for i in range(num):
            last = _next_best(logits, listed + row * vocab, tl.load(counts + row), last, LISTED)
            tl.store(ids + 1 + i, token_in(last))
            tl.store(values + 1 + i, score_in(last) - peak - rest)


def top_logprobs(
    logits: Tensor, token_ids: Tensor, num: int, normalize: bool, wanted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [R, V] of any float type in dense rows, token_ids and wanted [R] int32; num is at most MOST.

    As many rows at a time as have room to list their tokens.
    """
    rows, vocab = logits.shape
    together = max(1, SCRATCH // vocab)
    pieces = [
        _of_rows(logits[at : at + together], token_ids[at : at + together], num, normalize, wanted[at : at + together])
        for at in range(0, max(rows, 1), together)
    ]
    if len(pieces) == 1:
        return pieces[0]
    ids, values, ranks = (torch.cat(columns) for columns in zip(*pieces, strict=True))
    return ids, values, ranks


def _of_rows(
    logits: Tensor, token_ids: Tensor, num: int, normalize: bool, wanted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows, vocab = logits.shape
    parts, step, device = triton.cdiv(vocab, CHUNK), logits.stride(0), logits.device

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    best, above, counts = empty(rows, parts, dtype=torch.int64), empty(rows, parts), empty(rows)
    sums = empty(rows, parts if normalize else 0, dtype=torch.float32)
    listed = empty(rows, vocab if num else 0)  # every token may reach the bound
    ids, values, ranks = empty(rows, num + 1), empty(rows, num + 1, dtype=torch.float32), empty(rows)
    grid, width = (rows, parts), triton.next_power_of_2(parts)
    _survey[grid](logits, wanted, token_ids, best, sums, above, step, vocab, parts, CHUNK=CHUNK, NORMALIZE=normalize)
    if num:
        bounds = empty(rows)
        _bounds[(rows,)](wanted, best, bounds, counts, num, parts, PARTS=width, num_warps=1)
        _list[grid](logits, wanted, bounds, counts, listed, step, vocab, CHUNK=CHUNK)
    _report[(rows,)](
        logits, wanted, token_ids, best, sums, above, counts, listed, ids, values, ranks, num, step, vocab, parts,
        PARTS=width, LISTED=LISTED, NORMALIZE=normalize, num_warps=WARPS,
    )  # fmt: skip
    return ids, values, ranks


def variants() -> list[Variant]:
    """Float32 logits, as the sampler has them, of vocabularies up to 262,144."""
    rows = {"logits": "*fp32", "wanted": "*i32", "own": "*i32", "best": "*i64", "sums": "*fp32", "above": "*i32"}
    sizes = {"num": "i32", "parts": "i32", "step": "i32:16", "vocab": "i32:16"}
    lists = {"bounds": "*i32", "counts": "*i32", "listed": "*i32"}
    given = {**rows, **sizes, **lists, "ids": "*i32", "values": "*fp32", "ranks": "*i32"}
    found = [
        Variant("bounds of logprobs", _bounds, _some(_bounds, given), {"PARTS": 256}, 1),
        Variant("list of logprobs", _list, _some(_list, given), {"CHUNK": CHUNK}),
    ]
    for normalize in (False, True):
        constants = {"CHUNK": CHUNK, "NORMALIZE": normalize}
        found.append(Variant(f"survey, normalize {normalize}", _survey, _some(_survey, given), constants))
        constants = {"PARTS": 256, "LISTED": LISTED, "NORMALIZE": normalize}
        spills = 2  # ptxas keeps to 32 registers with Triton 3.6.0, and rather parts with two
        found.append(
            Variant(f"report, normalize {normalize}", _report, _some(_report, given), constants, WARPS, 2, spills)
        )
    return found


def _some(kernel: triton.JITFunction, given: dict[str, str]) -> dict[str, str]:
    """The types of what a kernel takes."""
    return {name: given[name] for name in kernel.arg_names if name in given}
