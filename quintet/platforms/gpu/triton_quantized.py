"""Products with quantized weights by Triton: as packing.py lays them, or as the specification has them.

Not verified on a GPU yet. What its tiles cannot cut (groups of fewer than 16 inputs, and of 4 bits in pairs of fewer
than 32) goes to the reference; place() makes none of it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quintet.ops.quantized import (
    Outputs,
    linear_fp8,
    linear_fp8_dynamic,
    linear_int4,
    linear_int8,
    linear_w4a8,
    linear_w8a8,
)
from quintet.platforms.gpu.packing import pack
from quintet.platforms.gpu.triton_probe import probing
from quintet.types import Scheme

if TYPE_CHECKING:
    from quintet.platforms.gpu.kernels.quantized import Packed


def _check(scheme: Scheme) -> Callable[[torch.device], str | None]:
    """A product of 64 inputs and two outputs by a scheme that place() packs."""

    def check(device: torch.device) -> str | None:
        x, weight = torch.zeros(1, 64, device=device), torch.zeros(2, 64, device=device)
        x[0, 5], x[0, 7], weight[0, 5], weight[1, 7] = 1.0, -1.0, 3.0, 2.0
        packed = pack(weight, scheme)
        of = {"int8": _int8, "int4": _four_bits, "w8a8": _w8a8, "w4a8": _w4a8}[scheme.name]
        got = of(x.bfloat16(), packed["weight"], packed["scales"], None, (2,))
        return _wrong(got, [[3.0, -2.0]])

    return check


def _check_fp8(dynamic: bool) -> Callable[[torch.device], str | None]:
    def check(device: torch.device) -> str | None:
        x, ones = torch.zeros(1, 64, device=device), torch.ones(1, 1, device=device)
        x[0, 5], x[0, 7] = 1.0, -1.0
        weight = torch.zeros(2, 64)
        weight[0, 5], weight[1, 7] = 3.0, 2.0
        of = _fp8_dynamic if dynamic else _fp8
        got = of(x.half(), weight.to(torch.float8_e4m3fn).to(device), ones, None, 0, (2,))
        return _wrong(got, [[3.0, -2.0]])

    return check


def _wrong(got: Tensor, want: list[list[float]]) -> str | None:
    if torch.allclose(got.float().cpu(), torch.tensor(want), rtol=0.02):
        return None
    return f"a product gave {got.tolist()}, not {want}"


def _four_bits(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, outputs: Outputs) -> Tensor:
    return _int4(x, weight, scales, None, bias, outputs)


@linear_int8.provide("triton", probing(_check(Scheme("int8", 8, 16, 64))))
def _int8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, outputs: Outputs) -> Tensor:
    packed = _packed(x, weight, scales, outputs, 8)
    if not packed.part(16):
        return _plain(linear_int8.reference(x, weight, scales, bias, outputs))
    return _product(x, None, packed, bias, x.dtype)


@linear_int4.provide("triton", probing(_check(Scheme("int4", 4, 16, 32))))
def _int4(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, outputs: Outputs
) -> Tensor:
    packed = _packed(x, weight, scales, outputs, 4, zeros)
    if not packed.part(16):
        return _plain(linear_int4.reference(x, weight, scales, zeros, bias, outputs))
    return _product(x, None, packed, bias, x.dtype)


@linear_w8a8.provide("triton", probing(_check(Scheme("w8a8", 8, 8, 0))))
def _w8a8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, outputs: Outputs) -> Tensor:
    packed = _packed(x, weight, scales, outputs, 8)
    return _product(*_quantized(x, x.shape[1], torch.int8), packed, bias, x.dtype)


@linear_w4a8.provide("triton", probing(_check(Scheme("w4a8", 4, 8, 64))))
def _w4a8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, outputs: Outputs) -> Tensor:
    packed = _packed(x, weight, scales, outputs, 4)
    if not packed.part(32):
        return _plain(linear_w4a8.reference(x, weight, scales, bias, outputs))
    return _product(*_quantized(x, x.shape[1] // scales.shape[1], torch.int8), packed, bias, x.dtype)


@linear_fp8.provide("triton", probing(_check_fp8(False)))
def _fp8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, block: int, outputs: Outputs) -> Tensor:
    packed = _packed_fp8(x, weight, scales, block, outputs)
    if not packed.part(16):
        return _plain(linear_fp8.reference(x, weight, scales, bias, block, outputs))
    return _product(x, None, packed, bias, x.dtype)


@linear_fp8_dynamic.provide("triton", probing(_check_fp8(True)))
def _fp8_dynamic(
    x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, block: int, outputs: Outputs
) -> Tensor:
    packed = _packed_fp8(x, weight, scales, block, outputs)
    if not packed.part(16):
        return _plain(linear_fp8_dynamic.reference(x, weight, scales, bias, block, outputs))
    return _product(*_quantized(x, block or x.shape[1], weight.dtype), packed, bias, x.dtype)


def _packed(
    x: Tensor, weight: Tensor, scales: Tensor, outputs: Outputs, bits: int, zeros: Tensor | None = None
) -> "Packed":
    """ValueError where x, weight and scales do not fit."""
    from quintet.platforms.gpu.kernels.quantized import WHOLE, Packed

    count, inputs, groups = sum(outputs), x.shape[1], scales.shape[1]
    row = weight.shape[1:].numel() * 8 // bits
    fits = row == inputs if weight.dim() == 2 else 0 <= row - inputs < 2 * weight.shape[2]
    if len(weight) != count or not fits or scales.shape[0] != count or inputs % groups:
        raise ValueError(
            f"x {tuple(x.shape)} and {count} outputs do not fit a weight {tuple(weight.shape)} of {bits} bits "
            f"with scales {tuple(scales.shape)}"
        )
    group = inputs // groups if groups > 1 else 0 if zeros is None else WHOLE
    if zeros is not None and zeros.stride() != scales.stride():
        zeros = torch.empty_like(scales, dtype=zeros.dtype).copy_(zeros)
    return Packed(_rows(weight), scales, count, bits, group, 1, zeros)


def _packed_fp8(x: Tensor, weight: Tensor, scales: Tensor, block: int, outputs: Outputs) -> "Packed":
    """ValueError where x, weight and scales do not fit."""
    from quintet.platforms.gpu.kernels.quantized import Packed

    count, inputs = weight.shape
    want = (-(-count // block), -(-inputs // block)) if block else (count if len(scales) > 1 else 1, 1)
    if scales.shape != want or count != sum(outputs) or inputs != x.shape[1]:
        raise ValueError(
            f"x {tuple(x.shape)} and {sum(outputs)} outputs do not fit a weight {tuple(weight.shape)} in blocks of "
            f"{block} with scales {tuple(scales.shape)}"
        )
    return Packed(_rows(weight), scales, count, 8, block, block or 1, None, weight.dtype)


def _quantized(x: Tensor, group: int, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    from quintet.platforms.gpu.kernels.rows import quantized

    return quantized(_rows(x), group, kind)


def _product(x: Tensor, own: Tensor | None, packed: "Packed", bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    from quintet.platforms.gpu.kernels.quantized import multiplied

    if bias is not None and bias.shape != (packed.outputs,):
        raise ValueError(f"a bias of shape {tuple(bias.shape)} does not fit {packed.outputs} outputs")
    return multiplied(_rows(x), own, packed, None if bias is None else bias.contiguous(), dtype)


def _rows(x: Tensor) -> Tensor:
    """With each row's numbers side by side; x itself wherever they are."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _plain(result: Any) -> Tensor:
    tensor: Tensor = result
    return tensor
