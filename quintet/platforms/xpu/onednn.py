"""Products of whole numbers by oneDNN, through torch, where they probe as the specification's. Unverified on a GPU.

Formats that it does not take go to Triton's kernels. torch._scaled_mm is left out: no matrix unit of an Intel GPU that
torch serves by now multiplies 8-bit floats, so that rounding activations to them would gain nothing.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from quintet.interface.weights import Matrix, WeightFormat
from quintet.ops.linear import linear
from quintet.ops.quantize import attributes, quantize
from quintet.ops.quantized import MIDDLE
from quintet.ops.registry import Op, of_kind
from quintet.platforms.gpu.ops.probe import probing

PRIORITY: Mapping[str, Sequence[str]] = {of_kind("linear", kind): ("onednn", "triton") for kind in ("w8a8", "int4")}
MIN_GROUP = 32  # inputs that share a scale: groups are a multiple of it
# XPU's own, since torch 2.8: _weight_int4pack_mm is wrong for a single token there (torch-xpu-ops #4765)
NAME = "_weight_int4pack_mm_with_scales_and_zeros"


def supports(fmt: WeightFormat) -> bool:
    """True if products by weights of this format are oneDNN's."""
    plain = fmt.dtype is None and not (fmt.codebook or fmt.mins or fmt.act_order)
    grouped = fmt.group > 0 and fmt.group % MIN_GROUP == 0
    return plain and (grouped if fmt.kind == "int4" else fmt.kind == "w8a8" and not fmt.group)


def pack(placed: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The attributes of a canonical matrix of four bits as int4() reads them: scales group by group, in x's type."""
    types = {"scales": dtype, "zeros": torch.int8}
    return {name: x.t().to(types[name]).contiguous().t() if name in types else x for name, x in placed.items()}


def int4(x: Tensor, weight: Matrix, bias: Tensor | None, outputs: tuple[int, ...]) -> Tensor:
    """(value - zero) * scale are attributes of oneDNN's weights; the sums are rounded once before a bias is added."""
    if not supports(weight.format) or x.shape[1] % weight.format.group:
        return _next_provider("int4")(x, weight, bias, outputs)
    placed = pack(attributes(weight), x.dtype)
    scales = placed["scales"].t()
    zeros = placed["zeros"].t() if "zeros" in placed else _middle(scales.shape, x.device)
    fours = weight.values.view(torch.int32)  # eight in each, the first in its lowest bits
    y: Tensor = getattr(torch.ops.aten, NAME)(x.contiguous(), fours, weight.format.group, scales, zeros)
    return y if bias is None else y + bias


def w8a8(x: Tensor, weight: Matrix, bias: Tensor | None, outputs: tuple[int, ...]) -> Tensor:
    """Each token to eight bits; the sums are whole."""
    if not supports(weight.format) or weight.zeros is not None:
        return _next_provider("w8a8")(x, weight, bias, outputs)
    from quintet.platforms.gpu.kernels.rows import quantized

    assert weight.scales is not None, "what is quantized has scales"
    values, own = quantized(x if x.stride(-1) == 1 else x.contiguous(), x.shape[1], torch.int8)
    y = torch._int_mm(values, weight.values.t()).float() * own * weight.scales.t()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _deviation(device: torch.device, product: Callable[..., Tensor], fmt: WeightFormat) -> str | None:
    """Returns how the product of one token, or of three, differs from the specification's."""
    made = torch.Generator().manual_seed(0)
    matrix = quantize(torch.randn(48, 96, generator=made), fmt)
    assert matrix.scales is not None, "what is quantized has scales"
    there = Matrix(matrix.values.to(device), matrix.scales.to(device), format=fmt)
    for tokens in (1, 3):
        x = torch.randn(tokens, 96, generator=made).half()
        got, want = product(x.to(device), there, None, (48,)), linear.reference(x, matrix, None, (48,))
        worst = float((got.cpu().float() - want.float()).abs().max())
        if not worst < 0.05:  # of sums with a magnitude of 10; NaN is not below it either
            return f"a product of {tokens} tokens is off by {worst:.3g}"
    return None


probe_int4 = functools.cache(probing(lambda device: _deviation(device, int4, WeightFormat("int4", 4, 16, MIN_GROUP))))
probe_w8a8 = functools.cache(probing(lambda device: _deviation(device, w8a8, WeightFormat("w8a8", 8, 8))))


def _next_provider(kind: str) -> Callable[..., Tensor]:
    """The next provider that serves such weights here, for which place() laid them."""
    op = Op.registry[of_kind("linear", kind)]
    serves = "triton" in op.providers and op.probes["triton"]() is None
    return op.providers["triton"] if serves else op.reference


@functools.cache
def _middle(shape: torch.Size, device: torch.device) -> Tensor:
    """Kept for good: a captured step holds its address."""
    return torch.full(shape, MIDDLE, dtype=torch.int8, device=device)


def register() -> None:
    """Registers the providers when a device is opened, not before."""
    linear.provide("onednn", probe_int4, kinds=("int4",))(int4)
    linear.provide("onednn", probe_w8a8, kinds=("w8a8",))(w8a8)
