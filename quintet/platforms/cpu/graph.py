"""The step run again from C++: its kernel calls are recorded once per size, then replayed with one call from Python.

A recording is proven before it serves. When its size comes again, with other numbers, it is replayed and the model is
run beside it: what a replay leaves out, or finds gone, shows in the outputs, and steps of that size stay eager. Ranks
prove together: what does not hold on one is kept by none.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from quintet.interface.platform import State
from quintet.interface.types import PAGE_AXES, Batch, Outputs, leaves, map_leaves
from quintet.platforms.cpu.arena import Arena, use_arena

logger = logging.getLogger(__name__)

Model = Callable[[State, Batch], tuple[Outputs, State]]

MAX_GRAPHS = 64  # graphs; who was not used for longest goes first
MAX_TOKENS = 1024  # of a step that is recorded: above, Python's share is lost, and the arena would be large
# tokens that take as long as Python's share of a step: a proof costs the step, and a replay saves that share
TOKENS_PER_PROOF = 16
MANY_TOKENS = 64  # of a step that is not recorded, with memory that is kept for the next,
MAX_SCRATCH = 256 << 20  # of so many bytes at most
MIN_PAGES = 32  # columns of a recorded page table; more are powers of two, so that a growing request seldom asks anew


# inputs that our kernels read: they are copied into the recording's own
RECORDED_INPUTS: dict[str, Any] = dict.fromkeys(
    ("embed_indices", "adapters", "adapter_extras", "token_type_ids", "intermediate_tensors", "shared_tensors")
)

StepSize = tuple[tuple[int, ...], ...]  # of the batch's leaves; a table's width is what it is rounded up to


@dataclass
class RecordedStep:
    """One recorded step, and where it reads and writes."""

    calls: Any  # quintet._cpu.Graph
    inputs: tuple[np.ndarray[Any, Any], ...]  # the batch's arrays, in the order of its leaves
    outputs: Outputs  # views of memory that other steps write to as well: they hold until the next step
    tensors: list[Tensor]  # what torch made on the way, and kernels may read
    proven: bool = False
    replays: int = 0  # how often it served


class Replay:
    """A step like the model, which records itself. Its outputs hold until its next call."""

    def __init__(
        self,
        model: Model,
        extension: Any,
        all_agree: Callable[[bool], bool] = bool,
        writers: Mapping[int, Collection[int]] | None = None,
    ) -> None:
        """`all_agree`: whether something holds on all ranks, which ask at the same time. `writers`: the groups of the
        model's layers in each tensor of the state, where a second model has layers in it; None: all write in all."""
        self._model, self._extension, self._all_agree, self._writers = model, extension, all_agree, writers
        self._arena = Arena()
        self._scratch = Arena()  # of steps that are not recorded
        self._graphs: OrderedDict[StepSize, RecordedStep] = OrderedDict()
        self._seen: dict[StepSize, int] = {}  # how often each size came
        self._state: State = ()
        self.refused: dict[StepSize, str] = {}  # sizes that stay eager, and why

    def __call__(self, state: State, batch: Batch) -> tuple[Outputs, State]:
        if state is not self._state:
            self._use(state)
        size = _size(batch)
        graph = self._graphs.get(size)
        if graph is None:
            if size in self.refused or not self._is_worth_recording(size, batch):
                return self._eager(state, batch)
            return self._record(size, state, batch), state
        self._graphs.move_to_end(size)
        if not graph.proven:
            if not self._all_agree(not _same(graph.inputs, batch)):  # what it was recorded with proves nothing
                return self._eager(state, batch)
            return self._prove(size, graph, state, batch), state
        _fill(graph.inputs, batch)
        graph.calls.run()
        graph.replays += 1
        return graph.outputs, state

    def _eager(self, state: State, batch: Batch) -> tuple[Outputs, State]:
        """The model. Its results are large from so many tokens on: the system would take their memory back after each
        step, and have to find pages for the next."""
        if batch.token_ids.shape[0] < MANY_TOKENS:
            return self._model(state, batch)
        with use_arena(self._scratch):
            result = self._model(state, batch)
        if self._scratch.nbytes > MAX_SCRATCH:
            self._scratch = Arena()
        return result

    def _use(self, state: State) -> None:
        """Another state than before: graphs hold its addresses."""
        if [each.data_ptr() for each in state] != [each.data_ptr() for each in self._state]:
            self._graphs.clear()
        self._state = state

    def _is_worth_recording(self, size: StepSize, batch: Batch) -> bool:
        """A step in which all decode comes again at once; of others, a size that came as often as its proof costs."""
        tokens = batch.token_ids.shape[0]
        rest = batch.inputs._replace(**RECORDED_INPUTS)
        if tokens > MAX_TOKENS or leaves(rest):  # torch places that: no call of ours, to be recorded
            return False
        times = self._seen.get(size, 0)
        if len(self._seen) > 16 * MAX_GRAPHS:
            self._seen.clear()
        self._seen[size] = times + 1
        return tokens == batch.query_start_loc.shape[0] - 1 or times >= max(1, tokens // TOKENS_PER_PROOF)

    def _record(self, size: StepSize, state: State, batch: Batch) -> Outputs:
        """Runs the step on memory that stays, and keeps its calls."""
        mine = _graph_batch(batch)
        inputs = tuple(leaf.numpy() for leaf in leaves(mine))
        calls, kept = self._extension.Graph(), _TensorRecorder()
        with use_arena(self._arena), _recording(calls), kept:
            outputs, _ = self._model(state, mine)
        while len(self._graphs) >= MAX_GRAPHS:
            self._graphs.popitem(last=False)
        self._graphs[size] = RecordedStep(calls, inputs, map_leaves(outputs, self._arena.view), kept.tensors)
        return outputs

    def _prove(self, size: StepSize, graph: RecordedStep, state: State, batch: Batch) -> Outputs:
        """Replays the step, and runs it: both write the same to the state, and give the same to the bit."""
        written = [self._written_indices(index, each, batch) for index, each in enumerate(state)]
        _fill(graph.inputs, batch)
        for each, places in zip(state, written, strict=True):  # else what was there would hide what is not written
            _bytes(each)[places] = 0xFF
        graph.calls.run()
        got = [leaf.clone() for leaf in leaves(graph.outputs)]
        got += [_bytes(each)[places] for each, places in zip(state, written, strict=True)]
        outputs, _ = self._model(state, batch)
        want = leaves(outputs) + [_bytes(each)[places] for each, places in zip(state, written, strict=True)]
        wrong = [i for i, (a, b) in enumerate(zip(got, want, strict=True)) if not _equal_bits(a, b)]
        if not self._all_agree(not wrong):
            what = f"result {wrong[0] + 1} of {len(got)}" if wrong else "what another rank has"
            self._refuse(size, batch, f"{what} came out otherwise when the step was replayed")
        else:
            graph.proven = True
        return outputs

    def _written_indices(self, index: int, kept: Tensor, batch: Batch) -> tuple[Any, ...]:
        """Returns the index of what the step writes in a tensor of the state: in pages [P, sides, heads, page_size,
        row], the slots of the groups that write there; in states [units, ...], which have other axes, the units in the
        last group's table. Unit 0 takes what is not read again."""
        groups = range(len(batch.groups)) if self._writers is None else self._writers.get(index, ())
        if not groups:
            return (slice(0),)
        if kept.dim() != 1 + PAGE_AXES:
            return (batch.groups[-1].block_table[:, 1].unique().long(),)
        slots = torch.cat([batch.groups[group].slot_mapping for group in groups]).unique().long()
        return slots // kept.shape[3], slice(None), slice(None), slots % kept.shape[3]

    def _refuse(self, size: StepSize, batch: Batch, why: str) -> None:
        if why not in self.refused.values():
            logger.info("steps of %d tokens stay eager: %s", batch.token_ids.shape[0], why)
        self.refused[size] = why
        del self._graphs[size]


def _size(batch: Batch) -> StepSize:
    tables = {id(group.block_table) for group in batch.groups}
    return tuple((x.shape[0], _width(x.shape[1])) if id(x) in tables else tuple(x.shape) for x in leaves(batch))


def _width(pages: int) -> int:
    return MIN_PAGES if pages <= MIN_PAGES else 1 << (pages - 1).bit_length()


def _graph_batch(batch: Batch) -> Batch:
    """Tensors of the graph's own with what the batch holds; tables are as wide as their size."""
    groups = []
    for group in batch.groups:
        table = group.block_table.new_zeros((group.block_table.shape[0], _width(group.block_table.shape[1])))
        groups.append(group._replace(block_table=table))
    mine: Batch = map_leaves(batch._replace(groups=tuple(groups)), torch.clone)
    _fill(tuple(leaf.numpy() for leaf in leaves(mine)), batch)
    return mine


def _fill(arrays: tuple[np.ndarray[Any, Any], ...], batch: Batch) -> None:
    for array, x in zip(arrays, leaves(batch), strict=True):
        array[..., : x.shape[-1]] = x.numpy()


def _same(arrays: tuple[np.ndarray[Any, Any], ...], batch: Batch) -> bool:
    """True if the arrays hold this batch's tokens and inputs already. Other pages prove nothing: what torch computed of
    the same tokens, and a replay does not compute again, would be right by chance."""
    read = {id(x) for x in (batch.token_ids, *leaves(batch.inputs))}
    given = zip(arrays, leaves(batch), strict=True)
    return all(np.array_equal(array[..., : x.shape[-1]], x.numpy()) for array, x in given if id(x) in read)


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


def _equal_bits(x: Tensor, y: Tensor) -> bool:
    """True if x and y have equal bits, NaNs included."""
    return x.shape == y.shape and torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


@contextmanager
def _recording(calls: Any) -> Iterator[None]:
    calls.begin()
    try:
        yield
    finally:
        calls.end()


class _TensorRecorder(TorchFunctionMode):
    """Holds the memory that torch's own functions ask for: a kernel that was recorded reads it where it lies."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_memory(each) for each in _tensors(args)}
        self.tensors += [each for each in _tensors((result,)) if _memory(each) not in given]
        return result


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (tuple, list)):
        for each in x:
            yield from _tensors(each)


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
