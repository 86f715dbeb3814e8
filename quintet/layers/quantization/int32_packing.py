"""Whole numbers of 2 to 8 bits packed into words of 32, as GPTQ's files and their kin have them."""

import torch
from torch import Tensor
from torch.nn import functional

WORD = 32  # bits
BIT_PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}  # widths that add up to so many bits, the lowest first
ONES = {bits: sum(1 << at for at in range(0, WORD, bits)) for bits in (2, 4, 8)}  # a 1 in each value of a word


def word_count(count: int, bits: int) -> int:
    """Returns the number of words that so many values take."""
    return -(-count * bits // WORD)


def unpack_columns(packed: Tensor, bits: int, inputs: tuple[int, int], planar: bool = False) -> Tensor:
    """int32 [W, N] -> uint8 [first..last, N]: a column's values one after the other, each from its lowest bit.

    `planar`: 32 values are in planes that divide a word, one after the other: GPTQModel's gptq_p.
    """
    first, last = inputs
    values, size = (WORD // bits, 1) if WORD % bits == 0 else (WORD, bits)  # values in so many words
    there = packed[first // values * size : -(-last // values) * size]
    there = functional.pad(there, (0, 0, 0, -len(there) % size)).reshape(-1, size, packed.shape[1])
    known = _unpack_planes(there, bits) if planar and bits in BIT_PLANES else _unpack_stream(there, bits, values)
    return known.reshape(-1, packed.shape[1])[first % values :][: last - first]


def _unpack_stream(there: Tensor, bits: int, values: int) -> Tensor:
    """int32 [B, S, N] -> uint8 [B, values, N]; a value may begin in one word and end in the next."""
    out = there.new_empty((len(there), values, there.shape[2]), dtype=torch.uint8)
    for value in range(values):
        word, shift = divmod(value * bits, WORD)
        low = there[:, word] >> shift
        if shift + bits > WORD:
            low = low & (1 << WORD - shift) - 1 | there[:, word + 1] << WORD - shift
        out[:, value] = low & (1 << bits) - 1
    return out


def _unpack_planes(there: Tensor, bits: int) -> Tensor:
    known, word, shift = torch.zeros((), dtype=torch.uint8), 0, 0
    for width in BIT_PLANES[bits]:
        plane = there[:, word : word + width].reshape(-1, 1, there.shape[2])
        known = known | _unpack_stream(plane, width, WORD // width).reshape(len(there), WORD, -1) << shift
        word, shift = word + width, shift + width
    return known


def add_one(packed: Tensor, bits: int) -> Tensor:
    """Adds 1 to all values that were written less one. No value leaves its word: a 0 took from its neighbour."""
    return packed + (ONES[bits] - (1 << WORD) if ONES[bits] >> WORD - 1 else ONES[bits])


def pack_nibbles(values: Tensor) -> Tensor:
    """uint8 [N, K] of 0..15 -> [N, K / 2], as Matrix has them."""
    return values[:, ::2] | values[:, 1::2] << 4
