"""The kit's section of ops names the clause that a platform breaks, the op and the case."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quintet.conformance.cases.model_ops import CASES, SAMPLING
from quintet.interface.weights import Matrix, Weight
from quintet.ops import Op
from quintet.platforms.cpu.platform import CPU
from tests.helpers.platforms.planted import Planted, Provider, first_failure


def test_every_op_has_cases_in_one_of_two_sections() -> None:
    ours = {name for name, op in Op.registry.items() if op.reference.__module__.startswith("quintet.")}
    assert set(CASES) | SAMPLING >= ours and not set(CASES) & SAMPLING


# ------------------------------------------------------------------------------------------------ ops


def _no_offset(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return Op.registry["rms_norm"].reference(x, weight, eps, 0.0)


def _half(x: Tensor, factor: float) -> Tensor:
    return (x * factor).half()


def _lost_row(q: Tensor, k: Tensor, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    q, k = Op.registry["rotary"].reference(q, k, table, positions)
    k[-1] = 0
    return q, k


def _first_of_equals_last(logits: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    weights, ids = Op.registry["route"].reference(logits.flip(1), k, renormalize)
    return weights, logits.shape[1] - 1 - ids


@pytest.mark.parametrize(
    ("op", "provider", "said"),
    [
        ("rms_norm", _no_offset, "(1, 48) + 1.0: element"),
        ("scale", _half, "the type is float16, float32 is wanted"),
        ("rotary", _lost_row, "result 2: element [8, "),
        ("route", _first_of_equals_last, "result 2: element"),
        ("add", lambda x, y: (x + y)[:1], "the shape is (1, 74), (3, 74) is wanted"),
        ("softcap", lambda x, cap: x.no_such_thing, "AttributeError"),
    ],
)
def test_a_wrong_provider_is_named_with_its_case(op: str, provider: Provider, said: str) -> None:
    found = first_failure("ops.specification", Planted(providers={op: provider}), f"{op} ")
    assert found.startswith(f"{op} in float32: {op} by native") and said in found


def test_a_product_that_rounds_on_the_way_is_found() -> None:
    def rounded(x: Tensor, weight: Matrix, bias: Tensor | None, outputs: tuple[int, ...]) -> Tensor:
        y: Tensor = Op.registry["linear"].providers["native"](x.bfloat16().float(), weight, bias, outputs)
        return y

    assert "linear by native in float32, " in first_failure("ops.specification", Planted(providers={"linear": rounded}))


def test_a_row_that_reaches_its_neighbours_is_found() -> None:
    def spreading(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        return Op.registry["rms_norm"].reference(x, weight, eps, offset) + 0 * x.sum()

    assert "rms_norm in float32: " in first_failure("ops.finite", Planted(providers={"rms_norm": spreading}))


def test_a_quantized_row_that_reaches_its_neighbours_is_found() -> None:
    """One scale for all rows of a step."""

    def spreading(x: Tensor, weight: Matrix, bias: Tensor | None, outputs: tuple[int, ...]) -> Tensor:
        product = Op.registry["linear:w8a8"].providers["native"]
        peak = x.abs().max()
        y: Tensor = product(x / peak, weight, None, outputs) * peak
        return y if bias is None else y + bias

    found = first_failure("ops.finite", Planted(providers={"linear:w8a8": spreading}))
    assert found.startswith("products by w8a8 in float32: 33x32 by 40, bias True, nan in row 1: element [0, 0] is nan")


def test_a_look_up_by_products_is_found() -> None:
    """Ones and zeros times the table: what is no number in one row of it is in all results."""

    def by_products(ids: Tensor, weight: Tensor, first: int, partial: bool) -> Tensor:
        return ((ids[:, None] - first) == torch.arange(len(weight))).float() @ weight

    assert "embedding in float32: " in first_failure("ops.finite", Planted(providers={"embedding": by_products}))


class SwappedParts(CPU):
    """Of several products side by side, the last stands first."""

    def place(
        self, weight: Weight, parts: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        return super().place(replace(weight, slices=weight.slices[::-1]), parts, into)


class OneScale(CPU):
    """Every group of an output has the scale of its first."""

    def place(
        self, weight: Weight, parts: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        placed = dict(super().place(weight, parts, into))
        if "scales" in placed:
            placed["scales"] = placed["scales"][:, :1].expand_as(placed["scales"]).contiguous()
        return placed


class UntiedHead(CPU):
    """A table that is shared is placed for products, even where rows are looked up."""

    def place(
        self, weight: Weight, parts: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        placed = super().place(weight, parts, into)
        return {name: x * 1.01 for name, x in placed.items()} if weight.shared else placed


class OneExpert(CPU):
    """All experts of a stack are the first."""

    def place(
        self, weight: Weight, parts: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        placed = super().place(weight, parts, into)
        if weight.use != "experts":
            return placed
        return {name: stack[:1].expand_as(stack).contiguous() for name, stack in placed.items()}


@pytest.mark.parametrize(
    ("platform", "said"),
    [
        (OneExpert, "experts in float32: "),
        (SwappedParts, "products in float32: 1x256 by 64+32+32"),
        (OneScale, "products by int4 in float32: "),
        (UntiedHead, "a tied head in float32: look-up"),
    ],
)
def test_a_weight_that_is_placed_wrongly_is_found(platform: type[CPU], said: str) -> None:
    assert said in first_failure("ops.placed", Planted(platform))
