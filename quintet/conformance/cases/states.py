"""Arguments for the ops with one state per request, and for the ops beside them."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from quintet.conformance.cases.random_arguments import Case, Cases, randn
from quintet.interface.types import Batch, Group, StateSpec, StepContext
from quintet.ops.states import (
    ConvWeights,
    DeltaRuleInputs,
    ScanInputs,
    ScanWeights,
    WKV7Inputs,
    WKV7OutputWeights,
    WKV7Weights,
    unit_shape,
)

UNITS = 9  # of a state
# tokens of each request, and the units that their states are read from and written to
Mixes = tuple[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]], ...]
MIXES: Mixes = (
    *(((1,), ((0, 3),)), ((5,), ((4, 1),)), ((3, 1, 40), ((0, 2), (7, 5), (8, 6))), ((1, 1), ((1, 2), (0, 8)))),
)
# the last of the tokens are drafts; before them come accepted ones of the step before
NUM_DRAFTS = 3
DRAFT_MIXES: Mixes = (
    *(((4,), ((0, 3, 0, 3),)), ((4,), ((5, 1, 2, 3),)), ((45, 4, 6), ((4, 1, 3, 3), (0, 2, 0, 3), (7, 6, 1, 3)))),
)


def _context(counts: tuple[int, ...], units: tuple[tuple[int, ...], ...]) -> StepContext:
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    owners = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(torch.tensor(counts))
    none, lengths = torch.zeros(sum(counts), dtype=torch.int32), torch.tensor(counts, dtype=torch.int32)
    plan = torch.zeros(0, max(counts), dtype=torch.int32)
    group = Group(none, torch.tensor(units, dtype=torch.int32), lengths, (plan,))
    return StepContext(Batch(none, none, owners, starts, none, (group,)), group)


def _state(op: str, shape: tuple[int, ...], dtype: torch.dtype, mixes: Mixes) -> Tensor:
    drafts = NUM_DRAFTS if mixes is DRAFT_MIXES else 0
    return randn(UNITS, *unit_shape(StateSpec(op, shape, dtype, drafts)), dtype=dtype)


def _heads(*shape: int) -> Tensor:
    return randn(*shape, dtype=torch.float32, scale=0.5)


def short_conv(dtype: torch.dtype, mixes: Mixes = MIXES) -> Iterator[Case]:
    for channels, taps, gated, biased in ((3, 2, False, False), (70, 4, False, True), (129, 3, True, True)):
        for counts, units in mixes:
            tokens = sum(counts)
            conv = ConvWeights(randn(channels, taps, dtype=dtype), randn(channels, dtype=dtype) if biased else None)
            gates = randn(tokens, 2 * channels, dtype=dtype) if gated else None
            state = _state("short_conv", (channels, taps - 1), dtype, mixes)
            given = randn(tokens, channels, dtype=dtype), gates, conv, state, _context(counts, units)
            yield f"{channels} channels, {taps} taps, {counts} tokens", (*given, biased)


def state_space(dtype: torch.dtype, mixes: Mixes = MIXES) -> Iterator[Case]:
    for heads, groups, dim, width in ((1, 1, 1, 1), (6, 2, 8, 24), (4, 4, 5, 33)):
        for counts, units in mixes:
            tokens, context = sum(counts), _context(counts, units)
            x, dt = randn(tokens, heads, dim, dtype=dtype), randn(tokens, heads, dtype=dtype)
            into, out = (randn(tokens, groups, width, dtype=dtype, scale=width**-size) for size in (0.0, 0.5))
            scan = ScanWeights(_heads(heads), _heads(heads), _heads(heads))
            state = _state("state_space", (heads, dim, width), torch.float32, mixes)
            what = f"{heads} heads of {dim}, {width} numbers, {counts} tokens"
            yield what, (ScanInputs(x, dt, into, out), scan, state, context, 0.1)
            yield (
                f"{what}, a fixed decay",
                (ScanInputs(x, None, into, out), ScanWeights(_heads(heads)), state, context, 0.0),
            )


def selective_scan(dtype: torch.dtype) -> Iterator[Case]:
    for channels, width in ((1, 1), (70, 16), (33, 5)):
        for counts, units in MIXES:
            tokens = sum(counts)
            into, out = (randn(tokens, 1, width, dtype=dtype, scale=width**-size) for size in (0.0, 0.5))
            moves = ScanInputs(randn(tokens, channels, 1, dtype=dtype), randn(tokens, channels, dtype=dtype), into, out)
            scan = ScanWeights(_heads(channels, width), _heads(channels), _heads(channels))
            state = randn(UNITS, channels, width, dtype=torch.float32)
            yield (
                f"{channels} channels, {width} numbers, {counts} tokens",
                (moves, scan, state, _context(counts, units)),
            )


def delta_rule(dtype: torch.dtype, mixes: Mixes = MIXES) -> Iterator[Case]:
    for heads, groups, values, width, beta_scale in ((1, 1, 1, 2, 1.0), (6, 3, 12, 24, 1.0), (2, 2, 7, 33, 2.0)):
        for counts, units in mixes:
            tokens = sum(counts)
            q, k = (randn(tokens, groups, width, dtype=dtype, scale=size) for size in (1.0, 2.0))
            rates = [randn(tokens, heads, dtype=dtype, scale=size) for size in (1.0, 2.0)]
            turns = DeltaRuleInputs(q, k, randn(tokens, heads, values, dtype=dtype), *rates)
            state = _state("delta_rule", (heads, values, width), torch.float32, mixes)
            what = f"{heads} heads of {values} by {width}, {counts} tokens"
            scan = ScanWeights(_heads(heads), _heads(heads))
            yield what, (turns, scan, state, _context(counts, units), beta_scale)


def kimi_delta_rule(dtype: torch.dtype) -> Iterator[Case]:
    for heads, values, width, lower_bound in ((1, 1, 2, 0.0), (3, 12, 24, 0.0), (2, 7, 33, -5.0)):
        for counts, units in MIXES:
            tokens = sum(counts)
            q, k, forget = (randn(tokens, heads, width, dtype=dtype, scale=size) for size in (1.0, 2.0, 1.0))
            v, learn = randn(tokens, heads, values, dtype=dtype), randn(tokens, heads, dtype=dtype, scale=2.0)
            turns, scan = DeltaRuleInputs(q, k, v, forget, learn), ScanWeights(_heads(heads), _heads(heads, width))
            state = randn(UNITS, heads, values, width, dtype=torch.float32)
            what = f"{heads} heads of {values} by {width}, {counts} tokens, lower bound {lower_bound}"
            yield what, (turns, scan, state, _context(counts, units), lower_bound)


def gated_norm(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, pieces, width in ((1, 1, 3), (5, 2, 48), (33, 3, 70)):
        x = randn(tokens, pieces * width, dtype=torch.float32)
        gate = randn(tokens, pieces * width, dtype=dtype, scale=2.0)
        for weights in (1, pieces):
            weight = randn(weights * width, dtype=dtype)
            for after in (False, True):
                yield f"{tokens}x{pieces}x{width}, {weights} weights, {after}", (x, gate, weight, 1e-5, width, after)
        yield f"{tokens}x{pieces}x{width} without a norm", (x, gate, None, 0.0, width, True)


def sigmoid_gate(dtype: torch.dtype) -> Iterator[Case]:
    for rows, width in ((1, 2), (5, 77), (65, 130)):
        yield f"{rows}x{width}", (randn(rows, width, dtype=dtype), randn(rows, width, dtype=dtype, scale=4.0))


def _wkv7_inputs(
    tokens: int, heads: int, values: int, width: int, dtype: torch.dtype
) -> tuple[WKV7Inputs, WKV7Weights]:
    r, w, k, a = (randn(tokens, heads, width, dtype=dtype) for _ in range(4))
    moves = WKV7Inputs(r, w, k, randn(tokens, heads, values, dtype=dtype), a)
    return moves, WKV7Weights(_heads(heads, width), _heads(heads, width))


def wkv7(dtype: torch.dtype) -> Iterator[Case]:
    for heads, values, width in ((1, 1, 2), (3, 16, 16), (2, 7, 33)):
        for counts, units in MIXES:
            state = randn(UNITS, heads, values, width, dtype=torch.float32)
            moves, rule = _wkv7_inputs(sum(counts), heads, values, width, dtype)
            yield (
                f"{heads} heads of {values} by {width}, {counts} tokens",
                (moves, rule, state, _context(counts, units)),
            )


def wkv7_out(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, heads, values, width in ((1, 1, 2, 3), (5, 3, 16, 16), (33, 2, 7, 33)):
        moves, rule = _wkv7_inputs(tokens, heads, values, width, dtype)
        finish = WKV7OutputWeights(_heads(heads, width), _heads(heads, values), _heads(heads, values))
        o, gate = randn(tokens, heads, values, dtype=torch.float32), randn(tokens, heads * values, dtype=dtype)
        yield f"{tokens} tokens, {heads} heads of {values} by {width}", (o, moves, rule, finish, gate, 6.4e-4)


def squash(dtype: torch.dtype) -> Iterator[Case]:
    for rows, width in ((1, 2), (5, 77), (65, 130)):
        for kind in ("sigmoid", "tanh"):
            yield f"{kind}, {rows}x{width}", (randn(rows, width, dtype=dtype, scale=4.0), kind)
    yield "tanh of numbers whose exponentials overflow", (randn(5, 77, dtype=dtype, scale=100.0), "tanh")


def between(dtype: torch.dtype) -> Iterator[Case]:
    for rows, width, factors in ((1, 2, 6), (5, 77, 1), (65, 130, 3)):
        x, y = randn(rows, width, dtype=dtype), randn(rows, width, dtype=dtype)
        yield f"{factors} of {rows}x{width}", (x, y, randn(factors, width, dtype=dtype))


def blend(dtype: torch.dtype) -> Iterator[Case]:
    for rows, width in ((1, 2), (5, 77), (65, 130)):
        x, y, logits = (randn(rows, width, dtype=dtype, scale=size) for size in (1.0, 2.0, 4.0))
        yield f"{rows}x{width}", (x, y, logits)


# of the same: one that a platform without states has no use for
STATES: dict[str, Cases] = {
    "delta_rule": delta_rule,
    "kimi_delta_rule": kimi_delta_rule,
    "selective_scan": selective_scan,
    "short_conv": short_conv,
    "state_space": state_space,
    "wkv7": wkv7,
}
DRAFTS: dict[str, Callable[[torch.dtype, Mixes], Iterator[Case]]] = {  # of those that keep drafts apart
    "delta_rule": delta_rule,
    "short_conv": short_conv,
    "state_space": state_space,
}
STATE_HELPERS: dict[str, Cases] = {
    "between": between,
    "blend": blend,
    "gated_norm": gated_norm,
    "sigmoid_gate": sigmoid_gate,
    "squash": squash,
    "wkv7_out": wkv7_out,
}
