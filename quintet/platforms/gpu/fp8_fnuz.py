"""float8_e4m3fn as float8_e4m3fnuz, for chips with products of that type alone (AMD's gfx942)."""

from collections.abc import Mapping

import torch
from torch import Tensor

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
MINUS_ZERO = 0x80  # in FNUZ, which has it as its one NaN


def as_fnuz(matrix: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The attributes of a matrix in FN (weights.Matrix: "weight", "scales") as one in FNUZ, with the same values.

    The same bits mean half the value there, since the exponent's bias is 8 and not 7: scales double, and every number
    stays what it is. -0 becomes 0, and what is no number stays none. The weight's memory is written to.
    """
    values = matrix["weight"]
    assert values.dtype == FN, "what is of another type has other bits"
    bits = values.view(torch.uint8)
    bits.masked_fill_(bits == MINUS_ZERO, 0)
    bits.masked_fill_((bits & 0x7F) == 0x7F, MINUS_ZERO)
    return {**matrix, "weight": bits.view(FNUZ), "scales": matrix["scales"] * 2}
