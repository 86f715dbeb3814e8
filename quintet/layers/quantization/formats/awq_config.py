"""Reads AWQ's quantization_config, as AutoAWQ, GPTQModel and AutoRound write it."""

import reprlib
from collections.abc import Mapping
from typing import Any

from quintet.interface.weights import WeightReader
from quintet.layers.quantization.formats.awq import Awq
from quintet.layers.quantization.formats.awq_gemv import GROUPS, Gemv, GemvFast
from quintet.layers.quantization.formats.marlin import Marlin

AS_GEMM = ("gemm", "exllama", "exllamav2", "ipex")  # layouts of the same files, for other kernels
LAYOUTS = (*AS_GEMM, "gemv", "gemv_fast", "llm-awq", "marlin")
MAX_GROUP = 2**20  # inputs of a group


def read(config: Mapping[str, Any]) -> WeightReader:
    """ValueError says what in it is of another kind."""
    bits, group = (
        config.get(name, config.get(other)) for name, other in (("bits", "w_bit"), ("group_size", "q_group_size"))
    )
    layout = str(config.get("version") or config.get("checkpoint_format") or config.get("format") or "gemm").lower()
    zeros = config.get("zero_point", True) is not False
    if bits != 4 or layout not in LAYOUTS or (zeros and layout == "marlin"):
        raise ValueError(
            f"the checkpoint is of AWQ with {reprlib.repr(bits)} bits, layout {reprlib.repr(layout)} and zero_point "
            f"{zeros}; quintet reads 4 bits of {', '.join(LAYOUTS)}, marlin without zero points: use one of these, or "
            "the model's original"
        )
    if not isinstance(group, int) or not (group == -1 or (group >= 16 and group % 16 == 0 and group <= MAX_GROUP)):
        raise ValueError(f"AWQ's group_size {reprlib.repr(group)} is not -1 or a multiple of 16")
    return _reader(layout, max(group, 0))


def _reader(layout: str, group: int) -> WeightReader:
    if layout in AS_GEMM:
        return Awq(group)
    if layout == "marlin":
        if group in (0, 128):
            return Marlin(group, ("qweight", "scales"))
        raise ValueError(f"AWQ's group_size {group} is none that the layout marlin has: 128, or -1")
    if group not in GROUPS and group < 128:
        raise ValueError(f"AWQ's group_size {group or -1} is none that the layout {layout} has: 32, 64, or from 128")
    if layout == "gemv":
        return Gemv(group)
    return GemvFast(group) if layout == "gemv_fast" else GemvFast(group, "scaled_zeros")
