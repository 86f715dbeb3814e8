"""Matrices packed by the published rules of GPTQ and its kin, value by value, and what they stand for."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quintet_tools.checkpoints.tiny import Tiny
from tests.helpers.checkpoints.quantized import written


class Numbers(NamedTuple):
    """[N, K] of a quantized matrix, and its groups' [N, G]."""

    values: Tensor
    scales: Tensor  # of float16's numbers
    zeros: Tensor
    groups: Tensor  # [K], of which group an input is

    @property
    def known(self) -> Tensor:
        return (self.values - self.zeros[:, self.groups]).float() * self.scales[:, self.groups]


def numbers(weight: Tensor, bits: int, group: int, symmetric: bool, order: Tensor | None = None) -> Numbers:
    """The nearest values; `order` says which inputs, one after the other, are the first group, and so on."""
    outputs, inputs = weight.shape
    size = inputs if group == -1 else group
    order = torch.arange(inputs) if order is None else order
    groups = torch.empty(inputs, dtype=torch.long)
    groups[order] = torch.arange(inputs) // size
    top, count = 2**bits - 1, -(-inputs // size)
    scales, zeros = torch.empty(outputs, count), torch.empty(outputs, count)
    for index in range(count):
        x = weight[:, groups == index]
        low, high = x.amin(1).clamp(max=0), x.amax(1).clamp(min=0)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scales[:, index] = ((high - low) / top).half().float().clamp(min=2**-14)
        zeros[:, index] = 2 ** (bits - 1) if symmetric else (-low / scales[:, index]).round().clamp(0, top)
    values = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, top)
    return Numbers(values.int(), scales, zeros.int(), groups)


def stream(values: Sequence[int], bits: int) -> list[int]:
    """One after the other, the first lowest, in words of 32 bits."""
    return cut(sum(value << bits * place for place, value in enumerate(values)), -(-len(values) * bits // 32))


def planes(values: Sequence[int], bits: int) -> list[int]:
    """32 values at a time: all their low bits, then the higher ones, in widths that divide 32."""
    widths = {2: [2], 3: [2, 1], 4: [4], 5: [4, 1], 6: [4, 2], 7: [4, 2, 1], 8: [8]}[bits]
    words = []
    for first in range(0, len(values), 32):
        shift = 0
        for width in widths:
            words += stream([value >> shift & (1 << width) - 1 for value in values[first : first + 32]], width)
            shift += width
    return words


def cut(number: int, count: int) -> list[int]:
    """Into signed words, the lowest first."""
    words = [number >> 32 * place & 0xFFFFFFFF for place in range(count)]
    return [word - (1 << 32) if word >> 31 else word for word in words]


def gptq_tensors(name: str, x: Numbers, bits: int, version: str = "gptq") -> dict[str, Tensor]:
    """qweight by inputs, qzeros by outputs; version 1 writes zero points less one, and a whole word at that."""
    pack = planes if version == "gptq_p" else stream
    qweight = torch.tensor([pack(row, bits) for row in x.values.tolist()], dtype=torch.int64).t()
    zeros = x.zeros.t()
    if version == "gptq" and 32 % bits:
        zeros = zeros - 1 & 2**bits - 1
    qzeros = torch.tensor([pack(row, bits) for row in zeros.tolist()], dtype=torch.int64)
    if version == "gptq" and 32 % bits == 0:
        qzeros = qzeros - sum(1 << at for at in range(0, 32, bits))
        qzeros = (qzeros + 2**31) % 2**32 - 2**31
    return {
        f"{name}.qweight": qweight.int().contiguous(),
        f"{name}.qzeros": qzeros.int(),
        f"{name}.scales": x.scales.t().half().contiguous(),
        f"{name}.g_idx": x.groups.int(),
    }


def marlin_tensors(name: str, x: Numbers, names: tuple[str, str] = ("B", "s")) -> dict[str, Tensor]:
    """Number by number: thread t of a warp's 32 holds, of the t / 4th output of a tile and of the one that is 8
    further, inputs 2 (t % 4) + 0, 1, 8 and 9; four tiles follow one another, and a word has the even places of a
    thread's eight first."""
    outputs, inputs = x.values.shape
    values, rows = x.values.tolist(), []
    for k in range(0, inputs, 16):
        row = []
        for n in range(0, outputs, 64):
            for thread in range(32):
                for tile in range(4):
                    eight = [
                        values[n + 16 * tile + thread // 4 + 8 * further][k + 2 * (thread % 4) + place]
                        for further in (0, 1)
                        for place in (0, 1, 8, 9)
                    ]
                    row += stream([eight[each] for each in (0, 2, 4, 6, 1, 3, 5, 7)], 4)
        rows.append(row)
    many = x.scales.shape[1] > 1
    scales, order = x.scales.t().half(), []
    for i in range(8 if many else 4):
        order += [i + 8 * j for j in range(8)] if many else [2 * i + j for j in (0, 1, 8, 9, 16, 17, 24, 25)]
    shuffled = scales.reshape(-1, len(order))[:, order].reshape(scales.shape)
    return {f"{name}.{names[0]}": torch.tensor(rows, dtype=torch.int32), f"{name}.{names[1]}": shuffled.contiguous()}


def gptq(tiny: Tiny, bits: int = 4, group: int = 32, ignored: Sequence[str] = (), **said: Any) -> Tiny:
    """A checkpoint as GPTQModel writes it; what is said otherwise goes into its configuration."""
    said = {"sym": True, "desc_act": False, "checkpoint_format": "gptq", "lm_head": False, **said}

    def quantize(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        shuffle = torch.Generator().manual_seed(len(name) + weight.shape[0])
        order = torch.randperm(weight.shape[1], generator=shuffle) if said["desc_act"] else None
        x = numbers(weight, bits, group, said["sym"], order)
        return gptq_tensors(name, x, bits, said["checkpoint_format"]), x.known

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "modules_to_not_convert": list(ignored),
        **said,
    }
    return written(tiny, quantize, config, [*ignored, *["lm_head"] * (not said["lm_head"])])
