"""Kernels of states: each instruction set against the specification, and the bits of a request however it is cut."""

import math
import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from quintet.conformance.cases.random_arguments import randn
from quintet.interface.types import Batch, Group, StateSpec, StepContext
from quintet.ops import Op
from quintet.ops.states import (
    DRAFT_OPS,
    MAX_DRAFTS,
    ConvWeights,
    DeltaRuleInputs,
    ScanInputs,
    ScanWeights,
    unit_shape,
)
from quintet.platforms.cpu.ops import states as native_states
from quintet.platforms.cpu.ops.extension import missing

if reason := missing("selective_scan"):
    pytest.skip(reason, allow_module_level=True)

from quintet import _cpu

TOKENS = 45
CUTS = ((0, 1, TOKENS), (0, 15, 16, 17, TOKENS), (0, 32, 40, TOKENS), tuple(range(TOKENS + 1)))
Given = tuple[Any, ...]
Settings = tuple[Any, ...]


@pytest.fixture(autouse=True, params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = _cpu.threads()
    _cpu.set_threads(request.param)
    yield
    _cpu.set_threads(before)


def context(counts: tuple[int, ...], units: tuple[tuple[int, ...], ...]) -> StepContext:
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    owners = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(torch.tensor(counts))
    none, lengths = torch.zeros(sum(counts), dtype=torch.int32), torch.tensor(counts, dtype=torch.int32)
    group = Group(none, torch.tensor(units, dtype=torch.int32), lengths)
    return StepContext(Batch(none, none, owners, starts, none, (group,)), group)


def space(heads: int, groups: int, dim: int, width: int, dtype: torch.dtype) -> tuple[Given, Tensor, Settings]:
    fused = randn(TOKENS, heads * dim + 2 * groups * width + heads, dtype=dtype)  # slices of one product
    x, into, out, dt = fused.split([heads * dim, groups * width, groups * width, heads], dim=-1)
    moves = ScanInputs(
        x.reshape(TOKENS, heads, dim),
        dt,
        into.reshape(TOKENS, groups, -1),
        out.reshape(TOKENS, groups, -1) * width**-0.5,
    )
    scan = ScanWeights(*(randn(heads, dtype=torch.float32, scale=0.5) for _ in range(3)))
    return (moves, scan), randn(4, heads, dim, width, dtype=torch.float32), (0.01,)


def selective(channels: int, width: int, dtype: torch.dtype) -> tuple[Given, Tensor, Settings]:
    x, dt = randn(TOKENS, channels, 1, dtype=dtype), randn(TOKENS, channels, dtype=dtype, scale=3.0)
    into, out = (randn(TOKENS, 1, width, dtype=dtype, scale=scale) for scale in (1.0, width**-0.5))
    rates = torch.log(torch.arange(1, width + 1).float()).repeat(channels, 1)
    scan = ScanWeights(rates, *(randn(channels, dtype=torch.float32, scale=0.5) for _ in range(2)))
    return (ScanInputs(x, dt, into, out), scan), randn(4, channels, width, dtype=torch.float32), ()


def conv(channels: int, taps: int, gated: bool, dtype: torch.dtype) -> tuple[Given, Tensor, Settings]:
    gates = randn(TOKENS, 2 * channels, dtype=dtype) if gated else None
    weights = ConvWeights(randn(channels, taps, dtype=dtype), None if gated else randn(channels, dtype=dtype))
    return (
        (randn(TOKENS, channels, dtype=dtype), gates, weights),
        randn(4, channels, taps - 1, dtype=dtype),
        (not gated,),
    )


def delta(
    heads: int, groups: int, values: int, width: int, beta_scale: float, dtype: torch.dtype
) -> tuple[Given, Tensor, Settings]:
    q, k = (randn(TOKENS, groups, width, dtype=dtype) for _ in range(2))
    rates = [randn(TOKENS, heads, dtype=dtype) for _ in range(2)]
    scan = ScanWeights(*(randn(heads, dtype=torch.float32, scale=0.5) for _ in range(2)))
    turns = DeltaRuleInputs(q, k, randn(TOKENS, heads, values, dtype=dtype), *rates)
    return (turns, scan), randn(4, heads, values, width, dtype=torch.float32), (beta_scale,)


def kimi(heads: int, values: int, width: int, bound: float, dtype: torch.dtype) -> tuple[Given, Tensor, Settings]:
    q, k, forget = (randn(TOKENS, heads, width, dtype=dtype) for _ in range(3))
    v, learn = randn(TOKENS, heads, values, dtype=dtype), randn(TOKENS, heads, dtype=dtype)
    scan = ScanWeights(*(randn(*size, dtype=torch.float32, scale=0.5) for size in ((heads,), (heads, width))))
    state = randn(4, heads, values, width, dtype=torch.float32)
    return (DeltaRuleInputs(q, k, v, forget, learn), scan), state, (bound,)


def drawn(dtype: torch.dtype) -> dict[str, tuple[str, tuple[Given, Tensor, Settings]]]:
    """Around the vectors of any instruction set, and more numbers than registers hold."""
    torch.manual_seed(0)
    return {
        "Granite": ("state_space", space(4, 1, 64, 128, dtype)),
        "a MiB, written past the caches": ("state_space", space(32, 1, 64, 128, dtype)),
        "wide": ("state_space", space(2, 2, 17, 256, dtype)),
        "odd": ("state_space", space(6, 3, 5, 83, dtype)),
        "narrow": ("state_space", space(3, 1, 33, 16, dtype)),
        "Mamba": ("selective_scan", selective(130, 16, dtype)),
        "Mamba, odd": ("selective_scan", selective(71, 7, dtype)),
        "taps": ("short_conv", conv(200, 4, False, dtype)),
        "gated taps": ("short_conv", conv(67, 3, True, dtype)),
        "delta": ("delta_rule", delta(4, 2, 24, 40, 1.0, dtype)),
        "delta, twice beta": ("delta_rule", delta(3, 3, 7, 83, 2.0, dtype)),
        "Kimi": ("kimi_delta_rule", kimi(4, 32, 32, 0.0, dtype)),
        "Kimi, odd, bounded": ("kimi_delta_rule", kimi(3, 7, 83, -5.0, dtype)),
    }


def part(x: Any, first: int, last: int) -> Any:
    """The same tokens of all that a step gives: what has one number or more for each of TOKENS."""
    if isinstance(x, ConvWeights | ScanWeights):
        return x
    if isinstance(x, tuple):
        rest = [part(each, first, last) for each in x]
        return type(x)(*rest) if hasattr(x, "_fields") else tuple(rest)
    return None if x is None else x[first:last]


def run(name: str, given: Given, state: Tensor, of: StepContext, settings: Settings) -> Tensor:
    out: Tensor = Op.registry[name].providers["native"](*given, state, of, *settings)[0]
    return out


@pytest.mark.grid
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_instruction_set_equals_the_specification(isa: str, dtype: torch.dtype) -> None:
    assert native_states.probe() is None
    for what, (name, (given, state, settings)) in drawn(dtype).items():
        for counts, units in (((TOKENS,), ((0, 1),)), ((3, 2, TOKENS - 5), ((2, 1), (0, 3), (2, 0)))):
            wanted, got = state.clone(), state.clone()
            want, wanted = Op.registry[name].reference(*given, wanted, context(counts, units), *settings)
            out = run(name, given, got, context(counts, units), settings)
            bound = (8 * torch.finfo(out.dtype).eps if dtype != torch.float32 else 3e-5) * float(want.abs().max())
            torch.testing.assert_close(out, want, rtol=0, atol=bound, msg=lambda m, what=what: f"{what}: {m}")  # type: ignore[misc]
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4, msg=lambda m, what=what: f"{what}: {m}")  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_where_a_prompt_is_cut_and_who_is_beside_it_changes_no_bit(isa: str, dtype: torch.dtype) -> None:
    for what, (name, (given, state, settings)) in drawn(dtype).items():
        whole = state.clone()
        want = run(name, given, whole, context((TOKENS,), ((2, 1),)), settings)
        for cuts in CUTS:
            kept, outs, unit = state.clone(), [], 2
            for first, last in pairwise(cuts):
                to = 1 if unit != 1 else 3
                outs.append(
                    run(name, part(given, first, last), kept, context((last - first,), ((unit, to),)), settings)
                )
                unit = to
            assert torch.equal(torch.cat(outs), want), (what, cuts)
            assert torch.equal(kept[unit], whole[1]), (what, cuts)
        for at in (5, 40):  # the end, and the beginning beside it, of which each starts anew
            cut = context((at, TOKENS - at), ((2, 1), (2, 3)))
            beside = run(name, given, state.clone(), cut, settings)
            assert torch.equal(beside[:at], want[:at]), (what, at)


def picked(x: Any, rows: list[int]) -> Any:
    """As part(), with these tokens of all that a step gives."""
    if isinstance(x, ConvWeights | ScanWeights):
        return x
    if isinstance(x, tuple):
        rest = [picked(each, rows) for each in x]
        return type(x)(*rest) if hasattr(x, "_fields") else tuple(rest)
    return None if x is None else x[torch.tensor(rows)]


def check_drafts(op: str, provider: Any, given: Given, state: Tensor, settings: Settings, seed: int) -> None:
    """Steps of a token or more with drafts, of which some are right, beside another request with as many: the outputs
    and the state are those of all tokens in one step."""
    rng = random.Random(seed)
    shape, drafts = tuple(state.shape[1:]), rng.choice([1, 3, MAX_DRAFTS])
    if op == "short_conv":
        shape = shape[0], given[2].weight.shape[1] - 1
    size, flat = math.prod(shape), unit_shape(StateSpec(op, shape, state.dtype, drafts))
    whole = state.clone()
    want = provider(*given, whole, context((TOKENS,), ((2, 1),)), *settings)[0]
    units = torch.zeros(6, *flat, dtype=state.dtype)
    units[2] = torch.nan  # what no step has written
    (units[2, :, : shape[1]] if op == "short_conv" else units[2, :size].view(shape)).copy_(state[2])
    place, accepted, read, writes = 0, 0, 2, [1, 3]
    while place < TOKENS:
        known = min(rng.choice([1, 1, 1, 20]), TOKENS - place)
        count = rng.randrange(min(drafts, TOKENS - place - known) + 1)
        right = rng.randrange(count + 1)
        rows = list(range(place, place + known + right))
        rows += [rng.randrange(TOKENS) for _ in range(count - right)]
        at = context((len(rows), len(rows)), ((0, 4, 0, count), (read, writes[0], accepted, count)))
        out = provider(*picked(given, rows * 2), units, at, *settings)[0][len(rows) :]
        assert torch.equal(out[: known + right], want[place : place + known + right]), (op, place)
        place, accepted, read, writes = place + known + right, right, writes[0], writes[::-1]
    end = context((1,), ((read, 5, accepted, 0),))
    other = context((1,), ((1, 3),))
    provider(*picked(given, [0]), units, end, *settings)
    provider(*picked(given, [0]), whole, other, *settings)
    kept = units[5, :, : shape[1]] if op == "short_conv" else units[5, :size].view(shape)
    assert torch.equal(kept, whole[3]), op


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_drafts_that_are_refused_change_no_bit(isa: str, dtype: torch.dtype) -> None:
    for op, (given, state, settings) in drawn(dtype).values():
        if op in DRAFT_OPS:
            for seed in range(3):
                check_drafts(op, Op.registry[op].providers["native"], given, state, settings, seed)


def test_drafts_change_no_bit_by_the_specification() -> None:
    for op, (given, state, settings) in drawn(torch.float32).values():
        if op in DRAFT_OPS and state.numel() < 2**18:
            check_drafts(op, Op.registry[op].reference, given, state, settings, 0)


def test_more_drafts_than_there_is_room_for_are_refused() -> None:
    given, _, settings = conv(8, 4, False, torch.float32)
    units = torch.zeros(4, *unit_shape(StateSpec("short_conv", (8, 3), max_drafts=2)))
    for row, why in (
        ((2, 1, 3, 0), "room for"),
        ((2, 1, 0, 3), "room for"),
        ((0, 1, 1, 0), "no state is before"),
        ((2, 1, 0, -1), "room for"),
    ):
        with pytest.raises(ValueError, match=why):
            run("short_conv", given, units, context((TOKENS,), (row,)), settings)
    with pytest.raises(ValueError, match="a token before its drafts"):
        run("short_conv", part(given, 0, 2), units, context((2,), ((2, 1, 0, 2),)), settings)


def test_a_selective_scan_has_the_same_bits_with_every_vector(isas: Iterator[str]) -> None:
    """Each channel has a lane to itself; the baseline's products and sums are rounded apart."""
    given, state, _ = selective(130, 16, torch.bfloat16)
    found = [
        run("selective_scan", given, state.clone(), context((TOKENS,), ((2, 1),)), ())
        for isa in isas
        if isa != "baseline"
    ]
    assert all(torch.equal(each, found[0]) for each in found)


def test_steps_are_far_from_zero_or_near_it() -> None:
    """What softplus leaves as it is, and what it nearly takes away."""
    given, state, _ = selective(64, 16, torch.float32)
    dt = torch.linspace(-80, 80, TOKENS)[:, None].repeat(1, 64)
    moves, scan = given[0]._replace(dt=dt), given[1]
    at = context((TOKENS,), ((0, 1),))
    want = Op.registry["selective_scan"].reference(moves, scan, state.clone(), at)[0]
    torch.testing.assert_close(run("selective_scan", (moves, scan), state.clone(), at, ()), want, rtol=1e-5, atol=1e-5)


def test_a_step_without_its_bias_is_refused() -> None:
    (moves, scan), state, settings = space(2, 1, 8, 16, torch.float32)
    with pytest.raises(ValueError, match="a dt comes with a bias"):
        run("state_space", (moves, scan._replace(dt_bias=None)), state, context((TOKENS,), ((0, 1),)), settings)
    (moves, scan), state, _ = selective(8, 16, torch.float32)
    with pytest.raises(ValueError, match="selective by its dt"):
        run("selective_scan", (moves, scan._replace(dt_bias=None)), state, context((TOKENS,), ((0, 1),)), ())


def test_more_numbers_than_a_kernel_holds_are_the_specifications() -> None:
    given, state, _ = selective(3, native_states.MAX_WIDTH + 1, torch.float32)
    at = context((TOKENS,), ((0, 1),))
    want = Op.registry["selective_scan"].reference(*given, state.clone(), at)[0]
    assert torch.equal(run("selective_scan", given, state, at, ()), want)


def test_what_is_of_another_type_is_refused_and_not_misread() -> None:
    """A kernel is told one type, and addresses."""
    (moves, scan), state, settings = space(2, 1, 4, 8, torch.bfloat16)
    held = context((TOKENS,), ((0, 1),))
    for wrong in (moves._replace(dt=moves.dt.float()), moves._replace(b=moves.b[:1])):
        with pytest.raises(ValueError, match="of one type, and of all its tokens"):
            native_states._state_space(wrong, scan, state, held, *settings)
    x, weight = randn(3, 4, dtype=torch.float32), randn(4, 3, dtype=torch.float32)
    kept = torch.zeros(2, 4, 2)
    for gates in (x, torch.zeros(3, 8, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="^gates .* do not fit x"):
            native_states._short_conv(x, gates, ConvWeights(weight), kept, context((3,), ((0, 1),)), False)
