"""The Triton kernels of states are the specification's, and a request's results are its own."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import quintet.platforms.gpu.ops.states  # noqa: F401  registers its providers
from quintet.conformance.cases.states import STATES
from quintet.interface.types import Batch, Group, StepContext
from quintet.ops.registry import Op
from quintet.ops.states import ConvWeights, ScanInputs, ScanWeights
from tests.helpers.platforms.triton import DTYPES, needs_triton, randn, triton_op

DEVICE = needs_triton()
NAMES = sorted({*STATES} - {"kimi_delta_rule", "wkv7"})  # these have no kernel here: the specification computes them


def raised(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.to(torch.float32, copy=True) if x.dtype in DTYPES else x.clone()
    parts = [raised(each) for each in x] if isinstance(x, tuple) else []
    return (type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)) if isinstance(x, tuple) else x


@pytest.mark.parametrize("name", NAMES)
def test_probes_pass(name: str) -> None:
    assert Op.registry[name].probes["triton"]() is None


@pytest.mark.grid(cases=4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_kernels_give_what_is_specified(name: str, dtype: torch.dtype) -> None:
    """What comes out, and every unit of the state but that of padding."""
    for what, args in itertools.islice(STATES[name](dtype), DTYPES.index(dtype), None, len(DTYPES)):
        got, wants = triton_op(name, DEVICE)(*args), Op.registry[name].reference(*raised(args))
        for index, (ours, want) in enumerate(zip(got, wants, strict=True)):
            result = dtype if name == "short_conv" else torch.float32
            assert ours.dtype == result and ours.shape == want.shape, what
            limit = (20 if result == torch.float32 else 6) * torch.finfo(result).eps * max(1.0, float(want.abs().max()))
            off = float((ours.float() - want)[index:].abs().max())
            assert off <= limit, f"{what}, result {index}: off by {off:.3g}, {limit:.3g} allowed"


def context(counts: list[int], units: list[tuple[int, int]], width: int = 2) -> StepContext:
    """A table that is wider than what is read of it is one that is captured."""
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    owners = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(torch.tensor(counts))
    table = torch.full((len(counts), width), 7, dtype=torch.int32)
    table[:, :2] = torch.tensor(units)
    none = torch.zeros_like(owners)
    return StepContext(Batch(none, none, owners, starts, none), Group(none, table, none))


def test_a_prompt_in_chunks_is_the_whole_prompt_to_the_bit() -> None:
    """Beside others, in a captured table, and after another request has left its numbers in the units."""
    tokens, heads, dim, width = 9, 2, 3, 5
    x, dt, into, out = (randn(tokens, heads, *rest) for rest in ((dim,), (), (width,), (width,)))
    scan, state = ScanWeights(randn(heads), randn(heads), randn(heads)), randn(6, heads, dim, width)
    run = triton_op("state_space", DEVICE)
    whole, after = run(ScanInputs(x, dt, into, out), scan, state, context([tokens], [(0, 1)]), 0.0)
    first, second = (ScanInputs(*(each[part] for each in (x, dt, into, out))) for part in (slice(0, 4), slice(4, None)))
    parts, halfway = run(first, scan, state, context([1, 3], [(5, 4), (0, 2)], 64), 0.0)
    begun, halfway = run(first, scan, halfway, context([4], [(0, 2)]), 0.0)
    ended, done = run(second, scan, halfway, context([5], [(2, 3)], 64), 0.0)
    assert torch.equal(torch.cat([begun, ended]), whole) and torch.equal(done[3], after[1])
    assert not torch.equal(parts, begun)


def test_a_convolution_in_chunks_is_the_whole_one_to_the_bit() -> None:
    """Chunks that are shorter than what it looks back at, too; a request without tokens keeps what it has."""
    x, conv, state = randn(5, 4), ConvWeights(randn(4, 4), randn(4)), randn(5, 4, 3)
    run = triton_op("short_conv", DEVICE)
    whole, after = run(x, None, conv, state, context([5], [(0, 1)]), True)
    found, unit = [], 0
    for place, to in zip(range(5), (1, 2, 1, 2, 1), strict=True):
        out, state = run(x[place : place + 1], None, conv, state, context([1, 0], [(unit, to), (unit, 3)]), True)
        assert unit == 0 or torch.equal(state[3], state[unit])
        found, unit = [*found, out], to
    assert torch.equal(torch.cat(found), whole) and torch.equal(state[1], after[1])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="is wanted for each unit"):
        triton_op("short_conv", DEVICE)(
            randn(1, 4), None, ConvWeights(randn(4, 3)), randn(3, 4, 3), context([1], [(0, 1)]), True
        )
    moves = ScanInputs(randn(1, 2, 3), randn(1, 2), randn(1, 1, 4), randn(1, 1, 4))
    with pytest.raises(ValueError, match="is wanted for each unit"):
        triton_op("state_space", DEVICE)(
            moves, ScanWeights(randn(2), randn(2)), randn(3, 2, 3, 4).half(), context([1], [(0, 1)]), 0.0
        )


def test_tokens_that_pad_a_step_get_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request has them; what memory held must not go through the layers that follow."""
    full, tokens, heads, dim, width = torch.full, 5, 2, 3, 5
    x, dt, into, out = (randn(tokens, heads, *rest) for rest in ((dim,), (), (width,), (width,)))
    scan, state = ScanWeights(randn(heads), randn(heads), randn(heads)), randn(4, heads, dim, width)
    monkeypatch.setattr(torch, "empty", lambda shape, **how: full(shape, torch.nan, **how))
    run = triton_op("state_space", DEVICE)
    padded, after = run(ScanInputs(x, dt, into, out), scan, state, context([3, 0], [(0, 1), (0, 0)]), 0.0)
    assert not padded[3:].any() and padded[:3].isfinite().all() and torch.equal(after[2:], state[2:])
