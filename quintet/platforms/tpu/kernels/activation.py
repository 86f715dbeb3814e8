"""The activations in JAX, by the names of the specification; each in float32 and rounded once."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from quintet.ops import activation
from quintet.platforms.tpu.torchax_bridge import serve


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


def _gelu_tanh(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


def _relu2(x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(x))


KINDS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": _gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": jax.nn.relu,
    "relu2": _relu2,
    "silu": jax.nn.silu,
}


@serve(activation.activate, static=("kind",))
def activate(x: jax.Array, kind: str) -> jax.Array:
    """kind(x), elementwise."""
    if kind not in KINDS:
        raise activation.UnknownActivation(kind, KINDS)
    return KINDS[kind](x.astype(jnp.float32)).astype(x.dtype)


@serve(activation.gated, static=("kind",))
def gated(x: jax.Array, kind: str) -> jax.Array:
    """x [T, 2 I], gate beside up -> [T, I]."""
    name, limit = activation.split_limit(kind)
    gate, up = jnp.split(x, 2, axis=-1)
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return activate(gate, name) * up
