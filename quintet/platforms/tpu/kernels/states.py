"""Ops that keep one state per request (SSM, delta rule, short convolution), in JAX.

A short convolution looks at all tokens at once. What goes on from token to token takes the first token of all requests
at once, which is the whole of a decode step, and then the others of one request after the other: work and memory follow
from the tokens that are there, not from the longest prompt times the padded requests.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from quintet.ops import states as spec
from quintet.platforms.tpu.torchax_bridge import serve

Step = Callable[[Array, Array], tuple[Array, Array]]  # of ops.states._through


@serve(spec.short_conv, static=("silu",))
def short_conv(x: Array, gates: Array | None, conv: Any, state: Array, context: Any, silu: bool) -> tuple[Array, Array]:
    """x [T, C] and state [units, C, K - 1] -> [T, C]; a state in int16 holds bfloat16's bits."""
    channels, taps = conv.weight.shape
    batch, weight, dtype = context.batch, conv.weight.astype(jnp.float32), x.dtype
    x = x if gates is None else x * gates[:, :channels]
    packed = state.dtype == jnp.int16
    kept = _read(lax.bitcast_convert_type(state, dtype) if packed else state, context).swapaxes(1, 2)  # [R, K - 1, C]
    starts = batch.query_start_loc[:-1]
    # of each token, and of each request's end: the place behind it, counted from its request's first token
    at = jnp.arange(x.shape[0]) + 1 - starts[batch.token_to_seq]
    lengths = batch.query_start_loc[1:] - starts

    def before(places: Array, owners: Array, back: int) -> Array:
        """The token `back` before each place: of the step, or of what was kept."""
        place = places - back
        ours = jnp.take(x, starts[owners] + place, axis=0, mode="clip")
        return jnp.where((place >= 0)[:, None], ours, kept[owners, jnp.maximum(place + taps - 1, 0)])

    total = before(at, batch.token_to_seq, taps).astype(jnp.float32) * weight[:, 0]
    for k in range(1, taps):
        total = total + before(at, batch.token_to_seq, taps - k).astype(jnp.float32) * weight[:, k]
    total = total if conv.bias is None else total + conv.bias.astype(jnp.float32)
    out = (total / (1 + jnp.exp(-total)) if silu else total).astype(dtype)
    every = jnp.arange(starts.shape[0])
    after = jnp.stack([before(lengths, every, back) for back in range(taps - 1, 0, -1)], axis=2).astype(dtype)
    state = _written(state, lax.bitcast_convert_type(after, jnp.int16) if packed else after, context)
    return (out if gates is None else out * gates[:, channels:]), state


@serve(spec.state_space, static=("least",))
def state_space(moves: Any, scan: Any, state: Array, context: Any, least: float) -> tuple[Array, Array]:
    """x [T, H, P] and state [units, H, P, N] -> [T, H, P] float32."""
    x, dt, into, out = moves
    each = x.shape[1] // into.shape[1]
    x, keys, queries = (one.astype(jnp.float32) for one in (x, into, out))
    steps = jnp.ones(x.shape[:2], jnp.float32)
    if dt is not None:
        steps = jnp.maximum(_softplus(dt.astype(jnp.float32) + scan.dt_bias), least)
    decay, wide = jnp.exp(-jnp.exp(scan.a_log) * steps), x * steps[:, :, None]

    def step(at: Array, before: Array) -> tuple[Array, Array]:
        kept, given, key, query = (one[at] for one in (decay, wide, keys, queries))
        key, query = (jnp.repeat(one, each, 1)[:, :, None, :] for one in (key, query))
        after = before * kept[:, :, None, None] + given[:, :, :, None] * key
        return (after * query).sum(-1), after

    made, state = _through(step, state, context)
    return (made if scan.skip is None else made + x * scan.skip[:, None]), state


@serve(spec.selective_scan)
def selective_scan(moves: Any, scan: Any, state: Array, context: Any) -> tuple[Array, Array]:
    """x [T, C, 1] and state [units, C, N] -> [T, C, 1] float32."""
    x, dt, into, out = (one.astype(jnp.float32) for one in moves)
    steps, rates = _softplus(dt + scan.dt_bias), jnp.exp(scan.a_log)  # [T, C], [C, N]
    wide, keys, queries = x[:, :, 0] * steps, into[:, 0], out[:, 0]

    def step(at: Array, before: Array) -> tuple[Array, Array]:
        length, given, key, query = (one[at] for one in (steps, wide, keys, queries))
        after = before * jnp.exp(-rates * length[:, :, None]) + given[:, :, None] * key[:, None]
        return (after * query[:, None]).sum(-1), after

    made, state = _through(step, state, context)
    return (made if scan.skip is None else made + x[:, :, 0] * scan.skip)[:, :, None], state


@serve(spec.delta_rule, static=("beta_scale",))
def delta_rule(turns: Any, scan: Any, state: Array, context: Any, beta_scale: float) -> tuple[Array, Array]:
    """q and k [T, G, D], v [T, H, V] and state [units, H, V, D] -> [T, H, V] float32."""
    forget = turns.decay.astype(jnp.float32) + scan.dt_bias
    return _by_delta(turns, jnp.exp(-jnp.exp(scan.a_log) * _softplus(forget))[:, :, None], state, context, beta_scale)


@serve(spec.kimi_delta_rule, static=("lower_bound",))
def kimi_delta_rule(turns: Any, scan: Any, state: Array, context: Any, lower_bound: float) -> tuple[Array, Array]:
    """The same, with decays [T, H, D] in place of [T, H]."""
    rate, gate = jnp.exp(scan.a_log)[:, None], turns.decay.astype(jnp.float32) + scan.dt_bias
    logs = lower_bound / (1 + jnp.exp(-rate * gate)) if lower_bound else -rate * _softplus(gate)
    return _by_delta(turns, jnp.exp(logs), state, context, 1.0)


def _by_delta(turns: Any, decay: Array, state: Array, context: Any, beta_scale: float) -> tuple[Array, Array]:
    """The rule with decays [T, H, 1 or D]."""
    q, k, values, learn = (one.astype(jnp.float32) for one in (turns.q, turns.k, turns.v, turns.beta))
    each = values.shape[1] // q.shape[1]
    rate = beta_scale / (1 + jnp.exp(-learn))
    queries, keys = (one * lax.rsqrt((one * one).sum(-1, keepdims=True) + 1e-6) for one in (q, k))
    queries = queries * q.shape[2] ** -0.5

    def step(at: Array, before: Array) -> tuple[Array, Array]:
        kept, learned, value, key, query = (one[at] for one in (decay, rate, values, keys, queries))
        key, query = (jnp.repeat(one, each, 1)[:, :, None, :] for one in (key, query))
        faded = before * kept[:, :, None]
        missing = (value - (faded * key).sum(-1)) * learned[:, :, None]
        after = faded + missing[:, :, :, None] * key
        return (after * query).sum(-1), after

    return _through(step, state, context)


def _softplus(x: Array) -> Array:
    return jnp.where(x > 20, x, jnp.log1p(jnp.exp(jnp.minimum(x, 20))))


def _read(state: Array, context: Any) -> Array:
    """Returns each request's state [R, *shape], zeros where it begins."""
    units = context.group.block_table[:, 0]
    return jnp.where((units == 0).reshape(-1, *[1] * (state.ndim - 1)), 0, state[units])


def _written(state: Array, kept: Array, context: Any) -> Array:
    return state.at[context.group.block_table[:, 1]].set(kept)


def _through(step: Step, state: Array, context: Any) -> tuple[Array, Array]:
    """step(some tokens [n], their requests' states) -> (what it gives for each, the states), for all of the step's
    tokens in order -> what it gives [T, ...], and the state as it was written."""
    batch, units = context.batch, context.group.block_table[:, 1]
    firsts, counts = batch.query_start_loc[:-1], batch.query_start_loc[1:] - batch.query_start_loc[:-1]
    tokens, kept = batch.token_ids.shape[0], _read(state, context)
    given, after = step(jnp.minimum(firsts, tokens - 1), kept)
    some = (counts > 0).reshape(-1, *[1] * (kept.ndim - 1))
    state = _written(state, jnp.where(some, after, kept), context)
    outs = jnp.zeros((tokens, *given.shape[1:]), given.dtype)
    outs = outs.at[jnp.where(counts > 0, firsts, tokens)].set(given, mode="drop")  # of padding nothing comes out
    order = jnp.argsort(counts <= 1, stable=True)  # requests with more tokens first

    def one(i: Array, held: tuple[Array, Array]) -> tuple[Array, Array]:
        """A request's other tokens. Its state goes into the loop and comes out of it, and nothing else is copied."""
        outs, state = held
        request = order[i]
        unit, first = units[request], firsts[request]

        def another(at: Array, held: tuple[Array, Array]) -> tuple[Array, Array]:
            given, after = step(at[None], held[1])
            return lax.dynamic_update_slice_in_dim(held[0], given, at, 0), after

        own = outs, lax.dynamic_slice_in_dim(state, unit, 1)
        outs, after = lax.fori_loop(first + 1, first + counts[request], another, own)
        return outs, lax.dynamic_update_slice_in_dim(state, after, unit, 0)

    done: tuple[Array, Array] = lax.fori_loop(0, (counts > 1).sum(), one, (outs, state))
    return done
