"""Counter-based random numbers: the words of quintet/ops/random.py, bit for bit.

Logarithms are the device's: correct to a rounding or two, as those of the specification are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintet.platforms.gpu.kernels.variant import Variant

BLOCK = 512  # tokens of a program; each costs some 150 instructions. Untuned


@triton.jit
def _mix(x0, x1, BY: tl.constexpr):
    x0 = x0 + x1
    return x0, ((x1 << BY) | (x1 >> (32 - BY))) ^ x0


@triton.jit
def _four(x0, x1, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    x0, x1 = _mix(x0, x1, A)
    x0, x1 = _mix(x0, x1, B)
    x0, x1 = _mix(x0, x1, C)
    return _mix(x0, x1, D)


@triton.jit
def threefry2x32(k0, k1, x0, x1):
    """20 rounds on uint32 words; see the specification."""
    k2 = k0 ^ k1 ^ 0x1BD11BDA
    x0, x1 = _four(x0 + k0, x1 + k1, 13, 15, 26, 6)
    x0, x1 = _four(x0 + k1, x1 + k2 + 1, 17, 29, 16, 24)
    x0, x1 = _four(x0 + k2, x1 + k0 + 2, 13, 15, 26, 6)
    x0, x1 = _four(x0 + k0, x1 + k1 + 3, 17, 29, 16, 24)
    x0, x1 = _four(x0 + k1, x1 + k2 + 4, 13, 15, 26, 6)
    return x0 + k2, x1 + k0 + 5


@triton.jit
def gumbel_of(word):
    """Standard Gumbel noise from the upper 23 bits of uint32 words."""
    uniform = ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2**-23
    return -tl.log(-tl.log(uniform))


@triton.jit
def counters_of(keys, positions, row):
    """The two key words and the position of a row, as uint32."""
    k0 = tl.load(keys + 2 * row).to(tl.uint32, bitcast=True)
    k1 = tl.load(keys + 2 * row + 1).to(tl.uint32, bitcast=True)
    return k0, k1, tl.load(positions + row).to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["ids_step", "count"])
def _gumbel(keys, positions, ids, out, ids_step, count, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k0, k1, position = counters_of(keys, positions, row)
    token = tl.load(ids + row * ids_step + i, mask=i < count, other=0).to(tl.uint32, bitcast=True)
    counter = token >> 1
    x0, x1 = threefry2x32(k0, k1, tl.zeros_like(counter) + position, counter)
    tl.store(out + row * count + i, gumbel_of(tl.where((token & 1) == 0, x0, x1)), mask=i < count)


def gumbel(keys: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Dense keys [R, 2], positions [R] and token_ids [R or 1, C], int32 -> [R, C] float32."""
    rows, count = keys.shape[0], token_ids.shape[1]
    out = torch.empty(rows, count, dtype=torch.float32, device=keys.device)
    step = count if token_ids.shape[0] > 1 else 0
    _gumbel[(rows, triton.cdiv(count, BLOCK))](keys, positions, token_ids, out, step, count, BLOCK=BLOCK)
    return out


def variants() -> list[Variant]:
    """The one variant."""
    signature = {"keys": "*i32", "positions": "*i32", "ids": "*i32", "out": "*fp32", "ids_step": "i32", "count": "i32"}
    return [Variant("gumbel", _gumbel, signature, {"BLOCK": BLOCK})]
