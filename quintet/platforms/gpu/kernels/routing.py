"""Routing of tokens to experts, and the order that groups tokens by expert. Not verified on a GPU yet.

A token's experts depend on its logits alone; the order is that of a stable sort, whichever program runs first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintet.platforms.gpu.kernels.variant import Variant

CHUNK = 256  # entries that one program of the sort counts and places
PIECE = tl.constexpr(32)  # of them are compared with the others at a time: 64 comparisons per thread of 4 warps


@triton.jit
def _largest(values, free, ids, none):
    """Returns the place of the largest free value, the first of equal ones; `none` if no number is free."""
    best = tl.max(tl.where(free, values, float("-inf")))
    return tl.min(tl.where(free & (values == best), ids, none))


@triton.jit
def _store_chosen(weights, ids, scores, places, k, token, RENORMALIZE: tl.constexpr, K: tl.constexpr):
    slots = tl.arange(0, K)
    if RENORMALIZE:
        scores = scores / tl.sum(scores)
    tl.store(weights + token * k + slots, scores, mask=slots < k)
    tl.store(ids + token * k + slots, places, mask=slots < k)


@triton.jit
def choose(weights, ids, logits, num, k, row, RENORMALIZE: tl.constexpr, P: tl.constexpr, K: tl.constexpr):
    """logits [T, num] -> weights and ids [T, k]; one program per token, with P experts of which num are there."""
    token = tl.program_id(0).to(tl.int64)
    at, slots = tl.arange(0, P), tl.arange(0, K)
    free = at < num
    x = tl.load(logits + token * row + at, mask=free, other=float("-inf")).to(tl.float32)
    each = tl.exp(x - tl.max(x))
    each = each / tl.sum(each)
    scores, places = tl.zeros((K,), tl.float32), tl.zeros((K,), tl.int32)
    for j in range(k):
        pick = _largest(x, free, at, num)
        free = free & (at != pick)
        scores = tl.where(slots == j, tl.sum(tl.where(at == pick, each, 0.0)), scores)
        places = tl.where(slots == j, pick, places)
    _store_chosen(weights, ids, scores, places, k, token, RENORMALIZE, K)


@triton.jit
def choose_grouped(
    weights, ids, logits, bias, size, groups, kept, k, row, RENORMALIZE: tl.constexpr, SOFTMAX: tl.constexpr,
    G: tl.constexpr, P: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """As choose(), by sigmoid + bias, from the `kept` best of the groups of `size` experts each, which rank by their
    two largest; SOFTMAX: by softmax + bias, and groups by their largest."""
    token = tl.program_id(0).to(tl.int64)
    group, inside, slots = tl.arange(0, G), tl.arange(0, P), tl.arange(0, K)
    there = (group < groups)[:, None] & (inside < size)[None, :]
    at = group[:, None] * size + inside[None, :]
    x = tl.load(logits + token * row + at, mask=there, other=0.0).to(tl.float32)
    if SOFTMAX:
        each = tl.where(there, tl.exp(x - tl.max(tl.where(there, x, float("-inf")))), 0.0)
        each = each / tl.sum(each)
    else:
        each = 1.0 / (1.0 + tl.exp(-x))
    ranks = each + tl.load(bias + at, mask=there, other=0.0).to(tl.float32)
    if kept < groups:
        numbers = tl.where(there, ranks, float("-inf"))
        best = tl.max(numbers, 1)
        if not SOFTMAX:
            first = tl.min(tl.where(numbers == best[:, None], inside[None, :], P), 1)
            best += tl.max(tl.where(inside[None, :] == first[:, None], float("-inf"), numbers), 1)
        free = group < groups
        for _ in range(kept):
            pick = _largest(best, free, group, G)
            free = free & (group != pick)
        ranks = tl.where(free[:, None], float("-inf"), ranks)
    left = there
    scores, places = tl.zeros((K,), tl.float32), tl.zeros((K,), tl.int32)
    for j in range(k):
        one = _largest(ranks, left, at, groups * size)
        left = left & (at != one)
        scores = tl.where(slots == j, tl.sum(tl.where(there & (at == one), each, 0.0)), scores)
        places = tl.where(slots == j, one, places)
    _store_chosen(weights, ids, scores, places, k, token, RENORMALIZE, K)


@triton.jit
def _owners(ids, entries, total, num):
    """The experts of entries; `num` for entries without an expert."""
    owner = tl.load(ids + entries, mask=entries < total, other=-1)
    return tl.where((owner >= 0) & (owner < num), owner, num)


@triton.jit(do_not_specialize=["total"])
def count(found, ids, total, num, C: tl.constexpr, P: tl.constexpr):
    """found [chunks, P]: how many of a chunk's entries are each expert's."""
    chunk = tl.program_id(0)
    entries = chunk * C + tl.arange(0, C)
    many = tl.histogram(_owners(ids, entries, total, num), P, mask=entries < total)
    tl.store(found + chunk * P + tl.arange(0, P), many)


@triton.jit(do_not_specialize=["total"])
def place(order, counts, found, ids, total, num, C: tl.constexpr, P: tl.constexpr):
    """order [total]: entries by expert, by entry among equals; those without are last. counts [num] of all chunks."""
    chunk, bins = tl.program_id(0), tl.arange(0, P)
    before, every = tl.zeros((P,), tl.int32), tl.zeros((P,), tl.int32)
    for other in range(tl.num_programs(0)):
        got = tl.load(found + other * P + bins)
        every += got
        before += tl.where(other < chunk, got, 0)
    if chunk == 0:
        tl.store(counts + bins, every, mask=bins < num)
    entries = chunk * C + tl.arange(0, C)
    owner = _owners(ids, entries, total, num)
    at = tl.gather(tl.cumsum(every, 0) - every + before, owner, 0)
    for piece in range(0, C, PIECE):
        others = chunk * C + piece + tl.arange(0, PIECE)
        same = (_owners(ids, others, total, num)[None, :] == owner[:, None]) & (others[None, :] < entries[:, None])
        at += tl.sum(same.to(tl.int32), 1)
    tl.store(order + at, entries, mask=entries < total)


def chosen(logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> weights [T, k] float32, ids [T, k] int32."""
    tokens, num = logits.shape
    weights, ids = _empty(tokens, k, logits)
    sizes = {"P": triton.next_power_of_2(num), "K": triton.next_power_of_2(k)}
    if tokens:
        choose[(tokens,)](weights, ids, logits, num, k, logits.stride(0), RENORMALIZE=renormalize, **sizes, num_warps=1)
    return weights, ids


def chosen_of_groups(
    logits: Tensor, bias: Tensor, k: int, sizes: tuple[int, int], renormalize: bool, softmax: bool = False
) -> tuple[Tensor, Tensor]:
    """logits [T, E], bias [E] -> weights [T, k] float32, ids [T, k] int32; sizes: (groups, kept)."""
    (tokens, num), (groups, kept) = logits.shape, sizes
    size = num // groups
    weights, ids = _empty(tokens, k, logits)
    powers = {name: triton.next_power_of_2(number) for name, number in (("G", groups), ("P", size), ("K", k))}
    if tokens:
        choose_grouped[(tokens,)](
            weights, ids, logits, bias, size, groups, kept, k, logits.stride(0), RENORMALIZE=renormalize,
            SOFTMAX=softmax, **powers, num_warps=1,
        )  # fmt: skip
    return weights, ids


def ordered(ids: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """ids [T, k] of experts -> order [T k], the entries t k + j by expert, and counts [num]; both int32."""
    total = ids.numel()
    chunks, bins = triton.cdiv(total, CHUNK), triton.next_power_of_2(num + 1)
    found = torch.empty((chunks, bins), dtype=torch.int32, device=ids.device)
    order = torch.empty(total, dtype=torch.int32, device=ids.device)
    counts = torch.empty(num, dtype=torch.int32, device=ids.device)
    count[(chunks,)](found, ids, total, num, C=CHUNK, P=bins)
    place[(chunks,)](order, counts, found, ids, total, num, C=CHUNK, P=bins)
    return order, counts


def _empty(tokens: int, k: int, like: Tensor) -> tuple[Tensor, Tensor]:
    weights = torch.empty((tokens, k), dtype=torch.float32, device=like.device)
    return weights, torch.empty((tokens, k), dtype=torch.int32, device=like.device)


def variants() -> list[Variant]:
    """Mixtral's 8 experts, Qwen3's 128, DeepSeek-V3's 256 and V2's 160 in 8 groups."""
    found = []
    for dtype in ("bf16", "fp16"):
        start = {"weights": "*fp32", "ids": "*i32", "logits": f"*{dtype}"}
        for num, k in ((8, 2), (128, 8)):
            signature = start | dict.fromkeys(("num", "k", "row"), "i32")
            fixed = {"RENORMALIZE": True, "P": num, "K": k}
            found.append(Variant(f"choose {k} of {num} {dtype}", choose, signature, fixed, num_warps=1))
        signature = start | {"bias": "*fp32"} | dict.fromkeys(("size", "groups", "kept", "k", "row"), "i32")
        for softmax in (False, True):
            fixed = {"RENORMALIZE": True, "SOFTMAX": softmax, "G": 8, "P": 32, "K": 8}
            name = f"choose 8 of 8 x 32 {dtype}{' by softmax' * softmax}"
            found.append(Variant(name, choose_grouped, signature, fixed, num_warps=1))
    for bins in (16, 256, 512):
        fixed, sizes = {"C": CHUNK, "P": bins}, {"total": "i32", "num": "i32"}
        found.append(Variant(f"count {bins}", count, {"found": "*i32", "ids": "*i32"} | sizes, fixed))
        names = dict.fromkeys(("order", "counts", "found", "ids"), "*i32")
        found.append(Variant(f"place {bins}", place, names | sizes, fixed))
    return found
