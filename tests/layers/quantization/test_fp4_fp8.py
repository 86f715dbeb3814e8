"""Floats of 4 and 6 bits by their published packing, and what ModelOpt and Quark checkpoints are refused for."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quintet.interface.weights import ShardRange
from quintet.layers.quantization.fp4_fp8 import E2M1, E2M3, E3M2
from tests.helpers.checkpoints.quantized_files import plan_of, read_out

SIZES = OUTPUTS, INPUTS = 24, 96
CUTS = [ShardRange((0, OUTPUTS), (0, INPUTS)), ShardRange((3, 9), (16, 80)), ShardRange((1, 2), (5, 64))]
FP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "ch_axis": -1}
FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}


def quark(weight: Any, **more: Any) -> dict[str, Any]:
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}, "exclude": ["lm_head"], **more}


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **more}


def test_tables_are_those_of_the_ocp() -> None:
    """Microscaling Formats 1.0, 5.3.2 and 5.3.3: the largest and smallest numbers."""
    assert E2M1[:8] == (0, 0.5, 1, 1.5, 2, 3, 4, 6) and E2M1[8:] == tuple(-each for each in E2M1[:8])
    assert (max(E2M3), E2M3[1], E2M3[8]) == (7.5, 0.125, 1.0) and (max(E3M2), E3M2[1], E3M2[4]) == (28.0, 0.0625, 0.25)
    assert len(E2M3) == len(E3M2) == 64 and min(E2M3) == -7.5 and min(E3M2) == -28.0


@pytest.mark.parametrize(("dtype", "table"), [("fp6_e2m3", E2M3), ("fp6_e3m2", E3M2)])
def test_six_bits_follow_one_another(dtype: str, table: tuple[float, ...]) -> None:
    places = torch.randint(0, 64, SIZES)
    lines = [sum(n << 6 * i for i, n in enumerate(row)).to_bytes(INPUTS * 3 // 4, "little") for row in places.tolist()]
    exponents = torch.randint(110, 140, (OUTPUTS, 3), dtype=torch.uint8)
    tensors = {
        "a.0.b.weight": torch.tensor([list(line) for line in lines], dtype=torch.uint8),
        "a.0.b.weight_scale": exponents,
    }
    want = torch.tensor(table)[places] * (2.0 ** (exponents.double() - 127)).float().repeat_interleave(32, 1)
    for cut in CUTS:
        share = read_out(plan_of(quark({**FP4, "dtype": dtype}), tensors), "a.0.b", SIZES, tensors, cut)
        assert torch.equal(share, want[slice(*cut.outputs), slice(*cut.inputs)])


def halves(places: Tensor) -> Tensor:
    """The first of two in the low half of a byte."""
    return (places[..., ::2] | places[..., 1::2] << 4).to(torch.uint8)


def test_experts_of_gpt_oss_lie_in_blocks() -> None:
    """A number's place in the table, blocks [N, K / 32, 16] and exponents [N, K / 32]; routers are floats."""
    places, exponents = torch.randint(0, 16, SIZES), torch.randint(0, 250, (OUTPUTS, 3), dtype=torch.uint8)
    exponents[0, 0] = 0  # 2^-127, which float32 has as a denormal
    module = "model.layers.0.mlp.experts.3.gate_up_proj"
    tensors = {f"{module}_blocks": halves(places).reshape(OUTPUTS, 3, 16), f"{module}_scales": exponents}
    want = (torch.tensor(E2M1)[places].double() * 2.0 ** (exponents.double() - 127).repeat_interleave(32, 1)).float()
    found = plan_of({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, tensors)
    for cut in CUTS:
        share = read_out(found, module, SIZES, tensors, cut)
        assert torch.equal(share, want[slice(*cut.outputs), slice(*cut.inputs)])
    assert (
        found.plan.reader("model.layers.0.mlp.router") is found.plan.reader("model.layers.0.self_attn.q_proj") is None
    )


def test_blocks_of_modelopt_may_have_axes_of_one() -> None:
    weight, scales = torch.randn(200, 256).to(torch.float8_e4m3fn), torch.rand(2, 1, 2, 1)
    tensors = {"a.0.b.weight": weight, "a.0.b.weight_scale": scales}
    wide = scales.reshape(2, 2).repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)
    found = plan_of(modelopt("fp8_pb_wo"), tensors)
    assert torch.equal(read_out(found, "a.0.b", (200, 256), tensors), weight.float() * wide)


def test_modelopt_says_the_same_in_a_file_of_its_own() -> None:
    beside = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head", "*.self_attn*", "model.layers.7"]}}
    plan = plan_of({"quant_method": "modelopt", **beside}, {}).plan
    there = ["model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj", "model.layers.7.mlp.up_proj", "lm_head"]
    assert [plan.reader(each) is not None for each in there] == [True, False, False, False]
    own = plan_of({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []}, {}).plan
    assert plan.reader(there[0]) == own.reader(there[0])


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (modelopt("W4A16_AWQ"), r"W4A16_AWQ \(its inputs are scaled .*; it reads FP8, .*NVFP4, "),
        (modelopt("INT3"), "ModelOpt's INT3, which quintet does not read; it reads FP8"),
        (modelopt("NVFP4", group_size=7), "group_size 7, which is no multiple of 16"),
        (modelopt("NVFP4", group_size=2**63), "which is no multiple of 16"),
        (modelopt("MIXED_PRECISION"), "quantized_layers is None, not an object"),
        (modelopt("MIXED_PRECISION", quantized_layers={"a": {"quant_algo": "X"}}), "a is of ModelOpt's X, which"),
        (modelopt("MIXED_PRECISION", quantized_layers={"a": 3}), "has 3 for a, not an object"),
        (modelopt("FP8", ignore="lm_head"), "exclude_modules is 'lm_head', not a list"),
        ({"quant_method": "modelopt", "quantization": []}, r"quantization is \[\], not an object"),
        (quark({**FP4, "dtype": "mx9"}), "'mx9' 'per_group'; quintet reads fp8_e4m3"),
        (quark({**FP4, "scale_format": "float32"}), "'fp4' 'per_group'; quintet reads"),
        (quark([FP8, FP8]), r"in stages of \['fp8_e4m3', 'fp8_e4m3'\]; quintet reads"),
        (quark({"dtype": "uint4", "qscheme": "per_group", "group_size": 20}), "group_size 20, which is no multiple"),
        (quark({"dtype": "int4", "qscheme": "per_group", "group_size": 32, "symmetric": False}), "int4 with zero"),
        (quark({"dtype": "int8", "qscheme": "per_channel", "ch_axis": 1}), "scales along the axis 1; quintet reads 0"),
        (quark("fp8"), "Quark's weights 'fp8', which is no object"),
        (quark(FP8, export={"weight_format": "fake_quantized"}), "fake_quantized weights; export them"),
        (quark(FP8, algo_config=[{"name": "rotation", "r3": True}]), "rotation with r3: it rotates activations"),
        (quark(FP8, layer_quant_config=[1]), r"layer_quant_config is \[1\], not an object"),
        (quark(FP8, layer_quant_config={"*q_proj": 7}), r"\*q_proj has Quark's configuration 7"),
        (quark(FP8, exclude="lm_head"), "exclude is 'lm_head', not a list"),
        ({"quant_method": "petit_nvfp4"}, "quantized by petit_nvfp4, which quintet does not read; .*modelopt"),
        ({"quant_method": "fp_quant"}, "quantized by fp_quant, which quintet does not read; "),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_name(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        plan_of(said, {})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("weight", "shape"), [(FP4, (24, 80)), ({**FP4, "dtype": "fp6_e2m3"}, (24, 80)),
                          ({"dtype": "uint4", "qscheme": "per_group", "group_size": 32}, (20, 96))],
)  # fmt: skip
def test_sizes_that_do_not_divide_are_refused_by_name(weight: Any, shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"a\.0\.b\.weight .*divide"):
        read_out(plan_of(quark(weight), {}), "a.0.b", shape, {})
