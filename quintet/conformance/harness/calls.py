"""Calls of ops and layers on a platform: arguments go up as an engine would place them, results come home."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quintet.conformance.check import ContractViolation
from quintet.conformance.harness.subject import Subject
from quintet.interface.platform import State
from quintet.interface.types import Batch, Outputs, ShapeBucket

NOTHING = ShapeBucket(16, 1, 16, ())  # the step of a model that looks at no token


@dataclass(frozen=True)
class OpCall:
    """A function and its arguments, which are on the device."""

    what: str
    function: Callable[..., Any]
    args: tuple[Any, ...]


def send(subject: Subject, x: Any, use: str = "vector") -> Any:
    """Host tensors on the device, in tuples of any kind too; the rest as it is. Nothing else holds what was sent."""
    if isinstance(x, Tensor):
        return subject.up(x.clone()) if use == "vector" else subject.place(x.clone(), use)["x"]
    return _map_tensors(lambda each: send(subject, each, use), x)


def results(subject: Subject, calls: Sequence[OpCall]) -> list[tuple[Tensor, ...]]:
    """Runs the calls and returns their results on the host.

    Where tensors are opaque the calls are one compiled step: there alone a platform must understand what is no op.
    """
    if subject.facts.ops_only:
        return _compiled(subject, calls)
    return [tuple(subject.down(each) for each in _tensors(_run_call(call, call.args))) for call in calls]


def _run_call(call: OpCall, args: tuple[Any, ...]) -> Any:
    try:
        return call.function(*args)
    except Exception as error:  # the error does not name the call
        raise ContractViolation(f"{call.what}: {type(error).__name__}: {error}") from error


def _tensors(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


class _CombinedModel(nn.Module):
    """All calls in one step; its logits are one row: the numbers of every result, in float32, which holds them."""

    def __init__(self, calls: Sequence[OpCall]) -> None:
        super().__init__()
        self.vocab_size = 1
        self._calls = list(calls)
        self.layers = nn.ModuleList(call.function for call in calls if isinstance(call.function, nn.Module))
        self._count = 0
        self._args = [self._registered(call.args) for call in calls]
        self.shapes: list[list[tuple[torch.Size, torch.dtype]]] = []  # of each call's results

    def forward(self, state: State, batch: Batch) -> tuple[Outputs, State]:
        given = zip(self._calls, self._args, strict=True)
        found = [_tensors(_run_call(call, self._restored(args))) for call, args in given]
        self.shapes = [[(torch.Size(x.shape), x.dtype) for x in each] for each in found]
        flat = [x.reshape(-1).to(torch.float32) for each in found for x in each]
        return Outputs(torch.cat(flat)[None]), state

    def _registered(self, x: Any) -> Any:
        """Tensors become parameters, and their names stand in their places."""
        if isinstance(x, Tensor):
            name = f"given_{self._count}"
            self._count += 1
            self.register_parameter(name, nn.Parameter(x, requires_grad=False))
            return _Name(name)
        return _map_tensors(self._registered, x)

    def _restored(self, x: Any) -> Any:
        return getattr(self, x.name) if isinstance(x, _Name) else _map_tensors(self._restored, x)


@dataclass(frozen=True)
class _Name:
    name: str


def _map_tensors(function: Callable[[Any], Any], x: Any) -> Any:
    if not isinstance(x, tuple):
        return x
    parts = [function(each) for each in x]
    return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)


def _compiled(subject: Subject, calls: Sequence[OpCall]) -> list[tuple[Tensor, ...]]:
    model = _CombinedModel(calls)
    step = subject.platform.compile(model, [NOTHING])
    host = NOTHING.batch
    out, _ = step((), host.on(subject.device.to_device(host.leaves())))
    assert out.logits is not None
    flat = subject.down(out.logits)[0]
    found, at = [], 0
    for shapes in model.shapes:
        each = []
        for shape, dtype in shapes:
            each.append(flat[at : at + shape.numel()].reshape(shape).to(dtype))
            at += shape.numel()
        found.append(tuple(each))
    return found
