"""The step as XLA executables: one per bucket, compiled ahead. Another shape is an error, never a recompilation."""

import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding
from torch import Tensor, nn
from torch.func import functional_call

from quintet.platforms.host import threads
from quintet.platforms.interface import KV, Attention, CacheLost, Step
from quintet.platforms.tpu.bridge import jax_view, torch_view, tracing
from quintet.types import Batch, Bucket, HostBatch

logger = logging.getLogger(__name__)

MIB = 2**20


@dataclass(frozen=True)
class Program:
    """What is traced: the model, the shapes of its weights and of the cache, and where batches and logits live."""

    model: nn.Module
    weights: dict[str, jax.ShapeDtypeStruct]
    kv: tuple[jax.ShapeDtypeStruct, ...]
    planners: Sequence[Attention]
    everywhere: NamedSharding

    def trace(self, bucket: Bucket) -> Any:
        """jax.stages.Traced of one bucket's step: (weights, kv, batch) -> (logits, kv), the cache donated."""
        step = jax.jit(
            self._step,
            donate_argnums=1,
            out_shardings=(self.everywhere, tuple(each.sharding for each in self.kv)),
        )
        return step.trace(self.weights, self.kv, self.batch(bucket))

    def _step(self, weights: dict[str, jax.Array], kv: KV, batch: Batch) -> Any:
        with tracing():
            # a module that layers share is one object: its tensors need no tying, which would leave tracers in it
            inputs = torch_view(kv), torch_view(batch)
            result = functional_call(self.model, torch_view(weights), inputs, tie_weights=False)
        return jax_view(result)

    def batch(self, bucket: Bucket) -> Any:
        """The shapes of a step's batch, the attention's plan included."""
        host = HostBatch.empty(bucket)
        for planner in self.planners:
            host = planner.plan(host)

        def shape(array: Any) -> Any:
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self.everywhere)

        return jax.tree.map(shape, Batch(*host))  # type: ignore[arg-type]  # shapes in the place of tensors


class Weights:
    """A model's weights as its programs take them. Arrays never change: other numbers are other arrays."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors, self.replaced = tensors, True

    def now(self) -> dict[str, jax.Array]:
        if self.replaced:
            self._arrays = {name: jax_view(tensor) for name, tensor in self._tensors.items()}
            self.replaced = False
        return self._arrays


def compile_step(program: Program, weights: Weights, buckets: Iterable[Bucket]) -> Step:
    """Compiles every bucket. The step that comes back knows these and no others."""
    pool = ThreadPoolExecutor(threads(), thread_name_prefix="compile")  # XLA compiles one program on one core
    try:
        compiling = [pool.submit(_compile, bucket, program.trace(bucket).lower()) for bucket in buckets]
        executables = dict(each.result() for each in compiling)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C, nobody waits for programs that nobody wants
    held: list[KV] = [()]  # the cache as the last step left it, for a caller who was interrupted before taking it

    def step(kv: KV, batch: Batch) -> tuple[Tensor, KV]:
        tokens = batch.token_ids.shape[0]
        executable = executables.get(tokens)
        if executable is None:
            raise RuntimeError(
                f"a step of {tokens} tokens was never compiled, only steps of {sorted(executables)}: "
                "steps must be padded to a bucket"
            )
        if _donated(kv):
            kv = held[0]
            if _donated(kv):
                raise CacheLost("the last step took the cache over and was interrupted before it gave one back")
        logits, held[0] = executable(weights.now(), kv, jax_view(batch))
        return torch_view(logits), held[0]

    step.compilations = compilations()  # type: ignore[attr-defined]  # see Step
    return step


@functools.cache
def compilations() -> Callable[[], int]:
    """Counts the programs that this process compiles, or finds compiled on disk, from the first call on."""
    events: list[str] = []

    def note(event: str, duration_secs: float, **_: str | int) -> None:
        if "backend_compile" in event:
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    return lambda: len(events)


def _donated(kv: KV) -> bool:
    """Whether a step took these arrays over; who has them lost the cache that it returned."""
    return bool(kv) and kv[0].is_deleted()  # type: ignore[attr-defined]  # arrays of JAX, typed as tensors


def abstract(array: jax.Array) -> jax.ShapeDtypeStruct:
    """Its shape, dtype and sharding."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _compile(bucket: Bucket, lowered: Any) -> tuple[int, Any]:
    start = time.perf_counter()
    executable = lowered.compile()
    memory = executable.memory_analysis()
    size = f", {memory.temp_size_in_bytes / MIB:.1f} MiB of workspace" if memory is not None else ""
    logger.info("compiled a step of %d tokens in %.1f s%s", bucket.tokens, time.perf_counter() - start, size)
    return bucket.tokens, executable
