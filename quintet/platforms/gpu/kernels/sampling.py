"""Cuts and draws, without sorting a row.

A row is read in chunks, each by a program of its own. Where a row has top_k or top_p, four launches find its threshold:
the best of each chunk; from these a bound that no threshold lies below; the logits above it, written beside each other;
a bisection over the bits of those. Then each chunk draws, and the best draw wins. No result waits for the host.

Probabilities are added up as whole numbers of 2**-40 of the likeliest token's, so that sums are exact in any order and
a row has the same bits in every batch, and in every order in which programs run.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintet.ops.sampling import Draw
from quintet.platforms.gpu.kernels.order import (
    CHUNK,
    LOWEST,
    NEVER,
    SCRATCH,
    best_of_parts,
    key_of,
    kth_largest,
    number_of,
    scored,
    winner,
)
from quintet.platforms.gpu.kernels.random import counters_of, gumbel_of, threefry2x32
from quintet.platforms.gpu.kernels.variant import Variant

FOUND = 4096  # listed logits that a program looks at at once, 8 in each lane of 16 warps; mostly fewer are. Untuned
FOUND_WARPS = 16
UNIT = tl.constexpr(float(2**40))  # of probability: 2**40 times 2**22 tokens fit in 63 bits
HOPELESS = tl.constexpr(19.5)  # below the likeliest logit; noise is between -2.8116 and 16.6356, so no draw overtakes


class SamplingCutoffs(NamedTuple):
    """Cut-offs of each row, known once its chunks were read; sizes are in scaled logits."""

    peak: Tensor  # [R] float32: the largest
    threshold: Tensor  # [R] float32: tokens from here on stay
    bound: Tensor  # [R] float32: the threshold is not below it
    number: Tensor  # [R] int32: logits from the bound on
    mass: Tensor  # [R] int64: the units of all tokens that min_p leaves


@triton.jit
def _scaled(x, temperature, row, SCALE: tl.constexpr):
    """A row's logits over its temperature, rounded to the nearest: equal ones must be the specification's."""
    if SCALE:
        t = tl.load(temperature + row)
        x = tl.div_rn(x, tl.zeros_like(x) + tl.where(t > 0.0, t, 1.0))
    return x


@triton.jit
def _units(x, peak):
    """A token's probability over the likeliest's, as int64."""
    return (tl.exp(x - peak) * UNIT).to(tl.int64)


@triton.jit
def _bounds(
    best, temperature, top_k, top_p, min_p, peaks, thresholds, bounds, counts, masses, parts, vocab,
    PARTS: tl.constexpr, SCALE: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    keys = (tl.load(best + row * parts + part, mask=part < parts, other=LOWEST) >> 32).to(tl.int32)
    peak = _scaled(number_of(tl.max(keys, 0)), temperature, row, SCALE)
    floor = tl.load(min_p + row)
    least = peak + tl.where(floor > 0.0, tl.log(tl.where(floor > 0.0, floor, 1.0)), NEVER)
    tl.store(peaks + row, peak)
    tl.store(thresholds + row, least)
    if SEARCH:
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        bound = least
        if k > 0:
            if k <= parts:  # so many chunks reach it
                kth = kth_largest(keys, k, tl.min(tl.where(part < parts, keys, 0x7FFFFFFF), 0), tl.max(keys, 0))
                bound = tl.maximum(bound, _scaled(number_of(kth), temperature, row, SCALE))
        elif p < 1.0:  # the others together have less than 1 - p of the likeliest token's probability
            depth = tl.log(vocab / (1.0 - p)) + 0.1 + 1e-6 * tl.abs(peak)
            bound = tl.maximum(bound, peak - depth)
        tl.store(bounds + row, bound)
        tl.store(counts + row, 0)
        tl.store(masses + row, tl.zeros([], tl.int64))


@triton.jit
def _gather(
    logits, temperature, top_k, top_p, peaks, thresholds, bounds, counts, masses, found, step, vocab, room,
    CHUNK: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    if (k > 0) | (p < 1.0):
        token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row * step + token, mask=token < vocab, other=NEVER)
        x = _scaled(x, temperature, row, SCALE)
        if k <= 0:  # with top_k, those that are found say it
            kept = (token < vocab) & (x >= tl.load(thresholds + row))
            mass = tl.sum(tl.where(kept, _units(x, tl.load(peaks + row)), 0), 0)
            tl.atomic_add(masses + row, mass, sem="relaxed")
        live = (token < vocab) & (x >= tl.load(bounds + row))
        number = tl.sum(live.to(tl.int32), 0)
        if number > 0:
            first = tl.atomic_add(counts + row, number, sem="relaxed")
            place = first + tl.cumsum(live.to(tl.int32), 0) - 1
            tl.store(found + row * room + place, key_of(x), mask=live)


@triton.jit
def _reaching(found, count, key, peak, FOUND: tl.constexpr):
    """Returns how many listed keys reach this one, and the sum of their units. A list has room for whole blocks."""
    key = key.to(tl.int32)
    numbers, units = tl.zeros([FOUND], tl.int32), tl.zeros([FOUND], tl.int64)
    for start in range(0, count, FOUND):
        i = start + tl.arange(0, FOUND)
        keys = tl.load(found + i)
        kept = (i < count) & (keys >= key)
        numbers += kept.to(tl.int32)
        units += tl.where(kept, _units(number_of(tl.where(kept, keys, key)), peak), 0)
    return tl.sum(numbers, 0), tl.sum(units, 0)


@triton.jit
def _last(found, count, lo, hi, number, wanted, peak, BY_NUMBER: tl.constexpr, FOUND: tl.constexpr):
    """The largest key of [lo, hi] that `wanted` listed tokens, or units of them, reach; or one with the same tokens.

    `number` tokens reach lo, which are enough, and none is above hi.
    """
    above = number * 0  # tokens that reach hi + 1
    while (lo < hi) & (number - above > 1):
        middle = lo + ((hi - lo + 1) >> 1)
        reached, units = _reaching(found, count, middle, peak, FOUND)
        enough = units >= wanted
        if BY_NUMBER:
            enough = reached >= wanted
        if enough:
            lo, number = middle, reached
        else:
            hi, above = middle - 1, reached
    return lo


@triton.jit
def _thresholds(top_k, top_p, peaks, thresholds, bounds, counts, masses, found, room, FOUND: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k, p, peak = tl.load(top_k + row), tl.load(top_p + row), tl.load(peaks + row)
    if ((k > 0) | (p < 1.0)) & (tl.abs(peak) < float("inf")):
        found += row * room
        count, mass = tl.load(counts + row), tl.load(masses + row)
        lo, hi = key_of(tl.load(bounds + row)).to(tl.int64), key_of(peak).to(tl.int64)
        number = count
        if k > 0:
            if count > k:  # else all that were found stay
                lo = _last(found, count, lo, hi, count, k, peak, True, FOUND)
            number, mass = _reaching(found, count, lo, peak, FOUND)
            if number > k:  # equal ones: all stay, but k count
                mass -= (number - k).to(tl.int64) * _units(number_of(lo.to(tl.int32)), peak)
        if p < 1.0:
            share = tl.ceil(p * 16777216.0).to(tl.int64)  # in 2**-24
            wanted = (mass >> 24) * share + (((mass & 0xFFFFFF) * share) >> 24)
            lo = _last(found, count, lo, hi, number, wanted, peak, False, FOUND)
        tl.store(thresholds + row, tl.maximum(tl.load(thresholds + row), number_of(lo.to(tl.int32))))


@triton.jit
def _keep(logits, thresholds, out, step, vocab, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * step + token, mask=token < vocab, other=NEVER)
    tl.store(out + row * vocab + token, tl.where(x >= tl.load(thresholds + row), x, NEVER), mask=token < vocab)


@triton.jit
def _draw(logits, temperature, keys, positions, peaks, thresholds, best, step, vocab, parts, CHUNK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * step + token, mask=token < vocab, other=NEVER)
    x = _scaled(x, temperature, row, True)
    peak = tl.load(peaks + row)
    hopeful = x >= peak - HOPELESS - 1e-6 * tl.abs(peak)
    live = (token < vocab) & (x >= tl.load(thresholds + row)) & hopeful
    top = tl.full([], LOWEST, tl.int64)
    if tl.max(live.to(tl.int32), 0) > 0:
        if tl.load(temperature + row) > 0.0:
            k0, k1, position = counters_of(keys, positions, row)
            counter = (part * (CHUNK // 2) + tl.arange(0, CHUNK // 2)).to(tl.uint32)
            x0, x1 = threefry2x32(k0, k1, tl.zeros_like(counter) + position, counter)
            x += gumbel_of(tl.interleave(x0, x1))
        top = tl.max(tl.where(live, scored(x, token), LOWEST), 0)
    tl.store(best + row * parts + part, top)


def filter_logits(logits: Tensor, draw: Draw, search: bool) -> Tensor:
    """Scaled logits [R, V] float32 in dense rows; `search` if a row may have top_k or top_p."""
    cuts = _cuts(logits, draw, search, False)
    rows, vocab = logits.shape
    out = torch.empty(rows, vocab, dtype=logits.dtype, device=logits.device)
    grid = (rows, triton.cdiv(vocab, CHUNK))
    _keep[grid](logits, cuts.threshold, out, logits.stride(0), vocab, CHUNK=CHUNK)
    return out


def sample(logits: Tensor, draw: Draw, search: bool) -> Tensor:
    """Logits [R, V] float32 in dense rows -> [R] int32; `search` if a row may have top_k or top_p."""
    cuts = _cuts(logits, draw, search, True)
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, CHUNK)
    best = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
    _draw[(rows, parts)](
        logits, draw.temperature, draw.keys, draw.positions, cuts.peak, cuts.threshold, best, logits.stride(0), vocab,
        parts, CHUNK=CHUNK,
    )  # fmt: skip
    return winner(best)


def _cuts(logits: Tensor, draw: Draw, search: bool, scale: bool) -> SamplingCutoffs:
    """Each row's peak and threshold, in logits divided by the temperature if `scale`."""
    rows, vocab = logits.shape
    best = best_of_parts(logits)
    parts, device = best.shape[1], logits.device
    peak, threshold, bound = torch.empty(3, rows, dtype=torch.float32, device=device).unbind()
    count = torch.empty(rows, dtype=torch.int32, device=device)
    cuts = SamplingCutoffs(peak, threshold, bound, count, torch.empty(rows, dtype=torch.int64, device=device))
    _bounds[(rows,)](
        best, draw.temperature, draw.top_k, draw.top_p, draw.min_p, *cuts, parts, vocab,
        PARTS=triton.next_power_of_2(parts), SCALE=scale, SEARCH=search, num_warps=1,
    )  # fmt: skip
    if search:
        _search(logits, draw, cuts, scale)
    return cuts


def _search(logits: Tensor, draw: Draw, cuts: SamplingCutoffs, scale: bool) -> None:
    """Raises the thresholds to what top_k and top_p leave, as many rows at a time as have room to list their logits."""
    rows, vocab = logits.shape
    room = triton.cdiv(vocab, FOUND) * FOUND
    together = max(1, min(rows, SCRATCH // room))
    found = torch.empty(together, room, dtype=torch.int32, device=logits.device)  # all may be above the bound
    for first in range(0, rows, together):
        some = slice(first, min(first + together, rows))
        temperature, top_k, top_p = (column[some] for column in draw[:3])
        of_rows = [column[some] for column in cuts]
        _gather[(some.stop - first, triton.cdiv(vocab, CHUNK))](
            logits[some], temperature, top_k, top_p, *of_rows, found, logits.stride(0), vocab, room,
            CHUNK=CHUNK, SCALE=scale,
        )  # fmt: skip
        _thresholds[(some.stop - first,)](top_k, top_p, *of_rows, found, room, FOUND=FOUND, num_warps=FOUND_WARPS)


def variants() -> list[Variant]:
    """Variants of every kernel, for vocabularies up to 262,144."""
    columns = {"temperature": "*fp32", "top_k": "*i32", "top_p": "*fp32", "min_p": "*fp32"}
    cuts = dict.fromkeys(("peaks", "thresholds", "bounds"), "*fp32") | {"counts": "*i32", "masses": "*i64"}
    logits = {"logits": "*fp32", "step": "i32:16", "vocab": "i32:16"}
    bounded = {"best": "*i64", **columns, **cuts, "parts": "i32", "vocab": "i32"}
    gathered = {**logits, **columns, **cuts, "found": "*i32", "room": "i32:16"}
    gathered.pop("min_p")
    settled = {"top_k": "*i32", "top_p": "*fp32", **cuts, "found": "*i32", "room": "i32:16"}
    drawn = {**logits, "temperature": "*fp32", "keys": "*i32", "positions": "*i32", "peaks": "*fp32",
             "thresholds": "*fp32", "best": "*i64", "parts": "i32"}  # fmt: skip
    kept = {**logits, "thresholds": "*fp32", "out": "*fp32"}
    found = [
        Variant("thresholds", _thresholds, settled, {"FOUND": FOUND}, FOUND_WARPS),
        Variant("keep", _keep, kept, {"CHUNK": CHUNK}),
        Variant("draw", _draw, drawn, {"CHUNK": CHUNK}),
    ]
    for scale in (False, True):
        found.append(Variant(f"gather, scale {scale}", _gather, gathered, {"CHUNK": CHUNK, "SCALE": scale}))
        for search in (False, True):
            constants = {"PARTS": 256, "SCALE": scale, "SEARCH": search}
            found.append(Variant(f"bounds, scale {scale}, search {search}", _bounds, bounded, constants, 1))
    return found
