"""The Triton provider of add_lora is the specification's, for any adapters beside each other."""

from typing import Any

import pytest
import torch
from torch import Tensor

import quintet.platforms.gpu.ops.lora  # noqa: F401  registers its provider
from quintet.conformance.cases.lora import LORA
from quintet.conformance.close import require_close
from quintet.ops.registry import Op
from tests.helpers.platforms.triton import DTYPES, needs_triton, randn, triton_op

DEVICE = needs_triton()
ADAPTERS, PARTS, RANK = 3, 2, 20


def raised(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.dtype in DTYPES else x


def arguments(tokens: int, inputs: int = 1100, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Two stretches that are no multiple of a block, and more inputs than one split has."""
    columns = (0, 70), (1, 130)
    slots = torch.arange(tokens, dtype=torch.int32) * 7 % (ADAPTERS + 1)
    ranks = torch.tensor([[5, RANK, 1], [5, 17, RANK], [5, 0, 3]], dtype=torch.int32)
    a = randn(ADAPTERS, PARTS, RANK, inputs, dtype=dtype, scale=inputs**-0.5)
    b = randn(ADAPTERS, RANK, 200, dtype=dtype, scale=RANK**-0.5)
    return randn(tokens, 200, dtype=dtype), randn(tokens, inputs, dtype=dtype), a, b, ranks, slots, 1, columns


def test_the_probe_passes() -> None:
    assert Op.registry["add_lora"].probes["triton"]() is None


@pytest.mark.grid(cases=3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_equals_the_specification(dtype: torch.dtype) -> None:
    for what, args in list(LORA["add_lora"](dtype))[DTYPES.index(dtype) :: 3]:
        require_close(what, triton_op("add_lora", DEVICE)(*args), Op.registry["add_lora"].reference(*map(raised, args)))


def test_many_inputs_and_columns_equal_the_specification() -> None:
    args = arguments(37)
    require_close("all", triton_op("add_lora", DEVICE)(*args), Op.registry["add_lora"].reference(*args))


def test_ranks_beyond_one_block_equal_the_specification() -> None:
    rank, y, x = 100, randn(5, 40), randn(5, 33)
    a, b = randn(2, 1, rank, 33, scale=0.2), randn(2, rank, 40, scale=0.1)
    ranks, slots = torch.tensor([[rank], [65]], dtype=torch.int32), torch.tensor([1, 2, 0, 2, 1], dtype=torch.int32)
    args = y, x, a, b, ranks, slots, 0, ((0, 40),)
    require_close("all", triton_op("add_lora", DEVICE)(*args), Op.registry["add_lora"].reference(*args))


def test_a_token_has_the_same_bits_in_every_batch() -> None:
    """At its place of a block: NumPy, which multiplies for the interpreter, adds up the last rows in another order."""
    y, x, *pools, slots, first, columns = arguments(40)
    whole = triton_op("add_lora", DEVICE)(y, x, *pools, slots, first, columns)
    for part in (slice(0, 1), slice(16, 40), slice(32, 33), slice(16, 21)):
        got = triton_op("add_lora", DEVICE)(y[part], x[part], *pools, slots[part], first, columns)
        assert torch.equal(got, whole[part])


def test_a_token_without_an_adapter_keeps_its_bits() -> None:
    y, x, *pools, slots, first, columns = arguments(24, dtype=torch.float16)
    y[slots == 0, 0] = -0.0
    got = triton_op("add_lora", DEVICE)(y, x, *pools, slots, first, columns)
    assert torch.equal(got[slots == 0].view(torch.int16), y[slots == 0].view(torch.int16))
    assert not torch.equal(got, y)
    assert triton_op("add_lora", DEVICE)(y[:0], x[:0], *pools, slots[:0], first, columns).shape == (0, 200)


def test_rows_between_others_and_columns_apart_are_taken() -> None:
    y, x, *others = arguments(9)
    want = triton_op("add_lora", DEVICE)(y, x, *others)
    provider = Op.registry["add_lora"].providers["triton"]
    wide = torch.cat([y, y], 1).to(DEVICE)
    there = [each.to(DEVICE) if isinstance(each, Tensor) else each for each in others]
    for given in (wide[:, :200], y.t().contiguous().to(DEVICE).t()):
        assert torch.equal(provider(given, torch.cat([x, x], 1).to(DEVICE)[:, : x.shape[1]], *there).cpu(), want)
    assert torch.equal(wide[:, 200:].cpu(), y), "what stands beside is as it was"


@pytest.mark.parametrize(
    ("place", "change", "said"),
    [
        (1, lambda x: x[:, :-1], "do not fit; they are"),
        (0, lambda y: y[:-1], "do not fit; they are"),
        (3, lambda b: b.half(), "have types torch.float32, torch.float32, torch.float32, torch.float16"),
        (5, lambda slots: slots[1:], "do not fit 4 tokens and 3 adapters of 2 parts"),
        (6, lambda first: 2, "from column 2 on"),
        (7, lambda columns: columns[:1], "do not fit; they are"),
    ],
)
def test_what_does_not_fit_is_refused(place: int, change: Any, said: str) -> None:
    args = list(arguments(4))
    args[place] = change(args[place])
    with pytest.raises(ValueError, match=said):
        triton_op("add_lora", DEVICE)(*args)
