"""Whole experts on ranks by Triton: where they are, their counts, and what the experts' kernel makes of both."""

from typing import Any

import pytest
import torch

import quintet.platforms.gpu.ops.expert_placement  # registers its providers
import quintet.platforms.gpu.ops.moe  # noqa: F401
from quintet.conformance.cases.model_ops import CASES
from quintet.layers.moe.expert_placement import ExpertPlacement, RankExperts
from quintet.ops.registry import Op
from tests.helpers.platforms.triton import DTYPES, needs_triton, randn, triton_op

DEVICE = needs_triton()
each_type = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.parametrize("name", ["local_experts", "count_experts"])
def test_probes_pass(name: str) -> None:
    assert Op.registry[name].probes["triton"]() is None


@each_type
def test_experts_are_where_the_specification_has_them(dtype: torch.dtype) -> None:
    for what, args in CASES["local_experts"](dtype):
        assert torch.equal(triton_op("local_experts", DEVICE)(*args), Op.registry["local_experts"].reference(*args)), (
            what
        )


def test_every_copy_of_an_expert_is_taken() -> None:
    """As the specification chooses: many tokens, 16 columns, and x that is not dense."""
    wide = randn(600, 48, dtype=torch.bfloat16)
    ids, places = torch.zeros(600, 1, dtype=torch.int32), torch.arange(16, dtype=torch.int32)[None]
    for x in (wide, wide[:, 5:9], wide[:, 7:8]):
        got = triton_op("local_experts", DEVICE)(x, ids, places)
        assert torch.equal(got, Op.registry["local_experts"].reference(x, ids, places))
        assert len(got.unique()) == 16 or x.shape[1] == 1


def test_counting_adds_and_wraps() -> None:
    for what, (ids, loads) in CASES["count_experts"](torch.int32):
        want = Op.registry["count_experts"].reference(ids, loads.clone())
        assert torch.equal(triton_op("count_experts", DEVICE)(ids, loads.clone()), want), what
    full = torch.full((2,), 2**31 - 1, dtype=torch.int32)
    ids = torch.tensor([[0, 2], [0, -1]], dtype=torch.int32)
    assert triton_op("count_experts", DEVICE)(ids, full).tolist() == [-(2**31) + 1, 2**31 - 1]
    assert triton_op("count_experts", DEVICE)(ids[:0], torch.ones(2, dtype=torch.int32)).tolist() == [1, 1]


@pytest.mark.grid(cases=1)
@each_type
def test_shares_of_ranks_add_up_to_all_experts(dtype: torch.dtype) -> None:
    """The experts' kernel takes what comes: of two ranks, with copies and without, each adds its own."""
    tokens, num, k, hidden, inner = 37, 5, 2, 32, 16
    x = randn(tokens, hidden, dtype=dtype)
    gate_up, down = randn(num, 2 * inner, hidden, dtype=dtype), randn(num, hidden, inner, dtype=dtype)
    drawn = torch.Generator().manual_seed(1)
    ids = torch.rand(tokens, num, generator=drawn).argsort(1)[:, :k].to(torch.int32)
    weights = torch.rand(tokens, k, generator=drawn)
    whole = triton_op("experts", DEVICE)(x, gate_up, down, weights, ids, "silu").float()
    for copies in (0, 3):
        total: Any = 0.0
        for rank in range(2):
            dealt = RankExperts(ExpertPlacement(redundant_experts=copies), num, rank, 2)
            own = torch.tensor(dealt.local_experts)
            here = triton_op("local_experts", DEVICE)(x, ids, dealt.table())
            total = total + triton_op("experts", DEVICE)(x, gate_up[own], down[own], weights, here, "silu").float()
        limit = 6 * torch.finfo(dtype).eps * max(1.0, float(whole.abs().max()))
        assert float((total - whole).abs().max()) <= (limit if dtype != torch.float32 else 4 * limit)


def test_what_does_not_fit_is_refused() -> None:
    x, ids = torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="all int32"):
        triton_op("local_experts", DEVICE)(x, ids.long(), ids)
    with pytest.raises(ValueError, match="both are int32"):
        triton_op("count_experts", DEVICE)(ids, torch.zeros(2))
