"""Updates of weights as callers of an engine make them: orders to carry out one by one, each between two steps."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from quintet.engine.weight_transfer import orders
from quintet.engine.weight_transfer.remote import check_plain
from quintet.engine.weight_transfer.shared_memory import segments

Work = Callable[[], Any]  # to be done between two steps


class EngineControls(Protocol):
    """Controls of one engine, or of several."""

    @property
    def is_local(self) -> bool: ...

    @property
    def is_open(self) -> bool: ...

    def run(self, order: orders.WeightOrder) -> Any: ...


def update(
    controls: EngineControls, tensors: Iterable[tuple[str, Tensor]], finish: orders.FinishUpdateCommand, partial: bool
) -> Iterator[Work]:
    """Yields the parts of an update from its start to its end. Where one fails, the update has failed."""
    yield lambda: controls.run(orders.StartUpdateCommand())
    yield from transfers(controls, tensors)
    yield lambda: end(controls, finish, partial)


def transfers(controls: EngineControls, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Work]:
    """Yields parts of an update that is open: each takes some of the tensors, in this process or by shared memory."""
    if controls.is_local:
        local: Any = controls
        for each in _named(tensors):
            yield partial(local.put, [each])
        return
    for segment in segments(_named(tensors)):
        try:
            yield partial(controls.run, orders.ReceiveWeightsCommand(segment.info))
        finally:
            segment.close()


def end(controls: EngineControls, finish: orders.FinishUpdateCommand, partial: bool) -> None:
    """Ends an update: on all ranks and engines, once it is complete on all. ValueError names what never came; the
    update is then still open."""
    orders.check_version(finish.version)
    controls.run(orders.CheckUpdateCommand(partial))
    controls.run(finish)


def call_workers(controls: EngineControls, method: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Calls a method of every worker, or a function of its view where ranks are in this process."""
    order = orders.CallWorkersCommand(method, list(args), dict(kwargs))
    if not controls.is_local:
        check_plain(order)
    found: list[Any] = controls.run(order)
    return found


def info_of(request: Any, name: str) -> dict[str, Any]:
    """Returns vLLM's request of a transfer as a dictionary: of init_info, or update_info. ValueError if there is
    none."""
    found = request.get(name) if isinstance(request, Mapping) else getattr(request, name, None)
    if not isinstance(found, Mapping):
        raise ValueError(f"a request has {name}, a dictionary; got {repr(request)[:120]}")
    return dict(found)


def _named(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for each in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if not (isinstance(each, tuple | list) and len(each) == 2 and isinstance(each[1], Tensor)):
            raise ValueError(f"update_weights() takes (name, tensor), not {repr(each)[:120]}")
        yield str(each[0]), each[1]
