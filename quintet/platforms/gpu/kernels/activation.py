"""Activation times gate, and the soft cap: one pass over memory each.

Computed in float32; a number's result depends on that number alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintet.platforms.gpu.kernels.variant import Variant

BLOCK = 1024  # numbers of a program: 8 in each lane of 4 warps, one load of 16 bytes in half precision. Untuned
KINDS = {
    **{kind: kind for kind in ("gelu", "relu", "relu2", "silu")},
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh"), "gelu_tanh"),
}


@triton.jit
def tanh(x):
    """float32; near 0, where 1 - 2 / (exp(2 x) + 1) would lose digits, its series."""
    y = x * x
    series = x * (1.0 + y * (-0.33333334 + y * (0.13333334 + y * (-0.053968254 + y * 0.021869488))))
    return tl.where(y < 0.0625, series, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))


@triton.jit
def activated(x, KIND: tl.constexpr):
    """float32, by one of the values of KINDS."""
    if KIND == "silu":
        return x / (1.0 + tl.exp(-x))
    elif KIND == "relu":
        return tl.where(x < 0.0, 0.0, x)  # NaN stays
    elif KIND == "relu2":
        return tl.where(x < 0.0, 0.0, x * x)
    elif KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(KIND == "gelu_tanh")
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def _gated(x, out, step, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * step + i, mask=i < width, other=0.0)
    up = tl.load(x + row * step + width + i, mask=i < width, other=0.0).to(tl.float32)
    y = activated(gate.to(tl.float32), KIND).to(gate.dtype).to(tl.float32) * up
    tl.store(out + row * width + i, y.to(gate.dtype), mask=i < width)


@triton.jit(do_not_specialize=["count"])
def _softcap(x, count, cap, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x + i, mask=i < count, other=0.0)
    tl.store(x + i, (tanh(y.to(tl.float32) / cap) * cap).to(y.dtype), mask=i < count)


def gated(x: Tensor, kind: str) -> Tensor:
    """x [T, 2 I], gate beside up in dense rows -> [T, I]."""
    tokens, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    _gated[(tokens, triton.cdiv(width, BLOCK))](x, out, x.stride(0), width, KIND=KINDS[kind], BLOCK=BLOCK)
    return out


def softcap(x: Tensor, cap: float) -> None:
    """Overwrites a dense x."""
    _softcap[(triton.cdiv(x.numel(), BLOCK),)](x, x.numel(), cap, BLOCK=BLOCK)


def variants() -> list[Variant]:
    """Variants of every activation."""
    found = []
    for kind in ("bf16", "fp16", "fp32"):
        signature = {"x": f"*{kind}", "out": f"*{kind}", "step": "i32:16", "width": "i32:16"}
        for name in sorted(set(KINDS.values())):
            found.append(Variant(f"gated {name} {kind}", _gated, signature, {"KIND": name, "BLOCK": BLOCK}))
        signature = {"x": f"*{kind}", "count": "i32", "cap": "fp32"}
        found.append(Variant(f"softcap {kind}", _softcap, signature, {"BLOCK": BLOCK}))
    return found
