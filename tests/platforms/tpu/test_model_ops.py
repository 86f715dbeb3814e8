"""The JAX providers of the model's ops become programs for a TPU. That they are right, the conformance kit says."""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from quintet.conformance.cases.model_ops import CASES
from quintet.ops import Op
from quintet.ops.activation import UnknownActivation
from tests.helpers.platforms.tpu import needs_jax

pytestmark = needs_jax

MODULES = (
    *("activation", "embedding", "heads", "linear", "moe", "norm", "quantized", "rotary", "rows", "states"),
    *("lora", "step_attention"),
)
NAMES = (
    *("activate", "gated", "embedding", "linear", "rms_norm", "add_rms_norm", "layer_norm", "rotary"),
    "pair_rotary",
    *("linear:int8", "linear:int4", "linear:fp8", "linear:fp8a8", "linear:w8a8"),
    *("route", "route_grouped", "route_limited", "grouped_linear", "experts", "biased_experts", "by_heads"),
    *("delta_rule", "kimi_delta_rule", "selective_scan", "short_conv", "state_space"),
    *("attention", "take_rows", "place_rows", "choose_rows", "add_lora", "scale_adapted", "adapter_rows"),
)


@dataclasses.dataclass(eq=False)
class Call:
    """A provider's call as a function of its arrays; what is no tensor is fixed."""

    name: str
    args: tuple[Any, ...]

    def __post_init__(self) -> None:
        for module in MODULES:
            importlib.import_module(f"quintet.platforms.tpu.kernels.{module}")
        self.provider: Callable[..., Any] = Op.registry[self.name].providers["jax"]

    @property
    def arrays(self) -> list[Any]:
        from quintet.platforms.tpu.torchax_bridge import jax_view

        views: list[Any] = jax_view(list(tensors(self.args)))
        return views

    def __call__(self, *arrays: Any) -> Any:
        """Called by a trace, as a layer of the model calls it: with tensors of the bridge."""
        from quintet.platforms.tpu.torchax_bridge import jax_view, torch_view, tracing

        given = iter(torch_view(arrays))
        with tracing():
            return jax_view(self.provider(*filled(self.args, given)))


def tensors(x: Any) -> Iterator[Tensor]:
    """Of a call's arguments, those of a matrix too."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, tuple):
        for each in x:
            yield from tensors(each)


def filled(x: Any, given: Iterator[Any]) -> Any:
    """The arguments with what is given in their tensors' places."""
    if isinstance(x, Tensor):
        return next(given)
    if not isinstance(x, tuple):
        return x
    made = [filled(each, given) for each in x]
    return type(x)(*made) if hasattr(x, "_fields") else tuple(made)


@functools.cache
def calls(name: str, dtype: torch.dtype) -> list[Call]:
    """A few of the contract's cases, from the first to the last."""
    cases = [args for _, args in CASES[name](dtype)]
    return [Call(name, args) for args in cases[:: max(1, len(cases) // 4)]]


@pytest.mark.grid(cases=16)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_lowers_for_a_tpu(name: str, dtype: torch.dtype) -> None:
    import jax

    for call in calls(name, dtype):
        lowered = jax.jit(call).trace(*call.arrays).lower(lowering_platforms=("tpu",))
        assert "stablehlo" in lowered.as_text()


def test_products_of_float32_are_not_left_to_bfloat16() -> None:
    """A TPU's default precision rounds the factors to bfloat16."""
    import jax

    for name in (
        "linear",
        "linear:int8",
        "linear:int4",
        "linear:fp8",
        "grouped_linear",
        "experts",
        "by_heads",
        "add_lora",
    ):
        for call in calls(name, torch.float32):
            text = jax.jit(call).trace(*call.arrays).lower(lowering_platforms=("tpu",)).as_text()
            products = [line for line in text.splitlines() if "dot_general" in line or "ragged_dot" in line]
            assert products and all("HIGHEST" in line for line in products), name


def test_integers_are_multiplied_as_integers() -> None:
    import jax

    for call in calls("linear:w8a8", torch.bfloat16):
        text = jax.jit(call).trace(*call.arrays).lower(lowering_platforms=("tpu",)).as_text()
        (product,) = (line for line in text.splitlines() if "dot_general" in line)
        assert product.count("xi8>") == 2 and "xi32>" in product


@pytest.mark.parametrize("name", ["linear:int8", "linear:int4", "linear:fp8"])
def test_a_weight_may_lie_with_its_outputs_side_by_side(name: str) -> None:
    """As kernels/quantized.py recommends: an array in another layout is taken as it is."""
    import jax
    import numpy as np
    from jax.experimental.layout import Format, Layout

    from quintet.platforms.tpu.torchax_bridge import jax_view, torch_view

    for call in calls(name, torch.bfloat16):
        x, weight, *others = call.args
        turned = Format(Layout((1, 0)), jax.sharding.SingleDeviceSharding(jax.devices()[0]))
        placed = weight._replace(values=torch_view(jax.device_put(jax_view(weight.values), turned)))
        want, got = (np.asarray(jax_view(call.provider(x, w, *others))) for w in (weight, placed))
        np.testing.assert_allclose(got.astype("float32"), want.astype("float32"), rtol=0.02, atol=0.02)


def test_an_activation_that_has_no_jax_is_said_and_not_a_key() -> None:
    call = calls("activate", torch.float32)[0]
    with pytest.raises(UnknownActivation, match="^activation 'swoosh' is not known; there are gelu, "):
        Call("activate", (call.args[0], "swoosh"))(*call.arrays)
