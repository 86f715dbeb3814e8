"""The step of a GPU: decode steps are captured when they first come, and replayed from then on; others run eagerly.

A step is run exactly once by every call, on every rank: the first of a size runs eagerly on the graph's own inputs,
which compiles its kernels, and is captured afterwards.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quintet.platforms.gpu.buckets import table_width
from quintet.platforms.gpu.device import GPUDevice
from quintet.platforms.interface import KV
from quintet.types import Batch

logger = logging.getLogger(__name__)

Model = Callable[[KV, Batch], tuple[Tensor, KV]]

KEPT = 96  # graphs; who was not used for longest goes first
MIB = 2**20
FIELDS = ("token_ids", "positions", "slots", "lengths")  # [T] each, of a step in which each request brings one token


class Size(NamedTuple):
    """What a graph fits."""

    tokens: int
    width: int  # columns of the page table
    extra: tuple[tuple[tuple[int, ...], torch.dtype], ...]  # what the attention plans


class Captured(NamedTuple):
    """One graph, and the inputs that are its alone."""

    graph: Any
    extra: tuple[Tensor, ...]


class Inputs:
    """Memory that graphs read: made once for the largest step, a smaller one takes its beginning."""

    def __init__(self, device: GPUDevice, most: int) -> None:
        self._device, self._most = device, most
        self.columns = {name: self._make((most,)) for name in FIELDS}
        self.rows = self._make((most,))  # of logits
        count = torch.arange(most + 1, dtype=torch.int32)
        self._count = device.upload(count, torch.int32)  # whose a token is, and where a request begins
        self._tables: dict[int, Tensor] = {}

    def fill(self, size: Size, batch: Batch, extra: Sequence[Tensor]) -> None:
        """Queues the copies of what differs from step to step."""
        tokens, logits = size.tokens, batch.logit_rows.shape[0]
        own = [self.columns[name][:tokens] for name in FIELDS] + [self.rows[:logits], *extra]
        given = [getattr(batch, name) for name in FIELDS] + [batch.logit_rows, *batch.extra]
        pairs = [(to, source) for to, source in zip(own, given, strict=True) if to.numel()]
        torch._foreach_copy_([to for to, _ in pairs], [source for _, source in pairs])
        self._table(size)[:tokens, : batch.page_table.shape[1]].copy_(batch.page_table)

    def batch(self, size: Size, extra: tuple[Tensor, ...]) -> Batch:
        """What a graph of this size is captured on; it gives a row of logits for each token."""
        tokens = size.tokens
        columns = {name: column[:tokens] for name, column in self.columns.items()}
        return Batch(
            owners=self._count[:tokens], starts=self._count[: tokens + 1], page_table=self._table(size)[:tokens],
            logit_rows=self.rows[:tokens], extra=extra, **columns,
        )  # fmt: skip

    def _table(self, size: Size) -> Tensor:
        if size.width not in self._tables:
            self._tables[size.width] = self._make((self._most, size.width))
        return self._tables[size.width]

    def _make(self, shape: Sequence[int]) -> Tensor:
        return self._device.runtime.empty(shape, torch.int32, self._device.index).zero_()


class Graphs:
    """A step like the model. Its logits hold until its next call.

    `ahead`: the caller runs a step of every size before it serves, and wants none of the graphs dropped.
    """

    def __init__(self, model: Model, device: GPUDevice, sizes: Sequence[int], ahead: bool = False) -> None:
        self._model, self._device, self._sizes = model, device, frozenset(sizes)
        self._most, self._ahead = max(sizes, default=0), ahead
        self._graphs: OrderedDict[Size, Captured] = OrderedDict()
        self._pool: Any = None  # shared: graphs run one after the other
        self._stream: Any = None
        self._inputs: Inputs | None = None
        self._logits: Tensor | None = None  # [most, vocab], of every graph: the next step may overwrite it
        self._cache: tuple[int, ...] = ()  # addresses that graphs hold
        self.nbytes = 0  # that captures took
        self.refused: str | None = None  # why no more steps are captured
        device.tagged.before_sleep(self.drop)

    def __call__(self, kv: KV, batch: Batch) -> tuple[Tensor, KV]:
        size = self._size(batch)
        if size is None:
            return self._model(kv, batch)
        self._use(kv)
        found = self._graphs.get(size)
        if found is None and self.refused is not None:
            return self._model(kv, batch)
        rows = batch.logit_rows.shape[0]
        if found is None:
            return self._first(size, kv, batch)[:rows], kv
        self._graphs.move_to_end(size)
        self._given().fill(size, batch, found.extra)
        found.graph.replay()
        assert self._logits is not None
        return self._logits[:rows], kv

    def drop(self) -> int:
        """Lets go of all graphs and of the memory that is theirs -> bytes."""
        self._graphs.clear()
        self._pool = self._stream = self._inputs = self._logits = None
        freed, self.nbytes = self.nbytes, 0
        return freed

    def _size(self, batch: Batch) -> Size | None:
        """None for a step that runs eagerly: not padded to one of the sizes."""
        tokens, (requests, pages) = batch.token_ids.shape[0], batch.page_table.shape
        if tokens != requests or tokens not in self._sizes or batch.logit_rows.shape[0] > tokens:
            return None
        return Size(tokens, table_width(pages), tuple((tuple(x.shape), x.dtype) for x in batch.extra))

    def _use(self, kv: KV) -> None:
        """Another cache than before, or one that slept: graphs hold its addresses, and those of weights."""
        cache = (self._device.tagged.generation, *(pages.data_ptr() for pages in kv))
        if cache != self._cache:
            self._graphs.clear()
            self._cache = cache

    def _given(self) -> Inputs:
        if self._inputs is None:
            self._inputs = Inputs(self._device, self._most)
        return self._inputs

    def _first(self, size: Size, kv: KV, batch: Batch) -> Tensor:
        """Runs the step, and captures it for the next time -> its logits [T, V]."""
        inputs = self._given()
        extra = tuple(x.clone() for x in batch.extra)
        inputs.fill(size, batch, extra)
        own = inputs.batch(size, extra)
        logits, _ = self._model(kv, own)
        try:
            self._capture(size, kv, own, logits)
        except RuntimeError as error:  # torch's errors of capturing and of memory are
            self.refused = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
            logger.warning(
                "no more steps are captured, a step of %d tokens could not be: %s; decoding is slower than it could "
                "be%s", size.tokens, self.refused,
                ", lower gpu_memory_utilization" if isinstance(error, torch.OutOfMemoryError) else "",
            )  # fmt: skip
        return logits

    def _capture(self, size: Size, kv: KV, own: Batch, logits: Tensor) -> None:
        while len(self._graphs) >= KEPT and not self._ahead:
            self._graphs.popitem(last=False)
        runtime, index = self._device.runtime, self._device.index
        if self._logits is None:
            self._logits = runtime.empty((self._most, *logits.shape[1:]), logits.dtype, index)
        if self._pool is None:
            self._pool, self._stream = runtime.pool(), runtime.stream(index)
        to = self._logits[: size.tokens]

        def run() -> None:
            to.copy_(self._model(kv, own)[0])

        before, start = runtime.memory(index)[0], time.perf_counter()
        graph = runtime.capture(run, self._pool, self._stream)
        took = max(0, before - runtime.memory(index)[0])
        self.nbytes += took
        self._graphs[size] = Captured(graph, own.extra)
        logger.log(
            logging.DEBUG if self._ahead else logging.INFO,
            "captured a step of %d tokens, up to %d pages each, in %.2f s: %.1f MiB, %.1f MiB in all",
            size.tokens, size.width, time.perf_counter() - start, took / MIB, self.nbytes / MIB,
        )  # fmt: skip
