"""A captured step: the kernels that the model started, written down once per variant and run again without its code."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from quintet.contract import Batch, Outputs, State
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from acme.device import AcmeDevice
from acme.launch import CAPTURING, Kernel, enqueue
from acme.tensor import AcmeTensor, Buffer, Slot, leaves, mapped, meta, tensors


@dataclass
class Call:
    """One kernel: its arguments, with slots and weights' buffers in the place of tensors."""

    kernel: Kernel
    args: Any
    named: Any
    results: list[Slot]
    last: list[Slot] = field(default_factory=list)  # nobody reads these after this call

    def run(self, values: list[Any]) -> None:
        def read(x: Any) -> Any:
            return values[x] if type(x) is Slot else x.read() if type(x) is Buffer else x

        found = leaves(self.kernel(*mapped(self.args, read), **mapped(self.named, read)))
        for slot, value in zip(self.results, found, strict=True):
            values[slot] = value
        for slot in self.last:
            values[slot] = None


class Recording(TorchDispatchMode):
    """What is being captured. Everything is called with meta tensors, so nothing is computed."""

    def __init__(self, device: AcmeDevice) -> None:
        super().__init__()
        self.device = device
        self.calls: list[Call] = []
        self.sizes: list[int] = []  # bytes of each slot's own memory

    def slot(self, like: Tensor, size: int = 0) -> AcmeTensor:
        """A tensor of the run; `size` is 0 if its memory is another's."""
        made = AcmeTensor(Buffer(self.device), like)
        made.buffer.slot = Slot(len(self.sizes))
        self.sizes.append(size)
        return made

    def kernel(self, kernel: Kernel, shape: Kernel, args: tuple[Any, ...]) -> Any:
        """One of ours starts, see launch()."""
        with (
            _disable_current_modes(),
            torch._C.DisableTorchFunction(),
        ):  # what is computed to learn a shape is no part of the program
            made = mapped(shape(*mapped(args, meta)), lambda x: self.slot(x, x.nbytes))
        self._write_down(kernel, args, {}, made)
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One of torch's starts: a view that a layer takes, or a piece of a specification that no provider serves."""
        kwargs = kwargs or {}
        if not tensors((args, kwargs)):
            return func(*args, **mapped(kwargs, _place))
        given: list[tuple[Tensor, Tensor]] = []  # meta tensors and what they stand for

        def describe(x: Any) -> Any:
            if isinstance(x, Tensor):
                given.append((meta(x), x))
                return given[-1][0]
            return torch.device("meta") if isinstance(x, torch.device) else x

        def result(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            same = [original for described, original in given if described is x]  # it was written in place
            return same[0] if same else self.slot(x, 0 if func.is_view else x.nbytes)

        made = mapped(func(*mapped(args, describe), **mapped(kwargs, describe)), result)
        self._write_down(func, args, kwargs, made)
        return made

    def _write_down(self, kernel: Kernel, args: Any, named: Any, results: Any) -> None:
        made = tensors(results)
        slots = [each.buffer.slot for each in made if each.buffer.slot is not None]
        if len(slots) < len(made):
            raise RuntimeError(f"{kernel} writes into a weight, which every step would do again")
        self.calls.append(Call(kernel, mapped(args, _place), mapped(named, _place), slots))


def _place(x: Any) -> Any:
    """What stands in a program for an argument; torch.arange(device=...) and its like run on the host's memory."""
    if isinstance(x, AcmeTensor):
        return x.buffer if x.buffer.slot is None else x.buffer.slot
    return torch.device("cpu") if isinstance(x, torch.device) else x


class OnHost(TorchFunctionMode):
    """While a step is captured, tensors that are made of nothing, such as torch.arange's, are constants of the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(kwargs.get("device"), torch.device) and not tensors((args, kwargs)):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Program:
    """A step of one variant: (state, batch) -> outputs."""

    device: AcmeDevice
    calls: Sequence[Call]
    num_inputs: int
    num_slots: int
    out: tuple[Slot, ...]  # the leaves of its outputs
    outputs: Outputs  # their shapes
    workspace: int  # bytes that it needs beside what it is given

    def launch(self, state: State, batch: Batch) -> Outputs:
        """Queues one run -> its outputs, which live in the workspace."""
        inputs = [*state, *leaves(batch)]
        if len(inputs) != self.num_inputs:
            raise RuntimeError(f"the step was captured for another cache than this one of {len(state)} tensors")
        made: Outputs = mapped(self.outputs, lambda x: AcmeTensor(Buffer(self.device), x))
        enqueue(self.device, self.run, (inputs,), [each.buffer for each in tensors(made)])
        return made

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """The kernel of a whole step."""
        values: list[Any] = [*inputs, *[None] * (self.num_slots - len(inputs))]
        for call in self.calls:
            call.run(values)
        return [values[slot] for slot in self.out]


def capture(model: nn.Module, device: AcmeDevice, state: State, batch: Batch) -> Program:
    """The step for inputs of these shapes, which may be meta tensors."""
    recording = Recording(device)
    given = mapped((state, batch), lambda x: recording.slot(x))
    CAPTURING.recording = recording
    try:
        with torch.no_grad(), OnHost(), recording:
            outputs, after = model(*given)
    finally:
        CAPTURING.recording = None
    if [each.buffer.slot for each in after] != list(range(len(state))):
        raise RuntimeError("the model returned another cache than it was given; attention here writes in place")
    num_inputs, out = len(tensors(given)), tuple(each.buffer.slot for each in tensors(outputs))
    _mark_last(recording.calls, kept={*out, *range(num_inputs)})
    sizes = num_inputs, len(recording.sizes)
    return Program(device, recording.calls, *sizes, out, mapped(outputs, meta), _workspace(recording))


def _mark_last(calls: Sequence[Call], kept: set[int]) -> None:
    """Finds out after which call nobody reads a slot any more."""
    seen = set(kept)
    for call in reversed(calls):
        for slot in [*leaves((call.args, call.named)), *call.results]:
            if type(slot) is Slot and slot not in seen:
                seen.add(slot)
                call.last.append(slot)


def _workspace(recording: Recording) -> int:
    """The most bytes that live at once. A view counts nothing, though it may outlive what it looks at."""
    most = now = 0
    for call in recording.calls:
        now += sum(recording.sizes[slot] for slot in call.results)
        most = max(most, now)
        now -= sum(recording.sizes[slot] for slot in call.last)
    return most
