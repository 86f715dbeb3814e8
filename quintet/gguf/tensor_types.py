"""Layout of a tensor's numbers in a GGUF file: blocks of a fixed number of values and bytes, by type."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from quintet.gguf.cursor import CorruptFile


class TensorType(NamedTuple):
    """A type of ggml's."""

    name: str
    block_size: int  # of a block, which are neighbours in a row
    type_size: int  # bytes of a block


# By the numbers that stand in files. Those that are missing were taken back, or are of activations (Q8_1, Q8_K).
KINDS: Mapping[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
}


class GGUFTensor(NamedTuple):
    """A tensor in a file."""

    kind: TensorType
    shape: tuple[int, ...]  # the last axis is contiguous, as in torch
    start: int  # bytes from the beginning of the file
    size: int  # bytes


def sized(what: str, number: int, shape: tuple[int, ...]) -> tuple[TensorType, int]:
    """Returns the type with this number, and the bytes that the shape takes. CorruptFile if rows are no blocks."""
    kind = KINDS.get(number)
    if kind is None:
        raise CorruptFile(f"{what} is of type {number}, which quintet does not know")
    if min(shape) < 1 or shape[-1] % kind.block_size:
        raise CorruptFile(f"{what} is {list(shape)}, and {kind.name} has rows of a multiple of {kind.block_size}")
    return kind, math.prod(shape) // kind.block_size * kind.type_size
