"""The Triton mixture of experts is the specification's: who serves whom, in what order, and what comes out."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import quintet.platforms.gpu.ops.moe  # noqa: F401  registers its providers
from quintet.conformance.cases.model_ops import CASES
from quintet.ops.registry import Op
from tests.helpers.platforms.triton import DTYPES, needs_triton, randn, triton_op

DEVICE = needs_triton()
ROUTES, PRODUCTS = ("route", "route_grouped", "route_limited"), ("grouped_linear", "experts", "biased_experts")

each_type = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def raised(x: Any) -> Any:
    if isinstance(x, tuple):
        parts = list(map(raised, x))
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x.float() if isinstance(x, Tensor) and x.dtype in DTYPES else x


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype, what: str) -> None:
    """As the contract has it: to 6 roundings of the type at the size of the result; 20 of float32."""
    assert got.dtype == dtype and got.shape == want.shape, what
    limit = (20 if dtype == torch.float32 else 6) * torch.finfo(dtype).eps * max(1.0, float(want.abs().max()))
    worst = float((got.float() - want).abs().max())
    assert worst <= limit, f"{what}: off by {worst:.3g}, {limit:.3g} allowed"


@pytest.mark.parametrize("name", ROUTES + PRODUCTS)
def test_probes_pass(name: str) -> None:
    assert Op.registry[name].probes["triton"]() is None


@pytest.mark.grid(cases=3)
@each_type
@pytest.mark.parametrize("name", ROUTES)
def test_tokens_choose_as_specified(name: str, dtype: torch.dtype) -> None:
    for what, args in itertools.islice(CASES[name](dtype), DTYPES.index(dtype), None, 3 if name == "route" else 1):
        weights, ids = triton_op(name, DEVICE)(*args)
        want, chosen = Op.registry[name].reference(*map(raised, args))
        assert torch.equal(ids, chosen), what
        assert_close(weights, want, torch.float32, what)


def test_equal_experts_are_taken_by_id() -> None:
    ids = triton_op("route", DEVICE)(torch.zeros(3, 60), 4, True)[1]
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
    weights, ids = triton_op("route_grouped", DEVICE)(torch.zeros(2, 24), torch.zeros(24), 3, 3, 2, True)
    assert ids.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))
    ids = triton_op("route", DEVICE)(torch.tensor([[float("-inf"), 1.0, float("-inf")]]), 3, False)[1]
    assert ids.tolist() == [[1, 0, 2]]


@pytest.mark.parametrize("num", [1, 5, 60])
def test_entries_come_in_the_order_of_a_stable_sort(num: int) -> None:
    """Some are nobody's; one chunk and several, the last in part."""
    from quintet.platforms.gpu.kernels.routing import ordered

    for tokens in (1, 100, 350):
        ids = torch.randint(-1, num + 1, (tokens, 2), generator=torch.Generator().manual_seed(tokens))
        order, counts = (each.cpu() for each in ordered(ids.to(DEVICE, torch.int32), num))
        flat = torch.where((ids >= 0) & (ids < num), ids, num).reshape(-1)
        assert torch.equal(order.long(), flat.sort(stable=True).indices)
        assert counts.tolist() == flat.bincount(minlength=num + 1)[:num].tolist()


@pytest.mark.grid(cases=3)
@each_type
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_the_specifications(name: str, dtype: torch.dtype) -> None:
    step = 2 if name == "grouped_linear" else 5  # some run five kernels, which are slow where they are interpreted
    for what, args in itertools.islice(CASES[name](dtype), DTYPES.index(dtype) % step, None, step):
        want = Op.registry[name].reference(*map(raised, args))
        assert_close(triton_op(name, DEVICE)(*args), want, dtype, what)


@pytest.mark.parametrize("rows", [70, 300])
def test_many_rows_per_expert(rows: int) -> None:
    """By the tiles for up to 64 and for more; blocks end with their expert's rows, and nobody's give 0."""
    x, weight = randn(rows, 72, dtype=torch.float16), randn(3, 140, 72, dtype=torch.float16, scale=0.1)
    counts = torch.tensor([rows - 20, 0, 13], dtype=torch.int32)
    want = Op.registry["grouped_linear"].reference(x.float(), weight.float(), counts)
    assert_close(triton_op("grouped_linear", DEVICE)(x, weight, counts), want, torch.float16, f"{rows} rows")
    one = torch.tensor([rows], dtype=torch.int32)
    want = Op.registry["grouped_linear"].reference(x.float(), weight[:1].float(), one)
    assert_close(triton_op("grouped_linear", DEVICE)(x, weight[:1], one), want, torch.float16, f"{rows} rows of one")


@pytest.mark.parametrize(("kind", "tokens"), [("silu", 140), ("gelu_pytorch_tanh", 60), ("relu", 3)])
def test_every_tile_and_activation(kind: str, tokens: int) -> None:
    x, seed = randn(tokens, 40, dtype=torch.float16), torch.Generator().manual_seed(tokens)
    gate_up = randn(2, 2 * 72, 40, dtype=torch.float16, scale=0.15)
    down = randn(2, 40, 72, dtype=torch.float16, scale=0.1)
    ids = torch.rand(tokens, 2, generator=seed).argsort(-1).to(torch.int32)
    weights = torch.rand(tokens, 2, generator=seed).softmax(-1)
    args = x, gate_up, down, weights, ids, kind
    want = Op.registry["experts"].reference(*map(raised, args))
    assert_close(triton_op("experts", DEVICE)(*args), want, torch.float16, f"{tokens} tokens")


def test_a_token_alone_is_a_token_in_a_batch() -> None:
    """Bit for bit, where both take the same tile."""
    x, num = randn(9, 40, dtype=torch.float16), 4
    gate_up, down = randn(num, 48, 40, dtype=torch.float16), randn(num, 40, 24, dtype=torch.float16)
    weights, ids = triton_op("route", DEVICE)(randn(9, num), 2, True)
    run = triton_op("experts", DEVICE)
    every = run(x, gate_up, down, weights, ids, "silu")
    for token in (0, 8):
        one = slice(token, token + 1)
        assert torch.equal(run(x[one], gate_up, down, weights[one], ids[one], "silu")[0], every[token])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit x"):
        triton_op("experts", DEVICE)(
            randn(1, 8), randn(2, 8, 8), randn(2, 8, 5), randn(1, 1), torch.zeros(1, 1), "silu"
        )
    with pytest.raises(ValueError, match="counts are int32"):
        triton_op("grouped_linear", DEVICE)(randn(1, 8), randn(2, 8, 8), torch.zeros(2))


def test_no_tokens_give_no_rows() -> None:
    none = torch.zeros(0, 2, dtype=torch.int32)
    assert triton_op("route", DEVICE)(randn(0, 8), 2, True)[1].shape == (0, 2)
    got = triton_op("experts", DEVICE)(randn(0, 8), randn(2, 8, 8), randn(2, 8, 4), none.float(), none, "silu")
    assert got.shape == (0, 8)
