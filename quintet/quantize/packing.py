"""The tensors of a quantized matrix in compressed-tensors' formats pack-quantized, int-quantized and float-quantized.

weight_packed int32 [N, K bits / 32]: value + 2^(bits - 1) of each input, from the lowest bits on; weight_zero_point
likewise, but eight outputs in a number: [N bits / 32, G]. weight_shape says what was packed.
"""

import torch
from torch import Tensor
from torch.nn import functional

from quintet.quantize.rounding import QuantizedMatrix
from quintet.quantize.schemes import Scheme


def tensors(module: str, rounded: QuantizedMatrix, scheme: Scheme, dtype: torch.dtype) -> dict[str, Tensor]:
    """By their names in the file; scales in `dtype`."""
    found = {f"{module}.weight_scale": rounded.scales.to(dtype).contiguous()}
    if not scheme.packed:
        return {f"{module}.weight": rounded.values.contiguous(), **found}
    found[f"{module}.weight_packed"] = packed(rounded.values, scheme.bits)
    found[f"{module}.weight_shape"] = torch.tensor(rounded.values.shape, dtype=torch.int64)
    if rounded.zeros is not None:
        found[f"{module}.weight_zero_point"] = packed(rounded.zeros.t(), scheme.bits).t().contiguous()
    return found


def packed(values: Tensor, bits: int) -> Tensor:
    """[N, K] of -2^(bits - 1).. -> int32 [N, K bits / 32]; 4 or 8 bits, what is missing at the end is 0."""
    wide = functional.pad(values.to(torch.int64) + 2 ** (bits - 1), (0, -values.shape[1] % (32 // bits)))
    places = torch.arange(0, 32, bits)
    words = (wide.reshape(len(wide), -1, 32 // bits) << places).sum(-1)
    return words.to(torch.int32)  # the highest bit is the sign
