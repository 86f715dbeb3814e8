"""States by quintet._cpu: requests and heads side by side, each token by token, in one order wherever it is cut."""

from typing import NamedTuple

import torch
from torch import Tensor

from quintet.interface.types import Batch, Group, StepContext
from quintet.ops.elementwise import sigmoid_gate
from quintet.ops.norm import gated_norm
from quintet.ops.states import (
    MAX_DRAFTS,
    ConvWeights,
    DeltaRuleInputs,
    ScanInputs,
    ScanWeights,
    delta_rule,
    kimi_delta_rule,
    room_for_drafts,
    selective_scan,
    short_conv,
    state_space,
)
from quintet.platforms.cpu.arena import empty
from quintet.platforms.cpu.ops.extension import extension, indices, kind_of, missing

Rows = tuple[int, int, int, int, int, int]  # starts, table, requests, columns, units, drafts
MAX_TAPS, MAX_WIDTH = 8, 256  # csrc/cpu/kernels/states.h


def probe() -> str | None:
    """One token that begins: a convolution gives it times its last weight, and keeps it."""
    if reason := missing("selective_scan"):
        return reason
    none, one = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    group = Group(none, torch.tensor([[0, 1]], dtype=torch.int32), one)
    context = StepContext(Batch(none, none, none, torch.cat([none, one]), none, (group,)), group)
    x, weight = torch.tensor([[3.0, 5.0]]), torch.tensor([[7.0, 2.0], [7.0, 4.0]])
    out, state = _short_conv(x, None, ConvWeights(weight), torch.zeros(2, 2, 1), context, False)
    good = torch.equal(out, torch.tensor([[6.0, 20.0]])) and torch.equal(state[1], x.T)
    return None if good else f"a convolution of {x.tolist()} gave {out.tolist()} and kept {state.tolist()}"


@short_conv.provide("native", probe)
def _short_conv(
    x: Tensor, gates: Tensor | None, conv: ConvWeights, state: Tensor, context: StepContext, silu: bool
) -> tuple[Tensor, Tensor]:
    tokens, channels = x.shape
    taps = conv.weight.shape[1]
    if not 2 <= taps <= MAX_TAPS:
        return short_conv.reference(x, gates, conv, state, context, silu)
    drafts = state.shape[2] - taps + 1
    fits = state.shape[1] == conv.weight.shape[0] == channels and 0 <= drafts <= MAX_DRAFTS
    if not fits or state.dtype != x.dtype:
        raise ValueError(f"x {tuple(x.shape)} and a state {tuple(state.shape)} {state.dtype} do not fit {taps} taps")
    if gates is not None and (gates.shape != (tokens, 2 * channels) or gates.dtype != x.dtype):
        raise ValueError(f"gates {tuple(gates.shape)} {gates.dtype} do not fit x {tuple(x.shape)} {x.dtype}")
    x, gates = _tokens(x), None if gates is None else _tokens(gates)
    weight, bias = _whole(conv.weight, x.dtype), None if conv.bias is None else _whole(conv.bias, x.dtype)
    out = empty((tokens, channels), x.dtype)
    extension().short_conv(
        kind_of(x.dtype), out.data_ptr(), x.data_ptr(), _at(gates), weight.data_ptr(), _at(bias), _kept(state),
        x.stride(0), 0 if gates is None else gates.stride(0), channels, taps, silu, _rows(state, context, drafts),
    )  # fmt: skip
    return out, state


@state_space.provide("native", probe)
def _state_space(
    moves: ScanInputs, scan: ScanWeights, state: Tensor, context: StepContext, least: float
) -> tuple[Tensor, Tensor]:
    tokens, heads, dim = moves.x.shape
    groups, width = moves.b.shape[1:]
    drafts = room_for_drafts(state, heads, dim, width)
    if not _fits(state, (heads, dim, width), drafts):
        raise ValueError(f"x {tuple(moves.x.shape)} does not fit a state {tuple(state.shape)} of {state.dtype}")
    if moves.dt is not None and scan.dt_bias is None:
        raise ValueError("a dt comes with a bias, and this scan has none")
    _check_alike(moves)
    x, into, out_of = (_tokens(each.flatten(1)) for each in (moves.x, moves.b, moves.c))
    dt = None if moves.dt is None else _tokens(moves.dt)
    sides = empty((2, tokens, groups, width), torch.float32)
    out, steps = empty((tokens, heads, dim), torch.float32), empty((2, tokens, heads), torch.float32)
    extension().state_space(
        kind_of(x.dtype), out.data_ptr(), x.data_ptr(), _at(dt), into.data_ptr(), out_of.data_ptr(), _float(scan.a_log),
        0 if scan.dt_bias is None else _float(scan.dt_bias), 0 if scan.skip is None else _float(scan.skip),
        steps.data_ptr(), sides.data_ptr(), _kept(state),
        (x.stride(0), 0 if dt is None else dt.stride(0), into.stride(0), out_of.stride(0)),
        tokens, heads, groups, dim, width, state.stride(0), least, _rows(state, context, drafts),
    )  # fmt: skip
    return out, state


@selective_scan.provide("native", probe)
def _selective_scan(moves: ScanInputs, scan: ScanWeights, state: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
    tokens, channels, _ = moves.x.shape
    width = moves.b.shape[2]
    if width > MAX_WIDTH:
        return selective_scan.reference(moves, scan, state, context)
    if state.shape[1:] != (channels, width) or state.dtype != torch.float32 or scan.a_log.shape != (channels, width):
        raise ValueError(f"x {tuple(moves.x.shape)} does not fit a state {tuple(state.shape)} of {state.dtype}")
    if moves.dt is None or scan.dt_bias is None:
        raise ValueError("a scan is selective by its dt and the bias of it")
    _check_alike(moves)
    given = [_tokens(each.flatten(1)) for each in (moves.x, moves.dt, moves.b, moves.c)]
    out, sides = empty((tokens, channels, 1), torch.float32), empty((2, tokens, width), torch.float32)
    extension().selective_scan(
        kind_of(moves.x.dtype), out.data_ptr(), *[each.data_ptr() for each in given], _float(scan.a_log),
        _float(scan.dt_bias), 0 if scan.skip is None else _float(scan.skip), sides.data_ptr(), _kept(state),
        tuple(each.stride(0) for each in given), tokens, channels, width, _rows(state, context),
    )  # fmt: skip
    return out, state


@delta_rule.provide("native", probe)
def _delta_rule(
    turns: DeltaRuleInputs, scan: ScanWeights, state: Tensor, context: StepContext, beta_scale: float
) -> tuple[Tensor, Tensor]:
    _, heads, values = turns.v.shape
    drafts = room_for_drafts(state, heads, values, turns.q.shape[2])
    if drafts and turns.q.shape[2] > MAX_WIDTH:
        return delta_rule.reference(turns, scan, state, context, beta_scale)
    return _deltas(turns, scan, state, context, DeltaKind(drafts, beta_scale=beta_scale))


@kimi_delta_rule.provide("native", probe)
def _kimi_delta_rule(
    turns: DeltaRuleInputs, scan: ScanWeights, state: Tensor, context: StepContext, lower_bound: float
) -> tuple[Tensor, Tensor]:
    return _deltas(turns, scan, state, context, DeltaKind(by_channel=True, lower_bound=lower_bound))


class DeltaKind(NamedTuple):
    """A delta rule's variant."""

    drafts: int = 0  # that a unit has room for
    by_channel: bool = False  # each number of a key has a decay; else each head
    lower_bound: float = 0.0  # of the decays' logarithms, below 0; 0: there is none
    beta_scale: float = 1.0


def _deltas(
    turns: DeltaRuleInputs, scan: ScanWeights, state: Tensor, context: StepContext, kind: DeltaKind
) -> tuple[Tensor, Tensor]:
    tokens, groups, width = turns.q.shape
    heads, values = turns.v.shape[1:]
    decays = (heads, width) if kind.by_channel else (heads,)
    if turns.decay.shape[1:] != decays or scan.dt_bias is None or scan.dt_bias.shape != decays:
        raise ValueError(
            f"decays {tuple(turns.decay.shape)} and their bias do not fit {heads} heads of {width} numbers"
        )
    if not _fits(state, (heads, values, width), kind.drafts):
        raise ValueError(f"v {tuple(turns.v.shape)} does not fit a state {tuple(state.shape)} of {state.dtype}")
    _check_alike(turns)
    given = [_tokens(each.flatten(1)) for each in turns]
    out = empty((tokens, heads, values), torch.float32)
    steps = empty((tokens * heads * (1 + (width if kind.by_channel else 1)),), torch.float32)
    units = empty((2, tokens, groups, width), torch.float32)
    extension().delta_rule(
        kind_of(turns.q.dtype), out.data_ptr(), *[each.data_ptr() for each in given], _float(scan.a_log),
        _float(scan.dt_bias), steps.data_ptr(), units.data_ptr(), _kept(state),
        tuple(each.stride(0) for each in given), tokens, heads, groups, values, width, state.stride(0),
        kind.by_channel, kind.lower_bound, kind.beta_scale, _rows(state, context, kind.drafts),
    )  # fmt: skip
    return out, state


@gated_norm.provide("native", probe)
def _gated_norm(x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, width: int, after: bool) -> Tensor:
    tokens, features = x.shape
    if x.dtype != torch.float32 or gate.shape != x.shape or features % width:
        return gated_norm.reference(x, gate, weight, eps, width, after)
    x, gate = x.contiguous(), _tokens(gate)
    if weight is not None:
        weight = _whole(weight, gate.dtype)
    out = empty((tokens, features), gate.dtype)
    extension().gated_norm(
        kind_of(gate.dtype), out.data_ptr(), x.data_ptr(), gate.data_ptr(), _at(weight), gate.stride(0), tokens,
        features // width, width, 1 if weight is None else weight.numel() // width, eps, after,
    )  # fmt: skip
    return out


@sigmoid_gate.provide("native", probe)
def _sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    if x.dim() != 2 or gate.shape != x.shape or gate.dtype != x.dtype:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} and a gate {tuple(gate.shape)} {gate.dtype} do not match")
    x, gate = _tokens(x), _tokens(gate)
    out = empty(x.shape, x.dtype)
    extension().sigmoid_gate(
        kind_of(x.dtype), out.data_ptr(), x.data_ptr(), gate.data_ptr(), x.stride(0), gate.stride(0), *x.shape
    )
    return out


def _check_alike(given: ScanInputs | DeltaRuleInputs) -> None:
    """A kernel reads all by the first one's type and tokens."""
    first, *others = given
    for each in others:
        if each is not None and (each.dtype != first.dtype or len(each) != len(first)):
            raise ValueError(
                f"{tuple(each.shape)} {each.dtype} beside {tuple(first.shape)} {first.dtype}: what a step gives to a "
                "state is of one type, and of all its tokens"
            )


def _tokens(x: Tensor) -> Tensor:
    """[T, C] with each token's numbers side by side; tokens may stand apart, as in the slices of one product."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _whole(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dtype != dtype:
        raise ValueError(f"a weight of {x.dtype} does not fit numbers of {dtype}")
    return x if x.is_contiguous() else x.contiguous()


def _at(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _float(x: Tensor) -> int:
    if x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(f"a head's numbers are contiguous float32, not {x.dtype} with strides {x.stride()}")
    return x.data_ptr()


def _kept(state: Tensor) -> int:
    if not state.is_contiguous():
        raise ValueError(f"a state is contiguous, not of strides {state.stride()}")
    return state.data_ptr()


def _fits(state: Tensor, shape: tuple[int, int, int], drafts: int) -> bool:
    """True if units have this shape, or are flat with room for drafts."""
    heads, rows, width = shape
    flat = (heads * (rows * width + drafts * (1 + rows + width)),)
    sizes = state.shape[1:] == (flat if drafts else shape)
    return state.dtype == torch.float32 and 0 <= drafts <= MAX_DRAFTS and sizes


def _rows(state: Tensor, context: StepContext, drafts: int = 0) -> Rows:
    table, starts = context.group.block_table, context.batch.query_start_loc
    return indices(starts), indices(table), table.shape[0], table.shape[1], state.shape[0], drafts
