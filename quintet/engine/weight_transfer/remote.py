"""Orders about weights for engines that are other processes: all take an update, or none does."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from quintet.engine.observability.stats import Stats
from quintet.engine.weight_transfer import orders

if TYPE_CHECKING:
    from quintet.engine.weight_transfer.controls import Controls

CALLABLE_REFUSED = (
    "a function of the caller is called only where ranks are in its process: nothing that arrives is unpickled; put it "
    "into a class of an installed package, name that with worker_extension_cls, and call its method by name"
)


class HasResult(Protocol):
    """An engine's answer to an order."""

    @property
    def result(self) -> bytes: ...


def answer_order(controls: "Controls", order: Any) -> bytes:
    """Carries out an order in an engine's process -> its result in msgpack. ValueError says why not, also where code of
    an extension raised another error."""
    try:
        return msgspec.msgpack.encode(controls.run(order))
    except (ValueError, OSError, MemoryError, NotImplementedError):
        raise
    except (TypeError, RuntimeError, AttributeError, LookupError, ArithmeticError) as error:
        if not isinstance(order, orders.CallWorkersCommand):
            raise
        raise ValueError(f"collective_rpc: {order.method}: {type(error).__name__}: {error}") from error


class RemoteControls:
    """Controls of several engines, with the methods of Controls that callers use."""

    is_local = False

    def __init__(self, send: Callable[[Any], Sequence[HasResult]], stats: Callable[[], Stats]) -> None:
        """`send` has all engines carry out an order, and raises the error of one that fails."""
        self._send, self._stats = send, stats
        self.is_open = False  # between start_weight_update() and finish_weight_update()
        self.refusal = ""  # why no request is taken: some engines have another update than others

    @property
    def version(self) -> str:
        """The weights' version; "" where engines differ."""
        return self._stats().weights.weight_version

    def run(self, order: orders.WeightOrder) -> Any:
        """Carries out an order on all engines -> its result; for calls of workers, of all ranks of all engines."""
        check_plain(order)
        try:
            results = [msgspec.msgpack.decode(answer.result) for answer in self._send(order)]
        except (ValueError, OSError, MemoryError, NotImplementedError) as error:
            self._failed(order, error)
            raise
        if isinstance(order, orders.FinishUpdateCommand):
            self.refusal = ""
        if isinstance(order, orders.StartUpdateCommand | orders.FinishUpdateCommand | orders.FailUpdateCommand):
            self.is_open = isinstance(order, orders.StartUpdateCommand)
        return combine_results(order, results)

    def _failed(self, order: orders.WeightOrder, error: Exception) -> None:
        why = str(error)
        if isinstance(order, orders.ReceiveWeightsCommand):
            self.is_open = False
            self._send(orders.FailUpdateCommand(why))
            stats = self._stats()
            wrote = isinstance(error, orders.UpdateFailed) or bool(stats.weights.torn)
            self.refusal = TORN.format(why) if wrote else ""
        elif isinstance(order, orders.FinishUpdateCommand):
            self.refusal = TORN.format(why)


def combine_results(order: orders.WeightOrder, results: Sequence[Any]) -> Any:
    """Returns the result of an order of the results of all engines."""
    if isinstance(order, orders.CallWorkersCommand):
        return [value for result in results for value in result]
    if isinstance(order, orders.EndRequestsCommand):
        return sum(results)
    return all(results) if isinstance(order, orders.PauseCommand) else results[0]


TORN = (
    "the weights were replaced in some engines, and that failed in others ({}); send a full update, or call "
    "reload_weights()"
)


def check_plain(order: orders.WeightOrder) -> None:
    """ValueError if an order has what no message carries: a function, or an object."""
    if not isinstance(order, orders.CallWorkersCommand):
        return
    if callable(order.method):
        raise ValueError(f"collective_rpc: {CALLABLE_REFUSED}")
    try:
        msgspec.msgpack.encode(order)
    except (TypeError, OverflowError) as error:
        raise ValueError(
            f"collective_rpc: {order.method}: {error}; arguments are plain data where ranks are processes"
        ) from None
