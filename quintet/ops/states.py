"""Specifications of what carries one state per request from token to token, and the mixer that is made of them.

Every state is kept in float32, or exactly as it came in, and advances token by token in one order: where a prompt is
cut, and what else is in the batch, changes no bit. Only exp, log1p and plain arithmetic are used: torch rounds those
alike wherever a number stands in a tensor.

An op reads each request's state where the group's table says, and writes it where that says; rows without tokens, and
padding, write to unit 0, which is never read. May write in place; use what it returns.

Where StateSpec.max_drafts is not 0, a step writes the state before its draft tokens, and keeps beside it what each of
them does to it. The next step first does that of the accepted ones: no model computes those again. A unit of
short_conv() then holds max_drafts more tokens. One of state_space() or delta_rule() is flat: the state [H, P, N], and
[max_drafts, H, 1 + P + N] float32: decay, given and key of the update state = decay state + given key'.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quintet.interface.platform import Mixer, State
from quintet.interface.types import AttentionSpec, HostBatch, HostGroup, IntArray, Layout, StateSpec, StepContext
from quintet.ops import attention
from quintet.ops.distance_attention import DistanceAttention
from quintet.ops.registry import Op, Ops

Given = tuple[Any, ...]  # what an op takes, in its order
# what a step function of _scan_tokens() returns: [R, ...] outputs, states, and what the token does to a state
Advanced = tuple[Tensor, Tensor, Tensor]

DRAFT_OPS = frozenset({"delta_rule", "short_conv", "state_space"})  # those that keep what drafts do
MAX_DRAFTS = 16  # of a request in a step, for these


def unit_shape(spec: StateSpec) -> tuple[int, ...]:
    """Returns the shape of one request's unit."""
    if not spec.max_drafts:
        return spec.shape
    assert spec.op in DRAFT_OPS and spec.max_drafts <= MAX_DRAFTS, "platforms are asked for no others"
    if spec.op == "short_conv":
        channels, past = spec.shape
        return channels, past + spec.max_drafts
    heads, rows, width = spec.shape
    return (heads * (rows * width + spec.max_drafts * (1 + rows + width)),)


def room_for_drafts(state: Tensor, heads: int, rows: int, width: int) -> int:
    """Returns the drafts that units of a state space, or of a delta rule, have room for."""
    if state.dim() != 2:  # [units, numbers]: flat
        return 0
    return (state.shape[1] - heads * rows * width) // (heads * (1 + rows + width))


class ConvWeights(NamedTuple):
    """Weights of a short convolution: each channel's, the oldest token's first."""

    weight: Tensor  # [C, K]
    bias: Tensor | None = None  # [C]


@Op
def short_conv(
    x: Tensor, gates: Tensor | None, conv: ConvWeights, state: Tensor, context: StepContext, silu: bool
) -> tuple[Tensor, Tensor]:
    """x [T, C], each channel convolved with its own weights over its request's last K tokens -> [T, C].

    state [units, C, K - 1 + drafts], in the type of x: the tokens before, the oldest first. Sums in float32, from the
    oldest token on, then the bias, then silu where it is asked for, rounded once. With gates [T, 2 C] (LFM2, Liquid AI
    2025) x is first multiplied by the first C of them, and what comes out by the others, each rounded.
    """
    kept, taps = _read_states(state, context), conv.weight.float()
    past, bias = conv.weight.shape[1] - 1, None if conv.bias is None else conv.bias.float()
    x = x if gates is None else x * gates[:, : x.shape[1]]
    drafts = state.shape[2] - past
    if drafts:
        window = context.group.block_table[:, 2, None, None] + torch.arange(past, device=x.device)
        kept = kept.gather(2, window.long().expand(-1, x.shape[1], -1))

    def step(at: Tensor, before: Tensor) -> Advanced:
        given = torch.index_select(x, 0, at)
        seen = torch.cat([before, given[:, :, None]], dim=2)
        out = seen[:, :, 0].float() * taps[:, 0]
        for k in range(1, taps.shape[1]):
            out = out + seen[:, :, k].float() * taps[:, k]
        out = out if bias is None else out + bias
        return (_silu(out) if silu else out).to(x.dtype), seen[:, :, 1:], given

    out, kept, updates = _scan_tokens(step, kept, context, drafts)
    kept = torch.cat([kept, *(update[:, :, None] for update in updates)], 2)
    return out if gates is None else out * gates[:, x.shape[1] :], _write_states(state, kept, context)


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


class ScanWeights(NamedTuple):
    """The weights of a state space: how fast each head forgets, and what goes past it."""

    a_log: Tensor  # [H] float32; a head keeps exp(-exp(a_log) * dt) of its state
    dt_bias: Tensor | None = None  # [H] float32, added to dt before softplus; None: dt is 1
    skip: Tensor | None = None  # [H] float32; a head's x, times this, is added to what it gives (D)


class ScanInputs(NamedTuple):
    """Inputs of a state space in a step."""

    x: Tensor  # [T, H, P]
    dt: Tensor | None  # [T, H]; None: 1
    b: Tensor  # B [T, G, N], each for H / G heads in a row
    c: Tensor  # C, alike


@Op
def state_space(
    moves: ScanInputs, scan: ScanWeights, state: Tensor, context: StepContext, least: float
) -> tuple[Tensor, Tensor]:
    """The selective state space of Mamba 2 (Dao and Gu 2024) -> y [T, H, P] float32.

    Per head h = exp(-exp(a_log) dt) h + (dt x) B', y = h C + skip x, where dt is softplus(dt + bias), `least` at least.
    Without a dt it is 1, and a_log the logarithm of a fixed decay's (lightning attention). state [units, H, P, N]
    float32, or flat units with drafts.
    """
    x, dt, into, out = moves
    heads, groups = x.shape[1], into.shape[1]
    steps = torch.ones_like(x[:, :, 0], dtype=torch.float32)
    if dt is not None:
        assert scan.dt_bias is not None, "a dt comes with a bias"
        steps = _softplus(dt.float() + scan.dt_bias).clamp(min=least)
    decay = torch.exp(-torch.exp(scan.a_log) * steps)  # [T, H]
    wide, keys, queries = x.float() * steps[:, :, None], into.float(), out.float()

    def step(at: Tensor, before: Tensor) -> Advanced:
        kept, given, key, query = (torch.index_select(each, 0, at) for each in (decay, wide, keys, queries))
        key, query = (each.repeat_interleave(heads // groups, 1) for each in (key, query))
        after = before * kept[:, :, None, None] + given[:, :, :, None] * key[:, :, None, :]
        return (after * query[:, :, None, :]).sum(-1), after, torch.cat([kept[:, :, None], given, key], 2)

    made, state = _scan_updates(step, state, context, (heads, x.shape[2], into.shape[2]))
    return made if scan.skip is None else made + x.float() * scan.skip[:, None], state


@Op
def selective_scan(moves: ScanInputs, scan: ScanWeights, state: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
    """The selective scan of Mamba (Gu and Dao 2023) -> y [T, C, 1] float32: a state space in which each head is a
    channel of one number, with a decay for each number of a state: a_log [C, N]. state [units, C, N] float32."""
    x, dt, into, out = moves
    assert dt is not None and scan.dt_bias is not None, "a scan is selective by its dt"
    steps, rates = _softplus(dt.float() + scan.dt_bias), torch.exp(scan.a_log)  # [T, C], [C, N]
    wide, keys, queries = x[:, :, 0].float() * steps, into[:, 0].float(), out[:, 0].float()

    def step(at: Tensor, before: Tensor) -> Advanced:
        length, given, key, query = (torch.index_select(each, 0, at) for each in (steps, wide, keys, queries))
        after = before * torch.exp(-rates * length[:, :, None]) + given[:, :, None] * key[:, None]
        return (after * query[:, None]).sum(-1), after, after

    made, kept, _ = _scan_tokens(step, _read_states(state, context), context)
    made = made if scan.skip is None else made + x[:, :, 0].float() * scan.skip
    return made[:, :, None], _write_states(state, kept, context)


class DeltaRuleInputs(NamedTuple):
    """Inputs of a delta rule in a step."""

    q: Tensor  # [T, G, D], each for H / G heads in a row
    k: Tensor  # alike
    v: Tensor  # [T, H, V]
    decay: Tensor  # [T, H]; [T, H, D] of kimi_delta_rule()
    beta: Tensor  # [T, H]


@Op
def delta_rule(
    turns: DeltaRuleInputs, scan: ScanWeights, state: Tensor, context: StepContext, beta_scale: float
) -> tuple[Tensor, Tensor]:
    """The gated delta rule (Yang, Kautz and Hatamizadeh 2025) -> o [T, H, V] float32.

    Per head, with q and k of length 1 (q divided by sqrt(D) besides): S = exp(-exp(a_log) softplus(forget + bias)) S,
    S = S + beta_scale sigmoid(learn) (v - S k) k', o = S q. state [units, H, V, D] float32, or flat units with drafts.
    """
    assert scan.dt_bias is not None, "it forgets by a bias"
    decay = torch.exp(-torch.exp(scan.a_log) * _softplus(turns.decay.float() + scan.dt_bias))  # [T, H]
    return _update_by_delta(turns, decay[:, :, None], state, context, beta_scale)


@Op
def kimi_delta_rule(
    turns: DeltaRuleInputs, scan: ScanWeights, state: Tensor, context: StepContext, lower_bound: float
) -> tuple[Tensor, Tensor]:
    """Kimi Delta Attention (Kimi Team 2025, section 3) -> o [T, H, V] float32.

    delta_rule() in which each number of a key has a decay of its own: S = S diag(exp(g)) with g = -exp(a_log)
    softplus(forget + bias), or with a lower_bound below 0 lower_bound sigmoid(exp(a_log) (forget + bias)); turns.decay
    [T, H, D] and scan.dt_bias [H, D]. state [units, H, V, D] float32.
    """
    assert scan.dt_bias is not None, "it forgets by a bias"
    rate, gate = torch.exp(scan.a_log)[:, None], turns.decay.float() + scan.dt_bias
    logs = lower_bound * _sigmoid(rate * gate) if lower_bound else -rate * _softplus(gate)
    return _update_by_delta(turns, torch.exp(logs), state, context)


def _update_by_delta(
    turns: DeltaRuleInputs, decay: Tensor, state: Tensor, context: StepContext, beta_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The delta rule with decays [T, H, 1], or [T, H, D] of units without drafts."""
    q, k, v, _, learn = turns
    each = v.shape[1] // q.shape[1]
    rate, values = beta_scale * _sigmoid(learn.float()), v.float()
    queries, keys = (_unit(x.float()).repeat_interleave(each, 1) for x in (q, k))
    queries = queries * q.shape[2] ** -0.5

    def step(at: Tensor, before: Tensor) -> Advanced:
        given = (torch.index_select(x, 0, at) for x in (decay, rate, values, keys, queries))
        kept, learned, value, key, query = given
        faded, wide, query = before * kept[:, :, None], key[:, :, None, :], query[:, :, None, :]
        missing = (value - (faded * wide).sum(-1)) * learned[:, :, None]
        after = faded + missing[:, :, :, None] * wide
        return (after * query).sum(-1), after, torch.cat([kept, missing, key], 2)

    return _scan_updates(step, state, context, (v.shape[1], v.shape[2], q.shape[2]))


class WKV7Inputs(NamedTuple):
    """Inputs of RWKV-7's rule in a step."""

    r: Tensor  # [T, H, D]; reads the state
    w: Tensor  # alike; the more, the more of a key's column is forgotten
    k: Tensor  # alike
    v: Tensor  # [T, H, V]
    a: Tensor  # [T, H, D]; the more, the more of what the key gave before is taken back


class WKV7Weights(NamedTuple):
    """The weights of RWKV-7's rule, float32 [H, D] each."""

    k_k: Tensor  # of a key where it takes back
    k_a: Tensor  # how far `a` holds for a key where it gives


DECAY = math.exp(-0.5)  # the most that a column's logarithm loses in a step


@Op
def wkv7(moves: WKV7Inputs, rule: WKV7Weights, state: Tensor, context: StepContext) -> tuple[Tensor, Tensor]:
    """RWKV-7's generalised delta rule (Peng et al. 2025, section 4) -> o [T, H, V] float32.

    Per head, with a = sigmoid(a), u = k k_k of length 1 and given(): S = S diag(exp(-sigmoid(w) / sqrt(e)))
    - (S u) (a u)' + v given', o = S r. The product S u is of the state before the step. state [units, H, V, D] float32.
    """
    decay, rate = torch.exp(-DECAY * _sigmoid(moves.w.float())), _sigmoid(moves.a.float())
    taken, keys = _unit(moves.k.float() * rule.k_k), wkv7_keys(moves.k, moves.a, rule)
    reads, values = moves.r.float(), moves.v.float()

    def step(at: Tensor, before: Tensor) -> Advanced:
        taking = (torch.index_select(x, 0, at) for x in (decay, rate, taken, keys, values, reads))
        kept, learned, key, gives, value, read = taking
        back = (before * key[:, :, None]).sum(-1)
        after = before * kept[:, :, None] - back[:, :, :, None] * (key * learned)[:, :, None]
        after = after + value[:, :, :, None] * gives[:, :, None]
        return (after * read[:, :, None]).sum(-1), after, after

    made, kept, _ = _scan_tokens(step, _read_states(state, context), context)
    return made, _write_states(state, kept, context)


def wkv7_keys(k: Tensor, a: Tensor, rule: WKV7Weights) -> Tensor:
    """The keys by which values are added, float32: k (1 + (sigmoid(a) - 1) k_a)."""
    return k.float() * (1 + (_sigmoid(a.float()) - 1) * rule.k_a)


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


class WKV7OutputWeights(NamedTuple):
    """The weights of what comes after RWKV-7's rule, float32."""

    r_k: Tensor  # [H, D]; of a token's own value
    weight: Tensor  # [H, V] of each head's norm
    bias: Tensor  # alike


@Op
def wkv7_out(
    o: Tensor, moves: WKV7Inputs, rule: WKV7Weights, finish: WKV7OutputWeights, gate: Tensor, eps: float
) -> Tensor:
    """o [T, H, V] of wkv7(), each head normalised (mean and variance), with a token's own value beside it, times gate
    -> [T, H V] in gate's type, rounded once. A value counts as often as r, given() and r_k multiplied add up to."""
    centred = o - o.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + eps)
    own = (moves.r.float() * wkv7_keys(moves.k, moves.a, rule) * finish.r_k).sum(-1, keepdim=True)
    y = normed * finish.weight + finish.bias + own * moves.v.float()
    return (y.flatten(1) * gate.float()).to(gate.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _softplus(x: Tensor) -> Tensor:
    return torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))


def max_query_len(context: StepContext) -> int:
    """The most tokens of a request in the step: as planned, or looked up."""
    if context.group.plan:
        return context.group.plan[0].shape[1]
    return int((context.batch.query_start_loc[1:] - context.batch.query_start_loc[:-1]).max())


def _read_states(state: Tensor, context: StepContext) -> Tensor:
    """Each request's state [R, *shape], zeros where it begins."""
    units = context.group.block_table[:, 0]
    begins = (units == 0).reshape(-1, *[1] * (state.dim() - 1))
    return torch.where(begins, torch.zeros((), dtype=state.dtype, device=state.device), state[units])


def _write_states(state: Tensor, kept: Tensor, context: StepContext) -> Tensor:
    state[context.group.block_table[:, 1]] = kept.to(state.dtype)
    return state


def _scan_tokens(
    step: Callable[[Tensor, Tensor], Advanced], kept: Tensor, context: StepContext, drafts: int = 0
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """All requests token by token: step(token of each request [R], their states) -> (what it gives [R, ...], states,
    updates). -> what it gives for each token of the step [T, ...], the states after each request's last token that is
    no draft, and the updates of so many drafts of each [R, ...]."""
    batch, outs, updates = context.batch, [], []
    starts, tokens = batch.query_start_loc, batch.token_ids.shape[0]
    ends = starts[1:] - context.group.block_table[:, 3] if drafts else starts[1:]
    state = kept
    for place in range(max_query_len(context)):
        at = starts[:-1] + place
        out, state, update = step(at.clamp(max=tokens - 1), state)
        kept = torch.where((at < ends).reshape(-1, *[1] * (kept.dim() - 1)), state, kept)
        outs.append(out)
        if drafts:
            updates.append(update)
    first = torch.index_select(starts, 0, batch.token_to_seq)
    places = (torch.arange(tokens, device=starts.device) - first).clamp(max=len(outs) - 1)  # padding stands past it
    found = []
    for index in range(drafts):
        at = (ends - starts[:-1] + index).clamp(max=len(outs) - 1)
        found.append(torch.stack(updates)[at, torch.arange(len(at), device=at.device)])
    return torch.stack(outs)[places, batch.token_to_seq], kept, found


def _scan_updates(
    step: Callable[[Tensor, Tensor], Advanced], state: Tensor, context: StepContext, shape: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """_scan_tokens() of states [R, H, P, N] that are updated by decay, given and key -> what it gives, and the units
    with the states after it."""
    kept, drafts, size = _read_states(state, context), room_for_drafts(state, *shape), math.prod(shape)
    if not drafts:
        made, kept, _ = _scan_tokens(step, kept, context)
        return made, _write_states(state, kept, context)
    heads, rows, width = shape
    accepted = context.group.block_table[:, 2]
    updates = kept[:, size:].reshape(-1, drafts, heads, 1 + rows + width)
    before = kept[:, :size].reshape(-1, *shape)
    for index in range(drafts):
        decay, given, key = updates[:, index].split([1, rows, width], 2)
        after = before * decay[:, :, :, None] + given[:, :, :, None] * key[:, :, None, :]
        before = torch.where((index < accepted)[:, None, None, None], after, before)
    made, kept, found = _scan_tokens(step, before, context, drafts)
    flat = torch.cat([each.flatten(1) for each in (kept, *found)], 1)
    return made, _write_states(state, flat, context)


class StateMixer(Mixer):
    """The spec's op on its one tensor [units, *unit_shape(spec)]."""

    def __init__(self, spec: StateSpec, ops: Ops) -> None:
        self.layouts = (Layout(spec.dtype, unit_shape(spec), unit="request"),)
        self._advance = getattr(ops.take(spec.op), spec.op)

    def plan(self, batch: HostBatch, group: HostGroup) -> tuple[IntArray, ...]:
        """One empty array; its second size is the most tokens of a request."""
        most = int(np.diff(batch.query_start_loc).max(initial=1))
        return (np.zeros((0, max(1, most)), np.int32),)

    def __call__(  # type: ignore[override]  # what it is called with is the op's
        self, given: Given, settings: tuple[Any, ...], state: State, context: StepContext
    ) -> tuple[Tensor, State]:
        """given and settings: what the op takes before the state, and after the books -> (its result, the state)."""
        out, after = self._advance(*given, state[0], context, *settings)
        return out, (after,)


def mixer(spec: AttentionSpec | StateSpec, ops: Ops, also: Sequence[torch.dtype] = ()) -> Mixer:
    """Returns the mixer that is made of the bound ops: attention over pages or over a step alone, or a state per
    request. `also` as PagedAttention has it."""
    if isinstance(spec, AttentionSpec) and spec.distances:
        return DistanceAttention(spec, ops, also)
    return StateMixer(spec, ops) if isinstance(spec, StateSpec) else attention.mixer(spec, ops, also)
