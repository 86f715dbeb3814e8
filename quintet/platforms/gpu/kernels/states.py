"""Kernels that keep one state per request (SSM, delta rule, short convolution). Not verified on a GPU yet.

A program keeps a block of one request's state in registers and goes through its tokens, in their order: a request's
results do not depend on the others in the step. A short convolution has a program per token instead, and one per
request for what is kept; it counts on a step that reads other units than it writes.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quintet.interface.types import StepContext
from quintet.ops.states import ConvWeights, DeltaRuleInputs, ScanInputs, ScanWeights
from quintet.platforms.gpu.kernels.variant import Variant

CHANNELS = 256  # of a short convolution that one program computes: 2 in each lane. Untuned
WARPS = 4
HELD = 4096  # numbers of a state in one program's registers: 32 in each lane of its warps. Untuned
LEARNT = HELD // 2  # of a delta rule, which needs registers for more beside: with twice as many it spills


class StateUnits(NamedTuple):
    """Tokens and state units of a step's requests, as kernels take them."""

    starts: Tensor  # [R + 1]
    table: Tensor  # [R, 2 or more]: unit to read, 0 for none, and to write
    row: int  # of the table


@triton.jit
def _softplus(x):
    """log(1 + exp(x)) to the last digits, where exp(x) is small too."""
    each = tl.exp(tl.minimum(x, 20.0))
    one = 1.0 + each
    log = tl.where(one == 1.0, each, tl.log(one) * (each / tl.where(one == 1.0, 1.0, one - 1.0)))
    return tl.where(x > 20.0, x, log)


@triton.jit
def _request(starts, table, row, request):
    """-> (its first token, the end of its tokens, unit to read, unit to write)."""
    at = table + request.to(tl.int64) * row
    unit, to = tl.load(at).to(tl.int64), tl.load(at + 1).to(tl.int64)
    return tl.load(starts + request), tl.load(starts + request + 1), unit, to


@triton.jit
def _before(x, gates, state, place, first, unit, at, there, x_row, gate_row, width, KEPT: tl.constexpr):
    """Channels `at` of the token at this place of the step, or of what was kept before the request's first."""
    if place >= first:
        row = place.to(tl.int64)
        found = tl.load(x + row * x_row + at, mask=there, other=0.0)
        if gates is not None:
            gate = tl.load(gates + row * gate_row + at, mask=there, other=0.0)
            found = (found.to(tl.float32) * gate.to(tl.float32)).to(found.dtype)
    else:
        kept = state + unit * width * KEPT + at.to(tl.int64) * KEPT + (place - first + KEPT)
        found = tl.load(kept, mask=there & (unit != 0), other=0.0)
    return found


@triton.jit(do_not_specialize=["tokens", "row"])
def short_conv(
    out, x, gates, weight, bias, state, owners, starts, table, row, tokens, width, x_row, gate_row,
    SILU: tl.constexpr, TAPS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The first `tokens` programs make a token's channels each; the others write what is kept of a request."""
    program, at = tl.program_id(0), tl.program_id(1) * B + tl.arange(0, B)
    there = at < width
    if program < tokens:
        first, _, unit, _ = _request(starts, table, row, tl.load(owners + program))
        total = tl.zeros((B,), tl.float32)
        for k in tl.static_range(TAPS):
            seen = _before(
                x, gates, state, program - (TAPS - 1 - k), first, unit, at, there, x_row, gate_row, width, TAPS - 1
            )
            total += seen.to(tl.float32) * tl.load(weight + at * TAPS + k, mask=there, other=0.0).to(tl.float32)
        if bias is not None:
            total += tl.load(bias + at, mask=there, other=0.0).to(tl.float32)
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        made = total.to(out.dtype.element_ty)
        if gates is not None:
            gate = tl.load(gates + program.to(tl.int64) * gate_row + width + at, mask=there, other=0.0)
            made = (made.to(tl.float32) * gate.to(tl.float32)).to(made.dtype)
        tl.store(out + program.to(tl.int64) * width + at, made, mask=there)
    else:
        first, end, unit, to = _request(starts, table, row, program - tokens)
        for k in tl.static_range(TAPS - 1):
            seen = _before(
                x, gates, state, end - (TAPS - 1 - k), first, unit, at, there, x_row, gate_row, width, TAPS - 1
            )
            tl.store(state + to * width * (TAPS - 1) + at.to(tl.int64) * (TAPS - 1) + k, seen, mask=there)


@triton.jit(do_not_specialize=["row"])
def state_space(
    y, x, dt, into, out, a_log, dt_bias, skip, state, starts, table, row, least, dim, width, each, x_row, dt_row,
    into_row, out_row, P: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """P features of one request and head, with `width` numbers each; `each` heads share `into` and `out`."""
    head, p, n = tl.program_id(1), tl.program_id(2) * P + tl.arange(0, P), tl.arange(0, N)
    first, end, unit, to = _request(starts, table, row, tl.program_id(0))
    heads, group = tl.num_programs(1), head // each
    there, numbers = p < dim, n < width
    block = there[:, None] & numbers[None, :]
    inside = (head * dim + p)[:, None].to(tl.int64) * width + n[None, :]
    size = heads.to(tl.int64) * dim * width
    held = tl.load(state + unit * size + inside, mask=block & (unit != 0), other=0.0)
    rate = tl.exp(tl.load(a_log + head))
    for past in range(end - first):
        at = first.to(tl.int64) + past
        given = tl.load(x + at * x_row + head * dim + p, mask=there, other=0.0).to(tl.float32)
        key = tl.load(into + at * into_row + group * width + n, mask=numbers, other=0.0).to(tl.float32)
        query = tl.load(out + at * out_row + group * width + n, mask=numbers, other=0.0).to(tl.float32)
        wide, decay = given, tl.exp(-rate)
        if dt is not None:
            step = _softplus(tl.load(dt + at * dt_row + head).to(tl.float32) + tl.load(dt_bias + head))
            step = tl.maximum(step, least)
            wide, decay = given * step, tl.exp(-rate * step)
        held = held * decay + wide[:, None] * key[None, :]
        made = tl.sum(held * query[None, :], 1)
        if skip is not None:
            made += given * tl.load(skip + head)
        tl.store(y + (at * heads + head) * dim + p, made, mask=there)
    tl.store(state + to * size + inside, held, mask=block)


@triton.jit(do_not_specialize=["row"])
def selective_scan(
    y, x, dt, into, out, a_log, dt_bias, skip, state, starts, table, row, channels, width, x_row, dt_row, into_row,
    out_row, C: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """C channels of one request, with `width` numbers each."""
    c, n = tl.program_id(1) * C + tl.arange(0, C), tl.arange(0, N)
    first, end, unit, to = _request(starts, table, row, tl.program_id(0))
    there, numbers = c < channels, n < width
    block = there[:, None] & numbers[None, :]
    inside = c[:, None].to(tl.int64) * width + n[None, :]
    held = tl.load(state + unit * channels * width + inside, mask=block & (unit != 0), other=0.0)
    rates = tl.exp(tl.load(a_log + inside, mask=block, other=0.0))
    bias = tl.load(dt_bias + c, mask=there, other=0.0)
    for past in range(end - first):
        at = first.to(tl.int64) + past
        given = tl.load(x + at * x_row + c, mask=there, other=0.0).to(tl.float32)
        step = _softplus(tl.load(dt + at * dt_row + c, mask=there, other=0.0).to(tl.float32) + bias)
        key = tl.load(into + at * into_row + n, mask=numbers, other=0.0).to(tl.float32)
        query = tl.load(out + at * out_row + n, mask=numbers, other=0.0).to(tl.float32)
        held = held * tl.exp(-rates * step[:, None]) + (given * step)[:, None] * key[None, :]
        made = tl.sum(held * query[None, :], 1)
        if skip is not None:
            made += given * tl.load(skip + c, mask=there, other=0.0)
        tl.store(y + at * channels + c, made, mask=there)
    tl.store(state + to * channels * width + inside, held, mask=block)


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x) + 1e-6)


@triton.jit(do_not_specialize=["row"])
def delta_rule(
    out, q, k, v, forget, learn, a_log, dt_bias, state, starts, table, row, scale, beta_scale, values, width, each,
    q_row, k_row, v_row, forget_row, learn_row, V: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """V values of one request and head, with `width` numbers each; `each` heads share q and k."""
    head, i, n = tl.program_id(1), tl.program_id(2) * V + tl.arange(0, V), tl.arange(0, D)
    first, end, unit, to = _request(starts, table, row, tl.program_id(0))
    heads, group = tl.num_programs(1), head // each
    there, numbers = i < values, n < width
    block = there[:, None] & numbers[None, :]
    inside = (head * values + i)[:, None].to(tl.int64) * width + n[None, :]
    size = heads.to(tl.int64) * values * width
    held = tl.load(state + unit * size + inside, mask=block & (unit != 0), other=0.0)
    rate, bias = tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head)
    for past in range(end - first):
        at = first.to(tl.int64) + past
        query = _unit(tl.load(q + at * q_row + group * width + n, mask=numbers, other=0.0).to(tl.float32)) * scale
        key = _unit(tl.load(k + at * k_row + group * width + n, mask=numbers, other=0.0).to(tl.float32))
        value = tl.load(v + at * v_row + head * values + i, mask=there, other=0.0).to(tl.float32)
        forgotten = tl.load(forget + at * forget_row + head).to(tl.float32)
        learned = beta_scale / (1.0 + tl.exp(-tl.load(learn + at * learn_row + head).to(tl.float32)))
        held = held * tl.exp(-rate * _softplus(forgotten + bias))
        missing = (value - tl.sum(held * key[None, :], 1)) * learned
        held += missing[:, None] * key[None, :]
        tl.store(out + (at * heads + head) * values + i, tl.sum(held * query[None, :], 1), mask=there)
    tl.store(state + to * size + inside, held, mask=block)


def units(context: StepContext) -> StateUnits:
    """Returns the units of a step."""
    table = context.group.block_table
    return StateUnits(context.batch.query_start_loc, table, table.stride(0))


def convolve(
    x: Tensor, gates: Tensor | None, conv: ConvWeights, state: Tensor, context: StepContext, silu: bool
) -> Tensor:
    """x [T, C] and gates [T, 2 C] with dense rows; writes to the state [units, C, K - 1] -> [T, C]."""
    tokens, width = x.shape
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    at, taps = units(context), conv.weight.shape[1]
    short_conv[(tokens + len(at.starts) - 1, triton.cdiv(width, CHANNELS))](
        out, x, gates, conv.weight, conv.bias, state, context.batch.token_to_seq, *at, tokens, width, x.stride(0),
        0 if gates is None else gates.stride(0), SILU=silu, TAPS=taps, B=CHANNELS, num_warps=WARPS,
    )  # fmt: skip
    return out


def spaces(moves: ScanInputs, scan: ScanWeights, state: Tensor, context: StepContext, least: float) -> Tensor:
    """moves with dense rows; writes to the state [units, H, P, N] -> [T, H, P] float32."""
    x, dt, into, out = moves
    tokens, heads, dim = x.shape
    y, at = _results(context, (tokens, heads, dim)), units(context)
    block, numbers = _block(dim, into.shape[2])
    state_space[(len(at.starts) - 1, heads, triton.cdiv(dim, block))](
        y, x, dt, into, out, scan.a_log, scan.dt_bias, scan.skip, state, *at, least, dim, into.shape[2],
        heads // into.shape[1], x.stride(0), 0 if dt is None else dt.stride(0), into.stride(0), out.stride(0),
        P=block, N=numbers, num_warps=WARPS,
    )  # fmt: skip
    return y


def scanned(moves: ScanInputs, scan: ScanWeights, state: Tensor, context: StepContext) -> Tensor:
    """moves with dense rows; writes to the state [units, C, N] -> [T, C, 1] float32."""
    x, dt, into, out = moves
    assert dt is not None, "a scan is selective by its dt"
    (tokens, channels, _), width = x.shape, into.shape[2]
    y, at = _results(context, (tokens, channels, 1)), units(context)
    block, numbers = _block(channels, width)
    selective_scan[(len(at.starts) - 1, triton.cdiv(channels, block))](
        y, x, dt, into, out, scan.a_log, scan.dt_bias, scan.skip, state, *at, channels, width, x.stride(0),
        dt.stride(0), into.stride(0), out.stride(0), C=block, N=numbers, num_warps=WARPS,
    )  # fmt: skip
    return y


def turned(turns: DeltaRuleInputs, scan: ScanWeights, state: Tensor, context: StepContext, beta_scale: float) -> Tensor:
    """turns with dense rows; writes to the state [units, H, V, D] -> [T, H, V] float32."""
    q, k, v, forget, learn = turns
    (tokens, heads, values), width = v.shape, q.shape[2]
    out, at = _results(context, (tokens, heads, values)), units(context)
    block, numbers = _block(values, width, LEARNT)
    delta_rule[(len(at.starts) - 1, heads, triton.cdiv(values, block))](
        out, q, k, v, forget, learn, scan.a_log, scan.dt_bias, state, *at, width**-0.5, beta_scale, values,
        width, heads // q.shape[1], q.stride(0), k.stride(0), v.stride(0), forget.stride(0), learn.stride(0),
        V=block, D=numbers, num_warps=WARPS,
    )  # fmt: skip
    return out


def _results(context: StepContext, shape: tuple[int, ...]) -> Tensor:
    """float32, and zeros for tokens that pad a step: no request has them, and the layers that follow take them in."""
    device, tokens = context.batch.query_start_loc.device, shape[0]
    every = tokens == len(context.batch.query_start_loc) - 1  # one for each request, and none is padding
    return (torch.empty if every else torch.zeros)(shape, dtype=torch.float32, device=device)


def _block(rows: int, width: int, held: int = HELD) -> tuple[int, int]:
    """Rows of a state in one program, and how many numbers they are padded to."""
    numbers = triton.next_power_of_2(width)
    return min(triton.next_power_of_2(rows), max(1, held // numbers)), numbers


def variants() -> list[Variant]:
    """LFM2's and Mamba's convolutions; Mamba 2's states of 64 by 128, Falcon-H1's by 256; Mamba's; Qwen3-Next's."""
    found = []
    for kind in ("bf16", "fp16"):
        context = {"starts": "*i32", "table": "*i32", "row": "i32"}
        given = (
            dict.fromkeys(("out", "x", "weight", "state"), f"*{kind}") | {"owners": "*i32", "tokens": "i32"} | context
        )
        given |= dict.fromkeys(("width", "x_row"), "i32:16")
        for what, taps, gated in (("LFM2's", 3, True), ("Mamba's", 4, False)):
            others = {"gates": f"*{kind}", "gate_row": "i32:16"} if gated else {"bias": f"*{kind}", "gate_row": "i32"}
            lacking = {"bias": None} if gated else {"gates": None}
            fixed: dict[str, Any] = {"SILU": not gated, "TAPS": taps, "B": CHANNELS, **lacking}
            found.append(Variant(f"{what} convolution {kind}", short_conv, given | others, fixed, WARPS))
        moved = dict.fromkeys(("x", "dt", "into", "out"), f"*{kind}") | context
        moved |= dict.fromkeys(("y", "a_log", "dt_bias", "skip", "state"), "*fp32") | {"width": "i32:16"}
        moved |= dict.fromkeys(("x_row", "dt_row", "into_row", "out_row"), "i32:16")
        heads = moved | {"least": "fp32", "dim": "i32:16", "each": "i32"}
        lasting: dict[str, Any] = {"dt": None, "dt_bias": None, "skip": None}
        for what, dim, width, lacking in (
            ("64 by 128", 64, 128, {}), ("64 by 256", 64, 256, {}), ("80 by 64", 80, 64, {}),
            ("128 by 128, of a fixed decay", 128, 128, lasting),
        ):  # fmt: skip
            fixed = {**dict(zip(("P", "N"), _block(dim, width), strict=True)), **lacking}
            signature = {name: each for name, each in heads.items() if name not in lacking}
            found.append(Variant(f"state space {what} {kind}", state_space, signature, fixed, WARPS))
        fixed = dict(zip(("C", "N"), _block(5120, 16), strict=True))
        signature = moved | {"channels": "i32:16"}
        found.append(Variant(f"selective scan by 16 {kind}", selective_scan, signature, fixed, WARPS))
        given = (
            dict.fromkeys(("q", "k", "v", "forget", "learn"), f"*{kind}")
            | context
            | {"scale": "fp32", "beta_scale": "fp32"}
        )
        given |= dict.fromkeys(("out", "a_log", "dt_bias", "state"), "*fp32") | {"each": "i32"}
        given |= dict.fromkeys(("values", "width", "q_row", "k_row", "v_row", "forget_row", "learn_row"), "i32:16")
        fixed = dict(zip(("V", "D"), _block(128, 128, LEARNT), strict=True))
        found.append(Variant(f"delta rule 128 by 128 {kind}", delta_rule, given, fixed, WARPS))
    return found
