"""FP8 checkpoints: in blocks as DeepSeek-V3 (2024) and Qwen publish them, per tensor, and per channel as FBGEMM does.

weight_scale_inv [ceil(N / rows), ceil(K / columns)] multiplies, its name notwithstanding; others call it weight_scale.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from quintet.interface.weights import FLOATS, StoredTensor, WeightReader
from quintet.layers.quantization.block_scales import E8M0_DTYPES, BlockScales
from quintet.layers.quantization.fp4_fp8 import BLOCK, Float4Reader, Float8Weights

MAX_BLOCK = 2**20  # outputs or inputs of a block
DTYPES = {"e4m3": torch.float8_e4m3fn, "float8_e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SCALE_NAMES = ("weight_scale_inv", "weight_scale")  # of the scales
EXPERT = ".experts."  # in the names of experts' modules
STACKED_SCALE = ".experts.gate_up_proj_scale"  # how the names of scales go on that experts' stacks have
IGNORED_SUFFIXES = (
    ".input_scale",
    ".activation_scale",
    ".input_scale_ub",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".output_scale",
)
ACTIVATIONS_NOTE = "activations stay in the model's type, where the checkpoint means floats of 8 bits"


@dataclass(frozen=True, eq=False)
class Fp8Plan:
    """One checkpoint's products. Where scales are not of blocks, its files say whether they are of outputs."""

    dtype: torch.dtype = torch.float8_e4m3fn
    block: tuple[int, int] | None = None  # outputs and inputs
    dtypes: tuple[torch.dtype, ...] = FLOATS  # of the scales
    files: Mapping[str, StoredTensor] = field(default_factory=dict)  # the checkpoint's tensors, by the modules' names
    fp4_experts: bool = False  # experts are floats of 4 bits, with a scale for every 32 inputs (DeepSeek-V4)

    def reader(self, module: str) -> WeightReader:
        if self.fp4_experts and EXPERT in module:
            return Float4Reader(BlockScales(1, BLOCK, SCALE_NAMES[0], self.dtypes), "weight", dtype=torch.int8)
        usual = SCALE_NAMES[0 if self.block else 1]
        name = next((each for each in SCALE_NAMES if f"{module}.{each}" in self.files), usual)
        there = self.files.get(f"{module}.{name}")
        if there is not None and self.block is not None:
            _refuse_straddling_blocks(there, self.files.get(f"{module}.weight"), self.block[0])
        single = there is None or there.shape is None or math.prod(there.shape) == 1
        return Float8Weights(
            BlockScales(*(self.block or ((0, 0) if single else (1, 0))), name, self.dtypes), self.dtype
        )


def _refuse_straddling_blocks(scales: StoredTensor, weight: StoredTensor | None, rows: int) -> None:
    """ValueError where a stack's scales are as many for blocks of gate, then of up, as for blocks of both together, one
    of which would have rows of each."""
    if STACKED_SCALE not in scales.name or not scales.shape or weight is None or not weight.shape:
        return
    each = weight.shape[0]
    if each % rows and 2 * scales.shape[0] == -(-2 * each // rows):
        raise ValueError(
            f"{scales.name} is of blocks of {rows} rows, and gate has {each}: one block may be of gate's last rows and "
            "up's first, which it does not say; use a checkpoint that holds the experts one by one"
        )


def read(config: Mapping[str, Any], files: Mapping[str, StoredTensor]) -> Fp8Plan:
    """Reads a quantization_config. ValueError says what in it is of another kind."""
    block, kind = config.get("weight_block_size"), str(config.get("fmt", "e4m3"))
    if kind not in DTYPES or config.get("activation_scheme", "dynamic") not in ("dynamic", "static"):
        raise ValueError(
            f"the checkpoint is of fp8 with fmt {kind:.40} and activation_scheme "
            f"{config.get('activation_scheme')!r:.40}; quintet reads e4m3 and e5m2, dynamic and static"
        )
    experts = config.get("expert_dtype", "fp8")
    if experts not in ("fp8", "fp4"):
        raise ValueError(f"the checkpoint is of fp8 with expert_dtype {experts!r:.40}; quintet reads fp8 and fp4")
    dtypes = (*FLOATS, *E8M0_DTYPES) if config.get("scale_fmt") == "ue8m0" else FLOATS
    if block is None:
        return Fp8Plan(DTYPES[kind], None, dtypes, files, experts == "fp4")
    if not (isinstance(block, list | tuple) and len(block) == 2 and all(type(each) is int for each in block)):
        raise ValueError(
            f"the checkpoint is of fp8 with weight_block_size {block!r:.60}; quintet reads blocks, such as [128, 128], "
            "and none"
        )
    if min(block) < 16 or max(block) > MAX_BLOCK or block[1] % 16:
        raise ValueError(
            f"fp8's weight_block_size {list(block)} is not of 16 to {MAX_BLOCK}, its second a multiple of 16"
        )
    return Fp8Plan(DTYPES[kind], (block[0], block[1]), dtypes, files, experts == "fp4")


def notes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns notes on what is computed otherwise than the checkpoint means it."""
    static = "; static scales of inputs are not used" * (config.get("activation_scheme") == "static")
    return (f"{ACTIVATIONS_NOTE}{static}",)
