"""Long work on the event loop, a stretch at a time: between two stretches the loop serves all other tasks."""

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeVar

Made = TypeVar("Made")


class CooperativeWork:
    """Cooperative scheduling of long work, one for each process. Tasks take turns: however many they are, the loop does
    one stretch between two of its rounds."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()  # hands on in the order of asking

    async def run_all(self, stretches: Iterable[Callable[[], Made]]) -> list[Made]:
        """Returns the results of all stretches, in order. Each must be short."""
        made = []
        for make in stretches:
            async with self._turn:
                made.append(make())
                await asyncio.sleep(0)
        return made
