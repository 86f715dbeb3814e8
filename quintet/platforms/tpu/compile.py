"""The step as XLA executables: one per variant, compiled ahead. Another shape is an error, never a recompilation."""

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding
from torch import Tensor, nn
from torch.func import functional_call

from quintet.interface.platform import CacheLost, Mixer, State, Step
from quintet.interface.types import Batch, Outputs, ShapeBucket, leaves
from quintet.platforms.host import threads
from quintet.platforms.tpu.device import TPUDevice
from quintet.platforms.tpu.torchax_bridge import jax_view, torch_view, tracing

logger = logging.getLogger(__name__)

MIB = 2**20
Sizes = tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]  # the inputs that a batch has, and the shapes of its arrays


@dataclass(frozen=True)
class Program:
    """Inputs of tracing: the model, the shapes of its weights and of the state, and where batches and outputs live."""

    model: nn.Module
    weights: dict[str, jax.ShapeDtypeStruct]
    state: tuple[jax.ShapeDtypeStruct, ...]
    planner: Mixer | None  # of every group of pages; None: no layer keeps any
    everywhere: NamedSharding
    stateful: bool = False  # the last group keeps a state per request, of which nothing is planned

    def trace(self, bucket: ShapeBucket) -> Any:
        """jax.stages.Traced of one variant's step: (weights, state, batch) -> (outputs, state), the state donated."""
        step = jax.jit(
            self._step,
            donate_argnums=1,
            out_shardings=(self.everywhere, tuple(each.sharding for each in self.state)),
        )
        return step.trace(self.weights, self.state, self.batch(bucket))

    def _step(self, weights: dict[str, jax.Array], state: State, batch: Batch) -> Any:
        with tracing():
            # a module that layers share is one object: its tensors need no tying, which would leave tracers in it
            inputs = torch_view(state), torch_view(batch)
            result = functional_call(self.model, torch_view(weights), inputs, tie_weights=False)
        return jax_view(result)

    def batch(self, bucket: ShapeBucket) -> Batch:
        """The shapes of a step's batch, the groups' plans included."""
        host = bucket.batch
        if self.planner is not None:
            paged = len(host.groups) - self.stateful
            groups = [group._replace(plan=self.planner.plan(host, group)) for group in host.groups[:paged]]
            host = host._replace(groups=(*groups, *host.groups[paged:]))
        return host.on(
            [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.everywhere) for x in host.leaves()]  # type: ignore[misc]
        )


class ProgramWeights:
    """A model's weights as its programs take them. Arrays never change: other numbers are other arrays."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors, self.replaced = tensors, True

    def now(self) -> dict[str, jax.Array]:
        if self.replaced:
            self._arrays = {name: jax_view(tensor) for name, tensor in self._tensors.items()}
            self.replaced = False
        return self._arrays


def compile_step(program: Program, weights: ProgramWeights, buckets: Iterable[ShapeBucket], device: TPUDevice) -> Step:
    """Compiles every variant. The step that comes back knows these and no others."""
    pool = ThreadPoolExecutor(threads(), thread_name_prefix="compile")  # XLA compiles one program on one core
    compiling: dict[Sizes, Any] = {}
    try:
        for bucket in buckets:
            sizes = _sizes(program.batch(bucket))
            if sizes not in compiling:
                compiling[sizes] = pool.submit(_compile, bucket, program.trace(bucket).lower())
        executables = {sizes: each.result() for sizes, each in compiling.items()}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C, does not wait for programs that are not needed

    def step(state: State, batch: Batch) -> tuple[Outputs, State]:
        arrays: Batch = jax_view(batch)
        executable = executables.get(_sizes(arrays))
        if executable is None:
            raise RuntimeError(_never_compiled(_sizes(arrays), executables))
        if _is_donated(state):
            state = device.held
            if _is_donated(state) or not state:
                raise CacheLost("the last step took the cache over and was interrupted before it gave one back")
        outputs, device.held = executable(weights.now(), state, arrays)
        return torch_view(outputs), device.held

    step.compilations = compilations()  # type: ignore[attr-defined]  # see Step
    return step


def _sizes(batch: Batch) -> Sizes:
    """Returns the key of a variant: which arrays there are, and their shapes."""
    given = tuple(name for name, x in zip(batch.inputs._fields, batch.inputs, strict=True) if x is not None)
    return given, tuple(x.shape for x in leaves(batch))


def _never_compiled(sizes: Sizes, known: Iterable[Sizes]) -> str:
    tokens, found = sizes[1][0][0], sorted(known)
    alike = [each for each in found if each[1][0][0] == tokens]
    only = ", ".join(str(each[1][0][0]) for each in found)
    why = f"its arrays are {sizes}, and those of that size {alike}" if alike else f"only steps of {only}"
    return f"a step of {tokens} tokens was never compiled, {why}: steps must be padded to a variant"


@functools.cache
def compilations() -> Callable[[], int]:
    """Counts the programs that this process compiles, or finds compiled on disk, from the first call on."""
    events: list[str] = []

    def note(event: str, duration_secs: float, **_: str | int) -> None:
        if "backend_compile" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    return lambda: len(events)


def _is_donated(state: State) -> bool:
    """True if a step took these arrays over; a caller that still has them lost the state that the step returned."""
    return bool(state) and state[0].is_deleted()  # type: ignore[attr-defined]  # arrays of JAX, typed as tensors


def abstract(array: jax.Array) -> jax.ShapeDtypeStruct:
    """Returns the array's shape, dtype and sharding."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _compile(bucket: ShapeBucket, lowered: Any) -> Any:
    start = time.perf_counter()
    executable = lowered.compile()
    memory = executable.memory_analysis()
    size = f", {memory.temp_size_in_bytes / MIB:.1f} MiB of workspace" if memory is not None else ""
    what = f"{bucket.tokens} tokens{''.join(f', {each}' for each in bucket.inputs)}"
    logger.info("compiled a step of %s in %.1f s%s", what, time.perf_counter() - start, size)
    return executable
