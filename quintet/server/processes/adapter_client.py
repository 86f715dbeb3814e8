"""Adapters (LoRA) as an API process knows them: their names come from the engine, and orders about them go there."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from quintet.engine.processes import messages as wire


class AdapterClient:
    """A backend's `lora`."""

    def __init__(self, order: Callable[[wire.Work], Coroutine[Any, Any, wire.Answer]]) -> None:
        """`order` returns what engine 0 answers."""
        self._order = order
        self.served: Mapping[str, wire.ServedLoRA] = {}
        self._version = -1

    def update(self, adapters: wire.Adapters) -> None:
        """Takes the names that the engine sends."""
        if adapters.version >= self._version:
            self._version = adapters.version
            self.served = {each.reference.name: each for each in adapters.served}

    async def load(self, work: wire.LoadLoRA) -> None:
        """Returns when all API processes serve the adapter; EngineRefusal says why not."""
        await self._order(work)

    async def unload(self, name: str) -> None:
        """Returns when no API process serves the adapter any more; EngineRefusal if there is none of that name."""
        await self._order(wire.UnloadLoRA(name))
