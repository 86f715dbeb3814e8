"""Ops that keep one state per request (SSM, delta rule, short convolution), by Triton. Not verified on a GPU yet."""

import torch
from torch import Tensor

from quintet.interface.types import Batch, Group, StepContext
from quintet.ops.states import (
    ConvWeights,
    DeltaRuleInputs,
    ScanInputs,
    ScanWeights,
    delta_rule,
    selective_scan,
    short_conv,
    state_space,
)
from quintet.platforms.gpu.ops.probe import probing


def _two(device: torch.device) -> StepContext:
    """Two tokens of one request; its state is read from unit 1 and written to unit 2."""
    ints = [torch.tensor(each, dtype=torch.int32, device=device) for each in ([0, 0], [0, 2], [[1, 2]], [2])]
    none, starts, table, lengths = ints
    return StepContext(Batch(none, none, none, starts, none), Group(none, table, lengths))


def _check_conv(device: torch.device) -> str | None:
    """Checks each token's double plus the token before it."""
    x, state = torch.tensor([[3.0], [5.0]], device=device), torch.tensor([[[9.0]], [[1.0]], [[7.0]]], device=device)
    conv = ConvWeights(torch.tensor([[1.0, 2.0]], device=device))
    out, after = _short_conv(x, None, conv, state, _two(device), False)
    got = [*out.flatten().tolist(), *after.flatten().tolist()]
    return None if got == [7.0, 13.0, 9.0, 1.0, 5.0] else f"of 1, 3 and 5, each doubled and the one before, came {got}"


def _check_spaces(device: torch.device) -> str | None:
    """Sums of two tokens, where nothing is forgotten."""
    one = torch.ones(2, 1, 1, device=device)
    state = torch.tensor([9.0, 1.0, 7.0], device=device).reshape(3, 1, 1, 1)
    lasting = ScanWeights(torch.full((1,), -torch.inf, device=device))
    out, after = _state_space(ScanInputs(2 * one, None, one, one), lasting, state, _two(device), 0.0)
    got = [*out.flatten().tolist(), *after.flatten().tolist()]
    return None if got == [3.0, 5.0, 9.0, 1.0, 5.0] else f"1 + 2 + 2 came out as {got}"


def _check_scan(device: torch.device) -> str | None:
    """The same, with a time step of 30, which is its own softplus."""
    one, lasting = torch.ones(2, 1, 1, device=device), torch.full((1, 1), -torch.inf, device=device)
    state = torch.tensor([9.0, 1.0, 7.0], device=device).reshape(3, 1, 1)
    moves, scan = ScanInputs(one, 30 * one[:, :, 0], one, one), ScanWeights(lasting, torch.zeros(1, device=device))
    out, after = _selective_scan(moves, scan, state, _two(device))
    got = [*out.flatten().tolist(), *after.flatten().tolist()]
    return None if got == [31.0, 61.0, 9.0, 1.0, 61.0] else f"1 + 30 + 30 came out as {got}"


def _check_rule(device: torch.device) -> str | None:
    """Checks that a query returns the value that was stored for its key."""
    one, none = torch.ones(2, 1, 1, device=device), torch.zeros(1, device=device)
    state = torch.tensor([9.0, 1.0, 7.0], device=device).reshape(3, 1, 1, 1)
    turns = DeltaRuleInputs(one, one, 4 * one, one[:, :, 0], 40 * one[:, :, 0])
    out, after = _delta_rule(turns, ScanWeights(none, none), state, _two(device), 1.0)
    got, want = torch.cat([out.flatten(), after.flatten()]), torch.tensor([4.0, 4.0, 9.0, 1.0, 4.0], device=device)
    return None if torch.allclose(got, want, atol=1e-4) else f"4, learnt and asked for, came out as {got.tolist()}"


@short_conv.provide("triton", probing(_check_conv))
def _short_conv(
    x: Tensor, gates: Tensor | None, conv: ConvWeights, state: Tensor, context: StepContext, silu: bool
) -> tuple[Tensor, Tensor]:
    from quintet.platforms.gpu.kernels.states import convolve

    _check_state(state, conv.weight.shape[0], conv.weight.shape[1] - 1, like=x)
    conv = ConvWeights(conv.weight.contiguous(), conv.bias)
    return convolve(_rows(x), None if gates is None else _rows(gates), conv, state, context, silu), state


@state_space.provide("triton", probing(_check_spaces))
def _state_space(
    moves: ScanInputs, scan: ScanWeights, state: Tensor, context: StepContext, least: float
) -> tuple[Tensor, Tensor]:
    from quintet.platforms.gpu.kernels.states import spaces

    _check_state(state, *moves.x.shape[1:], moves.b.shape[2])
    return spaces(_moves(moves), scan, state, context, least), state


@selective_scan.provide("triton", probing(_check_scan))
def _selective_scan(moves: ScanInputs, scan: ScanWeights, state: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
    from quintet.platforms.gpu.kernels.states import scanned

    _check_state(state, moves.x.shape[1], moves.b.shape[2])
    return scanned(_moves(moves), scan, state, context), state


@delta_rule.provide("triton", probing(_check_rule))
def _delta_rule(
    turns: DeltaRuleInputs, scan: ScanWeights, state: Tensor, context: StepContext, beta_scale: float
) -> tuple[Tensor, Tensor]:
    from quintet.platforms.gpu.kernels.states import turned

    _check_state(state, *turns.v.shape[1:], turns.q.shape[2])
    return turned(DeltaRuleInputs(*map(_dense, turns)), scan, state, context, beta_scale), state


def _check_state(state: Tensor, *shape: int, like: Tensor | None = None) -> None:
    dtype = torch.float32 if like is None else like.dtype
    if state.shape[1:] != shape or state.dtype != dtype or not state.is_contiguous():
        raise ValueError(f"a state {tuple(state.shape)} {state.dtype}; {shape} of {dtype} is wanted for each unit")


def _moves(moves: ScanInputs) -> ScanInputs:
    x, dt, into, out = moves
    return ScanInputs(_dense(x), None if dt is None else _rows(dt), _dense(into), _dense(out))


def _dense(x: Tensor) -> Tensor:
    """Returns x with contiguous tokens; x itself if they are contiguous."""
    wide = x.dim() < 3 or x.stride(1) == x.shape[2] or x.shape[1] == 1
    return _rows(x) if wide else x.contiguous()


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
