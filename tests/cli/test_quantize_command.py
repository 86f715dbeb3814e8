"""Load-time quantization: what a weight becomes, which layers get which scheme, and what is refused."""

import pytest
import torch

from quintet.config import EngineConfig
from quintet.conformance.harness.linear_layers import CanonicalReader
from quintet.interface.weights import PLAIN, ShardRange, WeightFormat
from quintet.layers.quantization import ONLINE, QuantizationPlan, format_for_inputs
from quintet.layers.quantization.checkpoint_config import CheckpointQuantization, UniformPlan
from quintet.layers.quantization.online import online_quantization
from quintet.ops.linear import linear
from quintet.ops.quantize import attributes, quantize


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_weight_is_off_by_half_a_step_at_most(name: str, group: int) -> None:
    of = WeightFormat(name, 8 if name == "int8" else 4, 16, group)
    weight = torch.randn(48, 256, generator=torch.Generator().manual_seed(group))
    matrix = quantize(weight, of)
    known, scales = linear.reference(torch.eye(256), matrix, None, (48,)).t(), attributes(matrix)["scales"]
    steps = scales.abs().repeat_interleave(group, 1)
    off = (known - weight).abs() / steps
    clipped = (
        (weight / scales.repeat_interleave(group, 1) > 7.5) if name == "int4" else torch.zeros_like(off, dtype=bool)
    )
    assert off[~clipped].max() <= 0.5 + 1e-4
    assert off[clipped].numel() == 0 or off[clipped].max() <= 1 + 1e-4  # 8 steps, where 4 bits reach 7
    largest = weight.abs().reshape(48, -1, group).argmax(-1, keepdim=True)
    met = [torch.take_along_dim(x.reshape(48, -1, group), largest, -1) for x in (known, weight)]
    torch.testing.assert_close(*met)


@pytest.mark.parametrize("name", ONLINE)
def test_zeros_stay_zeros(name: str) -> None:
    weight = torch.zeros(3, 128)
    weight[1] = 1.0
    known = linear.reference(torch.ones(1, 128), quantize(weight, ONLINE[name]), None, (3,))
    torch.testing.assert_close(known, torch.tensor([[0.0, 128.0, 0.0]]))


def test_a_half_is_quantized_as_the_float_that_it_is() -> None:
    weight = torch.randn(16, 64).to(torch.bfloat16)
    half, full = (attributes(quantize(each, ONLINE["int4"])) for each in (weight, weight.float()))
    assert all(torch.equal(half[name], full[name]) for name in ("weight", "scales"))


def test_a_smaller_group_serves_inputs_that_the_larger_does_not_divide() -> None:
    wanted = ONLINE["int8"]
    for inputs, group in ((1024, 128), (192, 64), (96, 32), (4000, 32)):
        assert format_for_inputs(wanted, inputs).group == group
    assert format_for_inputs(wanted, 100) == PLAIN
    assert format_for_inputs(ONLINE["int4"], 1024) == ONLINE["int4"]  # not a larger one than asked for
    assert format_for_inputs(ONLINE["w8a8"], 100) == ONLINE["w8a8"]
    assert format_for_inputs(None, 64) == PLAIN


def test_the_head_keeps_eight_bits() -> None:
    assert QuantizationPlan().for_head().online is None
    for each in ONLINE.values():
        head = QuantizationPlan(each).for_head().online
        assert head is not None and (head.bits, head.activations) == (8, each.activations)


def test_a_group_size_is_taken_where_it_means_something() -> None:
    assert online_quantization("int4", 128).format == WeightFormat("int4", 4, 16, 128)
    assert EngineConfig(quantization="int4", quantization_group_size="64").quantization_group_size == 64
    for settings in ({"quantization": "w8a8"}, {}):
        with pytest.raises(ValueError, match="quantization_group_size means nothing"):
            EngineConfig(quantization_group_size=64, **settings)
    with pytest.raises(ValueError, match="32, 64, 128"):
        EngineConfig(quantization="int4", quantization_group_size=48)


def test_activations_are_what_the_user_says() -> None:
    assert (
        ONLINE["int8"].with_activations(8) == WeightFormat("w8a8", 8, 8, 128)
        and ONLINE["int4"].with_activations(8) == ONLINE["w4a8"]
    )
    assert (
        ONLINE["w4a8"].with_activations(16) == ONLINE["int4"]
        and ONLINE["int4"].with_activations(None) == ONLINE["int4"]
    )
    nf4 = WeightFormat("table4", 4, 16, 64, codebook=(0.0, 1.0))
    assert nf4.with_activations(8).activations == 8 and nf4.with_activations(8).with_activations(16) == nf4
    floats = WeightFormat("fp8", 8, 16, dtype=torch.float8_e4m3fn)
    assert floats.with_activations(8) == floats and PLAIN.with_activations(8) == PLAIN
    head = QuantizationPlan(online_quantization("int8"), activations=8).for_head()
    assert head.format_for("lm_head", ShardRange((0, 64), (0, 256)))[0] == WeightFormat("w8a8", 8, 8, 128)


def test_a_checkpoints_activations_are_what_the_user_says_where_the_platform_keeps_that() -> None:
    held = WeightFormat("int4", 4, 16, 32, zeros=True)
    plan = CheckpointQuantization("the test's", UniformPlan(CanonicalReader(held)))
    cut = ShardRange((0, 64), (0, 128))
    assert QuantizationPlan(checkpoint=plan, activations=8).format_for("layer", cut)[0] == WeightFormat(
        "w4a8", 4, 8, 32, zeros=True
    )
    assert (
        QuantizationPlan(checkpoint=plan, activations=8, supported_kinds=frozenset({"int4", "w4a8"})).format_for(
            "layer", cut
        )[0]
        == held
    )


def test_bits_of_activations_mean_nothing_without_quantized_weights() -> None:
    from quintet.engine.startup import prepare

    with pytest.raises(ValueError, match="activation_bits=8 is for quantized weights"):
        prepare(EngineConfig(device="cpu", activation_bits=8))
    with pytest.raises(ValueError, match="8, 16"):
        EngineConfig(quantization="int8", activation_bits=4)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_the_cpu_rounds_activations_unless_the_user_does_not_want_that(scheme: str) -> None:
    from quintet.engine.startup import prepare

    exact = EngineConfig(device="cpu", quantization=scheme, activation_bits=16)
    said = prepare(EngineConfig(device="cpu", quantization=scheme)).reasons
    assert any(each.startswith(f"activation_bits=8: quantization='{scheme}' multiplies bytes") for each in said)
    for config, bits in ((EngineConfig(device="cpu", quantization=scheme), 8), (exact, 16)):
        forms = prepare(config).sizes.quantization
        assert forms.format_for("model.layers.0.mlp.down_proj", ShardRange((0, 64), (0, 256)))[0] == ONLINE[
            scheme
        ].with_activations(bits)


def test_a_platform_that_packs_no_scheme_says_so() -> None:
    from quintet.engine.startup import prepare

    with pytest.raises(ValueError, match="'int4' is not there on platform null, which packs no scheme; leave it out"):
        prepare(EngineConfig(device="null", quantization="int4"))
