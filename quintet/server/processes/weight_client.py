"""Pauses and weights of the engines as an API process orders them: all engines take an update, or none does."""

import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from quintet.engine.parallel.commands import OWN_FOLDER, ReloadCommand
from quintet.engine.processes import messages as wire
from quintet.engine.weight_transfer import orders
from quintet.engine.weight_transfer.remote import combine_results
from quintet.server.backend import EngineRefusal


class WeightClient:
    """A backend's `weights`."""

    def __init__(
        self, order: Callable[[wire.Work], Coroutine[Any, Any, Sequence[wire.Answer]]], forget: Callable[[], None]
    ) -> None:
        """`order` returns what each engine answers; `forget` notes that prefix caches were emptied."""
        self._order, self._forget = order, forget

    async def run(self, order: orders.WeightOrder) -> Any:
        """Has all engines carry out an order -> its result; EngineRefusal says why one did not. A transfer that failed
        in one engine fails in all."""
        try:
            answers = await self._order(order)
        except EngineRefusal as error:
            if isinstance(order, orders.ReceiveWeightsCommand | orders.FinishUpdateCommand):
                with contextlib.suppress(EngineRefusal):
                    await self._order(orders.FailUpdateCommand(str(error)))
            raise
        if isinstance(order, orders.FinishUpdateCommand | orders.PauseCommand | orders.RecomputeCommand):
            self._forget()
        return combine_results(order, [msgspec.msgpack.decode(answer.result) for answer in answers])

    async def reload(self) -> None:
        """Has all engines read the weights of their folder again; EngineRefusal says why one did not."""
        await self._order(ReloadCommand(OWN_FOLDER))
        self._forget()
