"""Load-time quantization: what a weight becomes, which layers get which scheme, and what is refused."""

import pytest
import torch

from quintet.config import EngineConfig
from quintet.layers.schemes import SCHEMES, fitting, of_head, scheme
from quintet.ops import Op
from quintet.ops.quantize import quantize
from quintet.types import Scheme


def product(scheme: Scheme, x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    op, outputs = Op.registry[f"linear_{scheme.name}"], (len(packed),)
    zeros = (None,) if scheme.name == "int4" else ()
    return op.reference(x, packed, scales, *zeros, None, outputs)  # type: ignore[no-any-return]


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_weight_is_off_by_half_a_step_at_most(name: str, group: int) -> None:
    of = Scheme(name, 8 if name == "int8" else 4, 16, group)
    weight = torch.randn(48, 256, generator=torch.Generator().manual_seed(group))
    packed, scales = quantize(weight, of)
    known = product(of, torch.eye(256), packed, scales).t()
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


@pytest.mark.parametrize("name", SCHEMES)
def test_zeros_stay_zeros(name: str) -> None:
    weight = torch.zeros(3, 128)
    weight[1] = 1.0
    known = product(SCHEMES[name], torch.ones(1, 128), *quantize(weight, SCHEMES[name]))
    torch.testing.assert_close(known, torch.tensor([[0.0, 128.0, 0.0]]))


def test_a_half_is_quantized_as_the_float_that_it_is() -> None:
    weight = torch.randn(16, 64).to(torch.bfloat16)
    for half, full in zip(*(quantize(w, SCHEMES["int4"]) for w in (weight, weight.float())), strict=True):
        assert torch.equal(half, full)


def test_a_smaller_group_serves_inputs_that_the_larger_does_not_divide() -> None:
    wanted = SCHEMES["int8"]
    for inputs, group in ((1024, 128), (192, 64), (96, 32), (4000, 32)):
        fit = fitting(wanted, inputs)
        assert fit is not None and fit.group == group
    assert fitting(wanted, 100) is None
    assert fitting(SCHEMES["int4"], 1024) == SCHEMES["int4"]  # not a larger one than asked for
    assert fitting(SCHEMES["w8a8"], 100) == SCHEMES["w8a8"]
    assert fitting(None, 64) is None


def test_the_head_keeps_eight_bits() -> None:
    assert of_head(None) is None
    for each in SCHEMES.values():
        head = of_head(each)
        assert head is not None and (head.bits, head.activations) == (8, each.activations)


def test_a_group_size_is_taken_where_it_means_something() -> None:
    assert scheme("int4", 128) == Scheme("int4", 4, 16, 128)
    assert EngineConfig(quantization="int4", quantization_group_size="64").quantization_group_size == 64
    for settings in ({"quantization": "w8a8"}, {}):
        with pytest.raises(ValueError, match="quantization_group_size means nothing"):
            EngineConfig(quantization_group_size=64, **settings)
    with pytest.raises(ValueError, match="32, 64, 128"):
        EngineConfig(quantization="int4", quantization_group_size=48)


def test_a_platform_that_packs_no_scheme_says_so() -> None:
    from quintet.engine.start import prepare

    with pytest.raises(ValueError, match="'int4' is not there on platform null, which packs no scheme; leave it out"):
        prepare(EngineConfig(device="null", quantization="int4"))
