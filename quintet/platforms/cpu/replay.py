"""The step run again from C++: its kernel calls are recorded once per size, then replayed with one call from Python.

What a replay would leave out is watched for while a step is recorded: any torch function but a view means that the step
stays eager, and one line says which function it was.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from quintet.platforms.cpu.arena import Arena, lending
from quintet.platforms.interface import State
from quintet.types import Batch, Outputs, leaves

logger = logging.getLogger(__name__)

Model = Callable[[State, Batch], tuple[Outputs, State]]

KEPT = 64  # graphs; who was not used for longest goes first
MOST_TOKENS = (
    1024  # of a step that is recorded: above, Python's share is lost in the work, and the arena would be large
)
LEAST_PAGES = 32  # columns of a recorded page table; more are powers of two, so that a growing request seldom asks anew


class Size(NamedTuple):
    """What a recorded step fits."""

    tokens: int
    requests: int
    rows: int
    pages: tuple[int, ...]  # of each group, at most


class Graph(NamedTuple):
    """One recorded step, and where it reads and writes."""

    calls: Any  # quintet._cpu.Graph
    inputs: tuple[np.ndarray[Any, Any], ...]  # the batch's arrays, in Batch's order
    outputs: Outputs


class Replay:
    """A step like the model, which records itself. Its logits hold until its next call."""

    def __init__(self, model: Model, extension: Any) -> None:
        self._model, self._extension = model, extension
        self._arena = Arena()
        self._graphs: OrderedDict[Size, Graph] = OrderedDict()
        self._seen: set[Size] = set()
        self._state: State = ()
        self.refused: str | None = None  # why steps stay eager

    def __call__(self, state: State, batch: Batch) -> tuple[Outputs, State]:
        if self.refused is not None:
            return self._model(state, batch)
        if state is not self._state:
            self._use(state)
        size = _size(batch)
        graph = self._graphs.get(size)
        if graph is not None:
            self._graphs.move_to_end(size)
            _fill(graph.inputs, batch)
            graph.calls.run()
            return graph.outputs, state
        if not self._worth(size):
            return self._model(state, batch)
        return self._record(size, state, batch), state

    def _use(self, state: State) -> None:
        """Another state than before: graphs hold its addresses."""
        if [each.data_ptr() for each in state] != [each.data_ptr() for each in self._state]:
            self._graphs.clear()
        self._state = state

    def _worth(self, size: Size) -> bool:
        """A step in which all decode comes again at once; others may be the only ones of their size."""
        if size.tokens > MOST_TOKENS:
            return False
        again = size.tokens == size.requests or size in self._seen
        if len(self._seen) > 16 * KEPT:
            self._seen.clear()
        self._seen.add(size)
        return again

    def _record(self, size: Size, state: State, batch: Batch) -> Outputs:
        """Runs the step on memory that stays, and keeps its calls."""
        inputs, mine = _own(size, batch)
        calls, watch = self._extension.Graph(), _Watch()
        with lending(self._arena), _recording(calls), watch:
            outputs, _ = self._model(state, mine)
        if watch.found:
            found = ", ".join(sorted(watch.found))
            self.refused = f"a replay would leave out {found}"
            self._graphs.clear()
            logger.info("steps stay eager: %s", self.refused)
            return outputs
        while len(self._graphs) >= KEPT:
            self._graphs.popitem(last=False)
        self._graphs[size] = Graph(calls, inputs, outputs)
        return outputs


def _size(batch: Batch) -> Size:
    pages = tuple(_width(group.table.shape[1]) for group in batch.groups)
    return Size(batch.token_ids.shape[0], batch.starts.shape[0] - 1, batch.rows.shape[0], pages)


def _width(pages: int) -> int:
    return LEAST_PAGES if pages <= LEAST_PAGES else 1 << (pages - 1).bit_length()


def _own(size: Size, batch: Batch) -> tuple[tuple[np.ndarray[Any, Any], ...], Batch]:
    """Arrays of the graph's own with what the batch holds, and the same as tensors."""
    wide = batch._replace(
        groups=tuple(
            group._replace(table=group.table.new_zeros((size.requests, pages)))
            for group, pages in zip(batch.groups, size.pages, strict=True)
        )
    )
    mine = _mapped(wide, torch.clone)
    arrays = tuple(leaf.numpy() for leaf in leaves(mine))
    _fill(arrays, batch)
    return arrays, mine


def _mapped(x: Any, call: Callable[[Tensor], Tensor]) -> Any:
    """The same batch, or part of one, of other tensors."""
    if isinstance(x, tuple):
        parts = [_mapped(each, call) for each in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return None if x is None else call(x)


def _fill(arrays: tuple[np.ndarray[Any, Any], ...], batch: Batch) -> None:
    for array, x in zip(arrays, leaves(batch), strict=True):
        if array.ndim == 1:
            array[:] = x.numpy()
        else:
            array[:, : x.shape[1]] = x.numpy()


@contextmanager
def _recording(calls: Any) -> Iterator[None]:
    calls.begin()
    try:
        yield
    finally:
        calls.end()


class _Watch(TorchFunctionMode):
    """Notes every torch function that computes something or asks for memory."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__ not in LOOKING or not _same_memory(result, args[0]):
            self.found.add(func.__name__)
        return result


def _same_memory(result: Any, x: Tensor) -> bool:
    """Whether the tensors of the result, if it has any, are views of x; a reshape() may be a copy."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    memory = x.untyped_storage().data_ptr()
    return all(each.untyped_storage().data_ptr() == memory for each in results if isinstance(each, Tensor))


# What looks at a tensor, or makes views.
LOOKING = {
    *("__get__", "__getitem__", "__len__", "chunk", "contiguous", "data_ptr", "dim", "element_size", "expand"),
    *("flatten", "float", "is_contiguous", "narrow", "numel", "reshape", "select", "size", "split", "squeeze"),
    *("stride", "t", "to", "transpose", "unbind", "unsqueeze", "untyped_storage", "view"),
}  # fmt: skip
