"""The step of a GPU: steps of declared sizes are captured when they first come, and replayed from then on.

Any other runs eagerly. A step is run exactly once by every call, on every rank: the first of a size runs eagerly on
the graph's own inputs, which compiles its kernels, and is captured afterwards.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quintet.interface.platform import State
from quintet.interface.types import TOKEN_INPUTS, Batch, Group, Inputs, Outputs, ShapeBucket, leaves
from quintet.platforms.gpu.capture_sizes import table_width
from quintet.platforms.gpu.device import GPUDevice
from quintet.platforms.gpu.products import LogitsRedirect

logger = logging.getLogger(__name__)

Model = Callable[[State, Batch], tuple[Outputs, State]]
Shape = tuple[tuple[int, ...], torch.dtype]

MAX_GRAPHS = 96  # graphs; the one that was not used for longest goes first
MIB = 2**20
MIN_ROOM = 64 * MIB  # that must be free before a capture, beside what the pool has: a step's nodes, and fragments
ROWS, OWNERS = Batch._fields.index("logits_indices"), Batch._fields.index("token_to_seq")  # among the leaves


class GraphKey(NamedTuple):
    """Sizes and shapes of a step that a graph fits."""

    tokens: int
    requests: int
    rows: int  # of outputs
    tables: tuple[int, ...]  # columns of each group's
    plans: tuple[tuple[Shape, ...], ...]  # of each group
    inputs: tuple[Shape | None, ...]

    @property
    def decode(self) -> bool:
        """True if each request brings one token."""
        return self.tokens == self.requests


class CapturedGraph(NamedTuple):
    """One graph, with its inputs and outputs."""

    graph: Any
    inputs: list[Tensor]
    outputs: Outputs


class GraphBuffers:
    """Buffers that graphs read and write: made once for the largest step; a smaller one takes their beginning."""

    def __init__(self, device: GPUDevice, buckets: Sequence[ShapeBucket]) -> None:
        self._device = device
        self._tokens, self._requests, self._rows = (max(each) for each in list(zip(*buckets, strict=True))[:3])
        self._inputs: dict[Any, Tensor] = {}
        self._outputs: dict[Any, Tensor] = {}
        self._nothing: Tensor | None = None

    def batch(self, size: GraphKey, batch: Batch) -> Batch:
        """Makes the inputs that a step of this size is captured on: tables have the captured width, and outputs its
        number of rows. A decode step gives those of all tokens in their order, so that it looks none up."""
        groups = zip(batch.groups, size.tables, strict=True)
        wide = batch._replace(
            logits_indices=batch.token_ids[: size.rows],
            groups=tuple(
                group._replace(block_table=group.block_table.new_empty(size.requests, width)) for group, width in groups
            ),
        )
        own: Batch = _map_tensors(wide, lambda at, x: self._part(self._inputs, at, x, self._most_read(at, x)))
        return own._replace(logits_indices=own.token_to_seq) if size.decode else own

    def outputs(self, given: Outputs) -> Outputs:
        """Returns buffers for a step's outputs: the next step may overwrite them."""
        most = {"logits": self._rows, "hidden_states": self._rows}
        own: Outputs = _map_tensors(
            given, lambda at, x: self._part(self._outputs, at, x, most.get(Outputs._fields[at[0]], self._tokens))
        )
        return own

    def zeros(self, count: int) -> Tensor:
        """Returns `count` zeros, for unused rows of outputs: those of a larger step would point past this one."""
        if self._nothing is None:
            self._nothing = self._device.runtime.empty((self._rows,), torch.int32, self._device.index).zero_()
        return self._nothing[:count]

    def _most_read(self, at: tuple[int, ...], x: Tensor) -> int:
        """Returns the length of the buffer for what has this place in a batch."""
        field = Batch._fields[at[0]]
        if field == "groups":
            field = Group._fields[at[2]]
        if field == "inputs" and Inputs._fields[at[1]] in TOKEN_INPUTS and x.dim() == 1:  # tokens are its only axis
            return self._tokens
        longest = {
            "query_start_loc": self._requests + 1,
            "block_table": self._requests,
            "seq_lens": self._requests,
            "logits_indices": self._rows,
        }
        if field in longest:
            return longest[field]
        return self._tokens if field in ("token_ids", "positions", "token_to_seq", "slot_mapping") else x.shape[0]

    def _part(self, made: dict[Any, Tensor], at: tuple[int, ...], x: Tensor, most: int) -> Tensor:
        """Returns the buffer for this place in a batch or in outputs."""
        key = at, most, *x.shape[1:], x.dtype
        if key not in made:
            made[key] = self._device.runtime.empty((most, *x.shape[1:]), x.dtype, self._device.index).zero_()
        return made[key][: x.shape[0]]


class GraphedStep:
    """A step like the model; steps of the sizes of these variants are captured. What it gives holds until its next
    call.

    `ahead`: the caller runs a step of every size before it serves, but those with as many tokens as `late` says, and
    wants none of those dropped. `pool`: bytes that the largest captured step takes.
    """

    def __init__(
        self, model: Model, device: GPUDevice, buckets: Sequence[ShapeBucket], ahead: bool = False, pool: int = 0,
        late: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        self._model, self._device, self._variants, self._ahead = model, device, buckets, ahead
        self._pool_bytes, self._late = pool, late
        self._decodes = frozenset(each.tokens for each in buckets if each.decode)
        self._mixed = {(each.tokens, each.requests): each.rows for each in buckets if not each.decode}
        self._graphs: OrderedDict[GraphKey, CapturedGraph] = OrderedDict()
        self._pool: Any = None  # shared: graphs run one after the other
        self._reserved: Any = None  # keeps what the largest step takes in the pool
        self._stream: Any = None
        self._room: GraphBuffers | None = None
        self._held: tuple[int, ...] = ()  # addresses of the state, which graphs hold
        self.nbytes, self._largest = 0, 0  # that captures took: all, and one
        self.refused: str | None = None  # why no more steps are captured
        device.tagged_memory.call_before_sleep(self.drop)

    def __call__(self, state: State, batch: Batch) -> tuple[Outputs, State]:
        size = self._size(batch)
        if size is None:
            return self._model(state, batch)
        self._use(state)
        found = self._graphs.get(size)
        if found is None and self.refused is not None:
            return self._model(state, batch)
        if found is None:
            return _requested_rows(self._first(size, state, batch), size, batch), state
        self._graphs.move_to_end(size)
        self._fill(found.inputs, batch)
        found.graph.replay()
        return _requested_rows(found.outputs, size, batch), state

    def drop(self) -> int:
        """Lets go of all graphs and of the memory that is theirs -> bytes."""
        self._graphs.clear()
        if self._reserved is not None:
            self._device.pooled -= self._pool_bytes
        self._pool = self._room = self._reserved = None
        if self._stream is not None:  # kept: libraries have workspaces for each stream, which lie in the pool
            self._device.runtime.release(workspaces=True)
        freed, self.nbytes = self.nbytes, 0
        return freed

    def _size(self, batch: Batch) -> GraphKey | None:
        """None for a step that runs eagerly: not padded to one of the sizes."""
        tokens, requests = batch.token_ids.shape[0], batch.query_start_loc.shape[0] - 1
        if tokens == requests:  # each brings one token, since none brings nothing
            rows = tokens if tokens in self._decodes else -1
        else:
            rows = self._mixed.get((tokens, requests), -1)
        if batch.logits_indices.shape[0] > rows:
            return None
        return GraphKey(
            tokens,
            requests,
            rows,
            tuple([table_width(group.block_table.shape[1]) for group in batch.groups]),
            tuple([tuple([_shape(x) for x in group.plan]) for group in batch.groups]),
            tuple([None if x is None else _shape(x) for x in batch.inputs]),
        )

    def _use(self, state: State) -> None:
        """Another state than before, or one that slept: graphs hold its addresses, and those of weights."""
        held = (self._device.tagged_memory.generation, *(tensor.data_ptr() for tensor in state))
        if held != self._held:
            self._graphs.clear()
            self._held = held

    def _first(self, size: GraphKey, state: State, batch: Batch) -> Outputs:
        """Runs the step, and captures it for the next time -> what it gives, with all the rows of that size."""
        if self._room is None:
            self._room = GraphBuffers(self._device, self._variants)
        own = self._room.batch(size, batch)
        self._fill(leaves(own), batch)
        into = LogitsRedirect()
        with into.recording():
            outputs, _ = self._model(state, own)
        try:
            self._capture(size, state, own, outputs, into)
        except RuntimeError as error:  # torch's errors of capturing and of memory are
            self.refused = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
            logger.warning(
                "no more steps are captured, a step of %d tokens could not be: %s; steps are slower than they could "
                "be%s", size.tokens, self.refused,
                ", lower gpu_memory_utilization" if isinstance(error, torch.OutOfMemoryError) else "",
            )  # fmt: skip
        return outputs

    def _capture(self, size: GraphKey, state: State, own: Batch, given: Outputs, into: LogitsRedirect) -> None:
        """`given` is what the step gave eagerly, as `into` saw it."""
        assert self._room is not None, "what a graph reads is in it"
        outputs = self._room.outputs(given)
        self._make_place()
        runtime, index = self._device.runtime, self._device.index
        self._check_room()
        if self._stream is None:
            self._stream = runtime.stream(index)
        if self._pool is None:
            self._pool = runtime.pool()
            self._reserve()
        to = leaves(outputs)

        def run() -> None:
            with into.redirecting(given.logits, outputs.logits):
                found = leaves(self._model(state, own)[0])
            for each, x in zip(to, found, strict=True):
                if x.data_ptr() != each.data_ptr():  # the head's product was written there
                    each.copy_(x)

        before, start = runtime.memory(index)[0], time.perf_counter()
        graph = runtime.capture(run, self._pool, self._stream)
        took = max(0, before - runtime.memory(index)[0])
        self.nbytes, self._largest = self.nbytes + took, max(self._largest, took)
        self._graphs[size] = CapturedGraph(graph, leaves(own), outputs)
        logger.log(
            logging.DEBUG if self._ahead else logging.INFO,
            "captured a step of %d tokens of %d requests, up to %d pages each, in %.2f s: %.1f MiB, %.1f MiB in all",
            size.tokens, size.requests, max(size.tables, default=0), time.perf_counter() - start, took / MIB,
            self.nbytes / MIB,
        )  # fmt: skip

    def _make_place(self) -> None:
        """Drops graphs until another may be kept: of steps with prompts while these are more than a third, since their
        work hides the host's."""
        while True:
            kept = [size for size in self._graphs if not self._ahead or size.tokens in self._late]
            if len(kept) < MAX_GRAPHS:
                return
            prompts = [size for size in kept if not size.decode]
            decodes = [size for size in kept if size.decode]
            self._graphs.pop((prompts if len(prompts) > MAX_GRAPHS // 3 or not decodes else decodes)[0])

    def _reserve(self) -> None:
        """Lets the pool have what the largest step takes, in one piece that all steps divide. Captured from the
        smallest on, each would else add a piece of its own: none before it is large enough."""
        runtime, index, need = self._device.runtime, self._device.index, self._pool_bytes
        if need < MIN_ROOM:
            return
        if runtime.memory(index)[0] < need + MIN_ROOM:
            runtime.release()
        if (free := runtime.memory(index)[0]) < need + MIN_ROOM:
            logger.info("%d MiB are not free for captured steps, %d are: each adds its own", need // MIB, free // MIB)
            return

        def take() -> None:
            runtime.empty((need,), torch.uint8, index)[:1].zero_()  # torch warns of a graph without work

        self._reserved = runtime.capture(take, self._pool, self._stream)  # never replayed; free again in the pool
        self._device.pooled += need
        self.nbytes += max(0, free - runtime.memory(index)[0])

    def _check_room(self) -> None:
        """OutOfMemoryError where a capture would end in one: what is freed in the midst of it invalidates it. The step
        has just run eagerly: what the allocator kept of that run is as much as the capture may take."""
        runtime, index, need = self._device.runtime, self._device.index, max(MIN_ROOM, self._largest)
        if runtime.memory(index)[0] < max(need, self._device.idle()):
            runtime.release()  # a pool of its own takes nothing of what the allocator keeps
            if (free := runtime.memory(index)[0]) < need:
                raise torch.OutOfMemoryError(f"{free / MIB:.0f} MiB are free, and a capture may need {need / MIB:.0f}")

    def _fill(self, inputs: Sequence[Tensor], batch: Batch) -> None:
        """Queues the copies: of tables into the beginning of what a graph reads; rows beyond those are the first."""
        assert self._room is not None, "what a graph reads is in it"
        whole: list[tuple[Tensor, Tensor]] = []
        wanted, all_rows, decode = batch.logits_indices.shape[0], inputs[ROWS].shape[0], inputs[ROWS] is inputs[OWNERS]
        if wanted < all_rows and not decode:
            whole.append((inputs[ROWS][wanted:], self._room.zeros(all_rows - wanted)))
        for place, (to, x) in enumerate(zip(inputs, leaves(batch), strict=True)):
            if not x.numel() or (decode and place == ROWS):
                continue
            if to.shape != x.shape:
                to = to[tuple(map(slice, x.shape))]
            if to.is_contiguous():
                whole.append((to, x))
            else:
                to.copy_(x)
        torch._foreach_copy_([to for to, _ in whole], [x for _, x in whole])


def _shape(x: Tensor) -> Shape:
    return tuple(x.shape), x.dtype


def _requested_rows(outputs: Outputs, size: GraphKey, batch: Batch) -> Outputs:
    """Selects the rows that were wanted; taps are of all tokens. A decode step gives a row for each token: those
    that are wanted are the first ones if they lie where its owners begin, which are 0, 1, ... there."""
    rows = batch.logits_indices
    first = not size.decode or not rows.shape[0] or rows.data_ptr() == batch.token_to_seq.data_ptr()

    def part(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        return x[: rows.shape[0]] if first else torch.index_select(x, 0, rows)

    return outputs._replace(logits=part(outputs.logits), hidden_states=part(outputs.hidden_states))


def _map_tensors(x: Any, make: Callable[[tuple[int, ...], Tensor], Tensor], at: tuple[int, ...] = ()) -> Any:
    """x with another tensor in the place of each, made from its place and it."""
    if x is None:
        return None
    if not isinstance(x, tuple):
        return make(at, x)
    parts = [_map_tensors(each, make, (*at, index)) for index, each in enumerate(x)]
    return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
