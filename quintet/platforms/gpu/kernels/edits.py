"""Edits of logits in place: penalties, biases, bans, masks.

A place may be given twice. Edits that depend on the logit are therefore computed for all places in one launch and
written in the next, so that none sees another's result.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintet.platforms.gpu.kernels.order import CHUNK, NEVER
from quintet.platforms.gpu.kernels.variant import Variant

BLOCK = 256  # places of a program. Untuned


@triton.jit(do_not_specialize=["num"])
def _penalized(logits, rows, ids, counts, penalties, values, step, num, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < num
    row = tl.load(rows + i, mask=there, other=0).to(tl.int64)
    x = tl.load(logits + row * step + tl.load(ids + i, mask=there, other=0), mask=there, other=0.0)
    repetition = tl.load(penalties + 3 * row, mask=there, other=1.0)
    x = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
    count = tl.load(counts + i, mask=there, other=0)
    x = x - tl.load(penalties + 3 * row + 1, mask=there, other=0.0) * count.to(tl.float32)
    presence = tl.load(penalties + 3 * row + 2, mask=there, other=0.0)
    tl.store(values + i, x - tl.where(count > 0, presence, 0.0), mask=there)


@triton.jit(do_not_specialize=["num"])
def _biased(logits, rows, ids, biases, values, step, num, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < num
    row = tl.load(rows + i, mask=there, other=0).to(tl.int64)
    x = tl.load(logits + row * step + tl.load(ids + i, mask=there, other=0), mask=there, other=0.0)
    tl.store(values + i, x + tl.load(biases + i, mask=there, other=0.0), mask=there)


@triton.jit(do_not_specialize=["num"])
def _write(logits, rows, ids, values, step, num, BAN: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < num
    row = tl.load(rows + i, mask=there, other=0).to(tl.int64)
    x = tl.full([BLOCK], NEVER, tl.float32)
    if not BAN:
        x = tl.load(values + i, mask=there, other=0.0)
    tl.store(logits + row * step + tl.load(ids + i, mask=there, other=0), x, mask=there)


@triton.jit
def _keep(logits, bits, step, bits_step, vocab, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    word = tl.load(bits + row * bits_step + token // 32, mask=token < vocab, other=-1)
    dropped = (token < vocab) & (((word >> (token % 32)) & 1) == 0)
    tl.store(logits + row * step + token, tl.full([CHUNK], NEVER, tl.float32), mask=dropped)


def penalize(logits: Tensor, rows: Tensor, ids: Tensor, counts: Tensor, penalties: Tensor) -> None:
    """Logits [R, V] float32 in dense rows; dense places and counts [M] int32, penalties [R, 3] float32."""
    values, step, num = _scratch(logits, rows), logits.stride(0), len(rows)
    grid = (triton.cdiv(num, BLOCK),)
    _penalized[grid](logits, rows, ids, counts, penalties, values, step, num, BLOCK=BLOCK)
    _write[grid](logits, rows, ids, values, step, num, BAN=False, BLOCK=BLOCK)


def bias_tokens(logits: Tensor, rows: Tensor, ids: Tensor, biases: Tensor) -> None:
    """Logits [R, V] float32 in dense rows; dense places [M] int32 and biases [M] float32."""
    values, step, num = _scratch(logits, rows), logits.stride(0), len(rows)
    grid = (triton.cdiv(num, BLOCK),)
    _biased[grid](logits, rows, ids, biases, values, step, num, BLOCK=BLOCK)
    _write[grid](logits, rows, ids, values, step, num, BAN=False, BLOCK=BLOCK)


def ban_tokens(logits: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Logits [R, V] float32 in dense rows; dense places [M] int32."""
    num = len(rows)
    _write[(triton.cdiv(num, BLOCK),)](logits, rows, ids, logits, logits.stride(0), num, BAN=True, BLOCK=BLOCK)


def keep_tokens(logits: Tensor, bits: Tensor) -> None:
    """Logits [R, V] float32 in dense rows, bits [R, ceil(V / 32)] int32 likewise. Reads no logit."""
    rows, vocab = logits.shape
    grid = (rows, triton.cdiv(vocab, CHUNK))
    _keep[grid](logits, bits, logits.stride(0), bits.stride(0), vocab, CHUNK=CHUNK)


def _scratch(logits: Tensor, rows: Tensor) -> Tensor:
    return torch.empty(len(rows), dtype=torch.float32, device=logits.device)


def variants() -> list[Variant]:
    """Variants of every kernel."""
    places = {"logits": "*fp32", "rows": "*i32", "ids": "*i32"}
    sizes = {"values": "*fp32", "step": "i32", "num": "i32"}
    penalized = {**places, "counts": "*i32", "penalties": "*fp32", **sizes}
    kept = {"logits": "*fp32", "bits": "*i32", "step": "i32:16", "bits_step": "i32", "vocab": "i32:16"}
    return [
        Variant("penalize", _penalized, penalized, {"BLOCK": BLOCK}),
        Variant("bias tokens", _biased, {**places, "biases": "*fp32", **sizes}, {"BLOCK": BLOCK}),
        Variant("write tokens", _write, {**places, **sizes}, {"BAN": False, "BLOCK": BLOCK}),
        Variant("ban tokens", _write, {**places, **sizes}, {"BAN": True, "BLOCK": BLOCK}),
        Variant("keep tokens", _keep, kept, {"CHUNK": CHUNK}),
    ]
