"""Between torch and JAX: loads torchax, shows arrays of one as tensors of the other, makes JAX functions providers.

torch_view() and jax_view() copy nothing. Tensors of the bridge can be computed with inside `tracing()` alone; outside
of it only ops take them (Capabilities.ops_only).
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch._ops import OpOverloadPacket

from quintet.config import unchanged_environment
from quintet.interface.weights import WeightFormat
from quintet.ops.registry import Op

Function = Callable[..., Any]


@contextlib.contextmanager
def _dropped_overloads() -> Iterator[None]:
    """While torchax is imported, named-tensor overloads that torch has dropped are found, as keys that nothing calls.

    torchax 0.0.13 lists 22 overloads (such as aten.all.dimname) that torch 2.13 no longer has, and stops at the first.
    """
    lookup = OpOverloadPacket.__getattr__

    def lookup_or_gone(packet: Any, overload: str) -> Any:
        try:
            return lookup(packet, overload)
        except AttributeError:
            if "dimname" in overload.lower() or "names" in overload:
                return object()
            raise

    OpOverloadPacket.__getattr__ = lookup_or_gone  # type: ignore[method-assign]
    try:
        yield
    finally:
        OpOverloadPacket.__getattr__ = lookup  # type: ignore[method-assign]


@contextlib.contextmanager
def _preserve_torch_state() -> Iterator[None]:
    """Keeps what importing torchax would change for everybody: torch's attention fast path, and torch's accelerator. It
    would become "jax", and torch's own functions (random.fork_rng is one) would stumble over it.
    """
    fastpath = torch.backends.mha.get_fastpath_enabled()
    calls = [(torch.utils, "rename_privateuse1_backend"), (torch, "_register_device_module")]
    originals = [getattr(module, name) for module, name in calls]
    for module, name in calls:
        setattr(module, name, lambda *args: None)
    try:
        yield
    finally:
        for (module, name), original in zip(calls, originals, strict=True):
            setattr(module, name, original)
        torch.backends.mha.set_fastpath_enabled(fastpath)


with unchanged_environment(), _preserve_torch_state(), _dropped_overloads():
    import torchax
    from torchax.tensor import Tensor as BridgeTensor
    from torchax.view import View as BridgeView  # of another tensor of the bridge: a slice, a transposition

    ENV = torchax.default_env()  # fills its tables from torch's overloads

for _class in (BridgeTensor, BridgeView):  # the name that torch knows the backend by, since it was not renamed
    _class.device = property(lambda self: torch.device("privateuseone", 0))


def tracing() -> Any:
    """The context in which torch functions take tensors of the bridge, and become JAX operations."""
    return ENV


def torch_view(tree: Any) -> Any:
    """JAX arrays anywhere in tuples, lists and dicts -> tensors of the bridge."""
    return jax.tree.map(_torch_view, tree)


def put(x: torch.Tensor, array: jax.Array) -> None:
    """Makes a tensor of the bridge show another array, of the same shape and type."""
    held: Any = x
    assert held._elem.shape == array.shape and held._elem.dtype == array.dtype, "the tensor was placed in another shape"
    held._elem = array


def put_rows(x: torch.Tensor, array: jax.Array, first: int, count: int) -> None:
    """Makes a tensor of the bridge show other numbers in `count` rows of its first axis. The array that it showed is
    left as it was, since a step that runs may read it."""
    held: Any = x
    whole = held._elem
    assert (count, *whole.shape[1:]) == array.shape and whole.dtype == array.dtype, "the rows were placed otherwise"
    assert 0 <= first <= len(whole) - count, "the rows lie in the tensor"
    held._elem = _with_rows(whole, array, first)


@jax.jit
def _with_rows(whole: jax.Array, rows: jax.Array, first: int) -> jax.Array:
    """One program for each shape, whichever rows are written."""
    return jax.lax.dynamic_update_slice_in_dim(whole, rows, first, 0)


def jax_view(tree: Any) -> Any:
    """Tensors of the bridge anywhere in tuples, lists and dicts -> JAX arrays; host tensors become NumPy arrays."""
    return jax.tree.map(_jax_view, tree)


def _torch_view(x: Any) -> Any:
    return BridgeTensor(x, ENV) if isinstance(x, jax.Array) else x


def _jax_view(x: Any) -> Any:
    if isinstance(x, (BridgeTensor, BridgeView)):
        return x.jax()
    return host_array(x) if isinstance(x, torch.Tensor) else x


def host_array(x: torch.Tensor) -> Any:
    """A host tensor's memory as a NumPy array; bfloat16 and the fp8 formats as ml_dtypes' types, which JAX shares."""
    x = x.detach()
    if x.dtype in _UNKNOWN_TO_NUMPY:
        return x.view(_UNKNOWN_TO_NUMPY[x.dtype]).numpy().view(dtype_of(x.dtype))
    return x.numpy()


_UNKNOWN_TO_NUMPY = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.int8,
    torch.float8_e5m2: torch.int8,
}
_DTYPES = {
    torch.float32: jnp.float32,
    torch.bfloat16: jnp.bfloat16,
    torch.float16: jnp.float16,
    torch.int32: jnp.int32,
    torch.int16: jnp.int16,
    torch.int8: jnp.int8,
    torch.uint8: jnp.uint8,
    torch.float8_e4m3fn: jnp.float8_e4m3fn,
    torch.float8_e5m2: jnp.float8_e5m2,
}


def dtype_of(dtype: torch.dtype) -> Any:
    """JAX's name for a torch dtype."""
    return jnp.dtype(_DTYPES[dtype])


def torch_dtype(dtype: Any) -> torch.dtype:
    """torch's name for one of JAX's."""
    return next(own for own, other in _DTYPES.items() if jnp.dtype(other) == dtype)


jax.tree_util.register_static(WeightFormat)  # a matrix in a trace: its format is compiled in, its tensors are leaves


def serve(
    op: Op,
    provider: str = "jax",
    *,
    static: tuple[str, ...] = (),
    probe: Callable[[], str | None] | None = None,
    kinds: tuple[str, ...] = (),
) -> Callable[[Function], Function]:
    """Registers a function of JAX arrays as a provider of the op; called by the model's trace, or by the engine itself.

    It is compiled once for each shape. `static` names the parameters that are Python values: they are compiled in, as
    the format of a matrix is.
    """

    def register(function: Function) -> Function:
        names = list(inspect.signature(function).parameters)
        # inlined into the model's trace: XLA simplifies what it sees in one piece (sharded products need that)
        compiled = jax.jit(function, static_argnums=tuple(names.index(name) for name in static), inline=True)

        @functools.wraps(function)
        def bridged(*args: Any) -> Any:
            return torch_view(compiled(*jax_view(args)))

        op.provide(provider, probe, kinds)(bridged)
        return function

    return register
