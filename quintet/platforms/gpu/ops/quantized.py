"""Products with quantized weights by Triton: as weight_layout.py packs them, or as the specification has them.

Not verified on a GPU yet. What its tiles cannot cut (groups of fewer than 16 inputs or of no multiple of that, and in
pairs of 4 bits of 32) goes to the reference.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quintet.interface.weights import Matrix, WeightFormat
from quintet.ops.linear import linear
from quintet.ops.quantize import attributes, quantize
from quintet.platforms.gpu.ops.probe import probing
from quintet.platforms.gpu.weight_layout import pack

if TYPE_CHECKING:
    from quintet.platforms.gpu.kernels.quantized import PackedWeight


TRIED = 128  # tokens of a probe where a byte holds two numbers: Triton has been wrong from 64 on


def check(fmt: WeightFormat) -> Callable[[torch.device], str | None]:
    """A product of 256 inputs and two outputs, for one token and, in 4 bits, for TRIED."""

    def run(device: torch.device) -> str | None:
        weight = torch.zeros(2, 256, device=device)
        weight[0, [5, 20, 197]], weight[1, [7, 22]] = 3.0, 2.0  # of both halves of a byte, and of two steps
        if fmt.codebook:
            packed = attributes(quantize(weight, fmt))
        elif fmt.dtype is None:
            packed = pack(weight, fmt)
        else:
            packed = {"weight": weight.to(fmt.dtype), "scales": torch.ones(2, 1, device=device)}
        for tokens in (1, TRIED) if fmt.bits == 4 else (1,):
            x, times = torch.zeros(tokens, 256), 1.0 + torch.arange(tokens)[:, None] % 3
            x[:, [5, 20, 197]], x[:, [7, 22]] = times, -times
            matrix = Matrix(packed["weight"], packed["scales"], format=fmt)
            got = packed_linear(x.half().to(device), matrix, None, (2,)).float().cpu()
            if not torch.allclose(got, want := times * torch.tensor([[9.0, -4.0]]), rtol=0.02):
                wrong = int((got - want).abs().amax(1).argmax())
                return f"a product of {tokens} tokens gave {got[wrong].tolist()}, not {want[wrong].tolist()}"
        return None

    return run


def packed_linear(x: Tensor, weight: Matrix, bias: Tensor | None, outputs: tuple[int, ...]) -> Tensor:
    """The provider, which others that take fewer shapes go back to."""
    return by_matrix(x, weight, bias, outputs, False)


def by_matrix(x: Tensor, weight: Matrix, bias: Tensor | None, outputs: tuple[int, ...], fixed: bool) -> Tensor:
    """The op linear. `fixed`: by one tile, and in one sum, however many tokens there are."""
    fmt, packed = weight.format, _packed(x, weight, sum(outputs))
    if not packed.part():
        if fixed:
            raise ValueError(
                f"batch_invariant=True: torch multiplies a weight in {fmt.kind} with groups of {fmt.group} here, and "
                "its bits depend on the batch; leave one of them out"
            )
        plain: Tensor = linear.reference(x, weight, bias, outputs)
        return plain
    if weight.input_order is not None:  # a row of x is short beside the weight
        x = torch.index_select(x, 1, weight.input_order)
    if fmt.activations == 16:
        return _product((x, None), packed, bias, x.dtype, fixed)
    kind = torch.int8 if fmt.dtype is None else weight.values.dtype
    return _product(_quantized(x, fmt.group or x.shape[1], kind), packed, bias, x.dtype, fixed)


_HALVES = tuple(each / 2 for each in range(-7, 9))
for _form in (
    *(
        WeightFormat("int8", 8, 16, 64),
        WeightFormat("int4", 4, 16, 32),
        WeightFormat("w8a8", 8, 8),
        WeightFormat("w4a8", 4, 8, 64),
    ),
    *(WeightFormat("fp8", 8, 16, dtype=torch.float8_e4m3fn), WeightFormat("fp8a8", 8, 8, dtype=torch.float8_e4m3fn)),
    *(WeightFormat("table4", 4, 16, 32, codebook=_HALVES), WeightFormat("table8", 8, 16, 32, codebook=_HALVES)),
):
    linear.provide("triton", probing(check(_form)), kinds=(_form.kind,))(packed_linear)


def _packed(x: Tensor, weight: Matrix, count: int) -> "PackedWeight":
    """ValueError where x, weight and scales do not fit."""
    from quintet.platforms.gpu.kernels.quantized import WHOLE, PackedWeight

    values, scales, zeros, _, fmt, mins = weight
    inputs, bits = x.shape[1], fmt.bits
    assert scales is not None, "what is quantized has scales"
    row = values.shape[1:].numel() * 8 // bits
    fits = row == inputs if values.dim() == 2 else 0 <= row - inputs < 2 * values.shape[2]
    if len(values) != count or not fits or scales.shape != (count, fmt.groups(inputs)):
        raise ValueError(
            f"x {tuple(x.shape)} and {count} outputs do not fit a weight {tuple(values.shape)} of {bits} bits "
            f"with scales {tuple(scales.shape)} for groups of {fmt.group}"
        )
    group = fmt.group if scales.shape[1] > 1 else 0 if zeros is None and mins is None else WHOLE
    zeros, mins = (None if each is None else _beside(scales, each) for each in (zeros, mins))
    kind = torch.int8 if fmt.dtype is None else values.dtype
    return PackedWeight(_rows(values), scales, count, bits, group, zeros, kind, mins, fmt.codebook)


def _beside(scales: Tensor, each: Tensor) -> Tensor:
    """With the strides of the scales; itself as place() leaves it."""
    return each if each.stride() == scales.stride() else torch.empty_like(scales, dtype=each.dtype).copy_(each)


def _quantized(x: Tensor, group: int, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    from quintet.platforms.gpu.kernels.rows import quantized

    return quantized(_rows(x), group, kind)


def _product(
    given: tuple[Tensor, Tensor | None], packed: "PackedWeight", bias: Tensor | None, dtype: torch.dtype, fixed: bool
) -> Tensor:
    """given: activations, and their scales if they have 8 bits."""
    from quintet.platforms.gpu.kernels.quantized import multiplied

    if bias is not None and bias.shape != (packed.outputs,):
        raise ValueError(f"a bias of shape {tuple(bias.shape)} does not fit {packed.outputs} outputs")
    x, own = given
    how = {"splits": 1, "tiled": 1} if fixed else {}
    return multiplied(_rows(x), own, packed, None if bias is None else bias.contiguous(), dtype, **how)


def _rows(x: Tensor) -> Tensor:
    """Returns x with contiguous rows; x itself if they are contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
