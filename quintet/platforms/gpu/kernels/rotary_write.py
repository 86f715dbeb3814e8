"""The rotary embedding of q and k, and K and V into pages of the cache, in one launch.

Bit for bit what the kernels of rotary.py and write_kv.py give one after the other: K is rounded between.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintet.interface.types import RotaryArgs
from quintet.platforms.gpu.kernels import rotary, write_kv
from quintet.platforms.gpu.kernels.rotary import turned
from quintet.platforms.gpu.kernels.variant import Variant
from quintet.platforms.gpu.kernels.write_kv import scale_of, write_part, write_scale, write_whole


@triton.jit
def rotary_write(
    q_out, kv, scales, q, k, v, q_weight, k_weight, table, positions, slots,
    q_heads, q_step, q_head_step, k_step, k_head_step, v_step, v_head_step, q_blocks, eps, offset,
    DIM: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, HEADS: tl.constexpr,
    NORM: tl.constexpr, SHIFTED: tl.constexpr, NEIGHBOURS: tl.constexpr,
    KV_HEADS: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """A program turns some heads of q of one token, or some of k, which it writes, and V of these."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, j = tl.arange(0, HALF_BLOCK), 2 * HALF + tl.arange(0, REST_BLOCK)
    first = 2 * i if NEIGHBOURS else i
    second = first + (1 if NEIGHBOURS else HALF)
    row = table + tl.load(positions + token).to(tl.int64) * (2 * HALF)
    if block < q_blocks:
        head = (block * HEADS + tl.arange(0, HEADS))[:, None]
        own = head < q_heads
        low, high, rest = turned(
            q + token * q_step + head * q_head_step, q_weight, row, own, first[None, :], second[None, :], i[None, :],
            j[None, :], eps, offset, DIM, HALF, REST_BLOCK, NORM, SHIFTED,
        )  # fmt: skip
        out = q_out + (token * q_heads + head) * DIM
        tl.store(out + i[None, :], low, mask=own & (i < HALF)[None, :])
        tl.store(out + HALF + i[None, :], high, mask=own & (i < HALF)[None, :])
        if 2 * HALF < DIM:
            tl.store(out + j[None, :], rest, mask=own & (j < DIM)[None, :])
    else:
        heads = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
        there, columns = heads < KV_HEADS, tl.arange(0, BLOCK_D)
        own = there[:, None]
        low, high, rest = turned(
            k + token * k_step + heads[:, None] * k_head_step, k_weight, row, own, first[None, :], second[None, :],
            i[None, :], j[None, :], eps, offset, DIM, HALF, REST_BLOCK, NORM, SHIFTED,
        )  # fmt: skip
        slot = tl.load(slots + token)
        rows = ((slot // PAGE_SIZE).to(tl.int64) * (2 * KV_HEADS) + heads) * PAGE_SIZE + slot % PAGE_SIZE
        turns, stays = own & (i < HALF)[None, :], own & (j < DIM)[None, :]
        scale = tl.maximum(scale_of(low, turns, STORED), scale_of(high, turns, STORED), tl.PropagateNan.ALL)
        if 2 * HALF < DIM:
            scale = tl.maximum(scale, scale_of(rest, stays, STORED), tl.PropagateNan.ALL)
            write_part(kv, rest, scale, rows, stays, j, WIDTH, STORED)
        write_part(kv, low, scale, rows, turns, i, WIDTH, STORED)
        write_part(kv, high, scale, rows, turns, HALF + i, WIDTH, STORED)
        write_scale(scales, scale, rows, there, WIDTH, DIM, STORED)
        wanted = own & (columns < DIM)[None, :]
        x = tl.load(v + token * v_step + heads[:, None] * v_head_step + columns[None, :], mask=wanted, other=0.0)
        write_whole(kv, scales, x, rows + KV_HEADS * PAGE_SIZE, wanted, there, columns, WIDTH, DIM, STORED)


def launch(q: Tensor, k: Tensor, v: Tensor, args: RotaryArgs, kv: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
    """q [T, H, D], k and v [T, Hkv, D] with a dense last axis; kv [P, 2, Hkv, page_size, row width], contiguous ->
    q turned."""
    tokens, heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    pages = write_kv.constants_of(kv, dim)
    turns = rotary.constants_of(dim, args.cos_sin, args.norms, args.interleaved)
    q_blocks, k_blocks = (triton.cdiv(x.shape[1], turns["HEADS"]) for x in (q, k))
    of_q, of_k, eps, offset = (q, k, 0.0, 0.0) if args.norms is None else args.norms
    rotary_write[(tokens, q_blocks + k_blocks)](
        out, *write_kv.seen(kv), q, k, v, of_q, of_k, args.cos_sin, positions, slots, heads, *q.stride()[:2],
        *k.stride()[:2], *v.stride()[:2], q_blocks, eps, offset, **turns, **_beside(pages),
    )  # fmt: skip
    return out


def _beside(pages: dict[str, int]) -> dict[str, int]:
    """Returns the constants of write_kv, but for the split of heads: the rotation's constants have that."""
    return {name: pages[name] for name in ("KV_HEADS", "BLOCK_D", "PAGE_SIZE", "WIDTH", "STORED")}


def variants() -> list[Variant]:
    """Variants: every way to rotate with one to store, and every way to store with one to rotate."""
    stores = [each for each in write_kv.variants() if each.constexprs["PARTS"] == 2]
    dim = stores[0].constexprs["DIM"]
    turns = [each for each in rotary.variants() if each.constexprs["DIM"] == dim and "bf16" in each.name]
    return [_variant(each, stores[0]) for each in turns] + [_variant(turns[-2], each) for each in stores[1:]]


def _variant(turns: Variant, stored: Variant) -> Variant:
    known = {**turns.signature, **stored.signature, "v_step": "i32:16", "v_head_step": "i32:16"}
    signature = {name: known[name] for name in rotary_write.arg_names if name in known}
    constants = {**turns.constexprs, **_beside(dict(stored.constexprs))}
    return Variant(f"{turns.name}, {stored.name}", rotary_write, signature, constants)
