"""The providers: which ops the device has, and one of its own. Ops that are not here run as their specifications."""

import functools
import inspect
from typing import Any

from quintet.contract import Matrix, Op
from quintet.ops.activation import gated
from quintet.ops.linear import KINDS, linear
from quintet.ops.moe import experts
from torch import Tensor
from torch.nn import functional

from acme import kernels
from acme.launch import launch

# What it has no kernels for. Its attention has a cache of its own; of the others, a step runs the torch calls that the
# specification is made of. All other ops have kernels that do what the specifications do.
LACKING = {"write_kv", "rotary_write_kv", "paged_attention", "norm_rotary"} | {
    f"linear:{kind}" for kind in KINDS if kind != "int8"
}


@Op
def acme_gated_mlp(x: Tensor, gate_up: Tensor, down: Tensor, kind: str) -> Tensor:
    """down @ gated(gate_up @ x), an op that nobody else has: x [T, D], gate_up [2 I, D], down [D, I] as place() left
    them -> [T, D]. It is used by acme.layers."""
    result: Tensor = functional.linear(gated.reference(functional.linear(x, gate_up), kind), down)
    return result


@acme_gated_mlp.provide("acme")
def _gated_mlp(x: Tensor, gate_up: Tensor, down: Tensor, kind: str) -> Tensor:
    result: Tensor = launch(kernels.gated_mlp, kernels.gated_mlp_shape, x, gate_up, down, kind)
    return result


@linear.provide("acme")
def _linear(x: Tensor, weight: Matrix, bias: Tensor | None, outputs: tuple[int, ...]) -> Tensor:
    result: Tensor = launch(kernels.product, kernels.product_shape, x, weight.values, bias)
    return result


@linear.provide("acme", kinds=("int8",))
def _linear_int8(x: Tensor, weight: Matrix, bias: Tensor | None, outputs: tuple[int, ...]) -> Tensor:
    result: Tensor = launch(kernels.product_int8, kernels.product_int8_shape, x, weight.values, weight.scales, bias)
    return result


@experts.provide("acme")
def _experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, kind: str) -> Tensor:
    result: Tensor = launch(kernels.experts, kernels.experts_shape, x, gate_up, down, weights, ids, kind)
    return result


def _serve(op: Op) -> None:
    """Registers a kernel that is the specification itself, on the queue."""
    parameters = inspect.signature(op.reference)

    @functools.wraps(op.reference)
    def provider(*args: Any, **named: Any) -> Any:
        kernel = kernels.of(op)
        return launch(kernel, kernel, *parameters.bind(*args, **named).args)

    op.provide("acme")(provider)


for _op in Op.registry.values():
    if "acme" not in _op.providers and _op.name not in LACKING:
        _serve(_op)

PRIORITY = {name: ("acme",) for name, op in Op.registry.items() if "acme" in op.providers}
