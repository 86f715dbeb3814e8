"""FP8 as DeepSeek-V3 (2024) and Qwen publish it: float8_e4m3fn [N, K] with a scale for each block of the matrix.

weight_scale_inv [ceil(N / rows), ceil(K / columns)] multiplies, its name notwithstanding. The scales are written out
for every output, so that any share of the outputs, and products side by side, are one matrix.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quintet.layers.forms.groups import fitted, floats, spread
from quintet.weights import FLOATS, Cut, Form, Matrix, OnFile, Part

LARGEST = 2**20  # outputs or inputs of a block


@dataclass(frozen=True)
class BlockFp8:
    """Reads one checkpoint's."""

    rows: int  # outputs of a block
    columns: int  # inputs

    def stored(self, part: Part) -> dict[str, OnFile]:
        outputs, inputs = part.shape if part.total is None else (part.total, part.shape[1])
        if part.transposed:
            raise ValueError(f"{part.source} is stored by its inputs, which no FP8 checkpoint is")
        blocks = -(-outputs // self.rows), -(-inputs // self.columns)
        return {
            part.source: OnFile((outputs, inputs), (torch.float8_e4m3fn,)),
            f"{part.source}_scale_inv": OnFile(blocks, FLOATS),
        }

    def form(self, cut: Cut) -> Form:
        return fitted(Form("fp8", 8, 16, self.columns, dtype=torch.float8_e4m3fn), cut)

    def matrix(self, part: Part, cut: Cut, tensors: Mapping[str, Tensor]) -> Matrix:
        form, (first, last) = self.form(cut), cut.outputs
        values = tensors[part.source][first:last, slice(*cut.inputs)]
        blocks = torch.arange(first, last) // self.rows
        scales = tensors[f"{part.source}_scale_inv"].float()[blocks]
        return Matrix(values, spread(scales, self.columns, form.group, cut.inputs), form=form)

    def floats(self, part: Part, cut: Cut, tensors: Mapping[str, Tensor]) -> Tensor:
        return floats(self, self.columns, part, cut, tensors)


def read(config: Mapping[str, Any]) -> BlockFp8:
    """Of a quantization_config. ValueError says what in it is of another kind."""
    block, kind = config.get("weight_block_size"), str(config.get("fmt", "e4m3"))
    if not (isinstance(block, (list, tuple)) and len(block) == 2 and all(isinstance(each, int) for each in block)):
        raise ValueError(
            f"the checkpoint is of fp8 with weight_block_size {block!r}; quintet reads blocks, such as [128, 128]"
        )
    if kind not in ("e4m3", "float8_e4m3fn") or config.get("activation_scheme", "dynamic") != "dynamic":
        raise ValueError(
            f"the checkpoint is of fp8 with fmt {kind} and activation_scheme {config.get('activation_scheme')}; "
            "quintet reads e4m3 and dynamic"
        )
    if min(block) < 16 or max(block) > LARGEST or block[1] % 16:
        raise ValueError(
            f"fp8's weight_block_size {list(block)} is not of 16 to {LARGEST}, its second a multiple of 16"
        )
    return BlockFp8(*block)
