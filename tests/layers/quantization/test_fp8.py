"""FP8 checkpoints that are not of blocks in float32: scales of tensors and outputs, other names, e5m2, powers of 2."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from quintet.interface.weights import ShardRange
from tests.helpers.checkpoints.quantized_files import plan_of, read_out

SIZES = OUTPUTS, INPUTS = 48, 96
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = {**FP8, "weight_block_size": [32, 32]}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def numbers(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(math.prod(shape))) + 0.1


def powers(*shape: int) -> Tensor:
    """Exponents: 127 stands for 1."""
    return torch.randint(100, 140, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("said", "dtype", "name", "scales"),
    [
        (FP8, E4M3, "weight_scale", numbers().reshape(())),
        (FP8, E4M3, "weight_scale", numbers(1)),
        ({**FP8, "activation_scheme": "static"}, E4M3, "weight_scale_inv", numbers(1).bfloat16()),
        ({**FP8, "fmt": "e5m2"}, E5M2, "weight_scale", numbers(1)),
        (FP8, E4M3, "weight_scale", numbers(OUTPUTS, 1)),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, E4M3, "weight_scale", numbers(OUTPUTS, 1)),
        ({"quant_method": "fbgemm_fp8"}, E4M3, "weight_scale", numbers(OUTPUTS)),
        ({**BLOCKS, "scale_fmt": "ue8m0"}, E4M3, "weight_scale_inv", powers(2, 3)),
        ({**BLOCKS, "scale_fmt": "ue8m0"}, E4M3, "weight_scale_inv", powers(2, 3).view(torch.float8_e8m0fnu)),
        ({**BLOCKS, "scale_fmt": "ue8m0"}, E4M3, "weight_scale_inv", 2.0 ** powers(2, 3).sub(127).char().float()),
        ({**BLOCKS, "fmt": "e5m2"}, E5M2, "weight_scale_inv", numbers(2, 3)),
    ],
)  # fmt: skip
def test_weights_are_their_numbers_by_their_scales(
    said: dict[str, Any], dtype: torch.dtype, name: str, scales: Tensor
) -> None:
    weight = torch.randn(SIZES, generator=torch.Generator().manual_seed(1)).to(dtype)
    wide = scales.float() if scales.dtype != torch.uint8 else 2.0 ** (scales.double() - 127)
    if scales.numel() == 6:
        wide = wide.repeat_interleave(32, 0)[:OUTPUTS].repeat_interleave(32, 1)
    elif scales.numel() == OUTPUTS:
        wide = wide.reshape(OUTPUTS, 1)
    want, tensors = (weight.float() * wide).float(), {"a.0.b.weight": weight, f"a.0.b.{name}": scales}
    for cut in [ShardRange((0, OUTPUTS), (0, INPUTS)), ShardRange((5, 40), (16, 64)), ShardRange((0, 3), (7, 50))]:
        share = read_out(plan_of(said, tensors), "a.0.b", SIZES, tensors, cut)
        assert torch.equal(share, want[slice(*cut.outputs), slice(*cut.inputs)])


def test_what_was_left_out_is_in_floats() -> None:
    plan = plan_of({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["o_proj", "lm_head"]}, {}).plan
    there = [plan.reader(f"layers.0.self_attn.{name}") is not None for name in ("q_proj", "o_proj")]
    assert there == [True, False]


def test_scales_of_inputs_are_passed_over_and_that_is_said() -> None:
    (said,) = plan_of({**FP8, "activation_scheme": "static"}, {}).notes
    assert "activations stay in the model's type" in said and "static scales of inputs are not used" in said
    assert plan_of(FP8, {}).ignored_suffixes and "static" not in plan_of(FP8, {}).notes[0]
