"""Engines that are not there, in virtual time: what a model manager starts in tests, with its memory and its deaths."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from quintet.clients.http_client import ServerAddress
from quintet.clients.http_connection import HttpTimeouts
from quintet.config import EngineConfig
from quintet.router.models.config import ModelsConfig, ModelSpec
from quintet.router.models.engine import EngineFailed
from quintet.router.models.estimates import MemoryEstimate
from quintet.router.models.manager import ModelManager
from quintet.server.config import ServerConfig

TIMES = HttpTimeouts(5.0, 5.0, 5.0)
ADDRESS = ServerAddress("127.0.0.1", 9)


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock goes on to the next timer as soon as there is nothing to do."""

    def __init__(self) -> None:
        super().__init__()
        self._now, poll = 0.0, self._selector.select  # type: ignore[attr-defined]

        def select(timeout: float | None) -> Any:
            events = poll(0)
            if not events:
                assert timeout is not None, "all tasks wait for each other"
                self._now += timeout
            return events

        self._selector.select = select  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now


def in_virtual_time(work: Coroutine[Any, Any, Any]) -> Any:
    """Runs it to its end, and returns its result."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


def spec(name: str, memory: int = 10, **more: Any) -> ModelSpec:
    config = EngineConfig(model="bundled", num_pages=8)
    return ModelSpec(name, config, ServerConfig(), memory=memory, cache_is_sized=True, **more)


@dataclass
class World:
    """The machine: its engines, and what they hold."""

    budget: int = 20
    load_seconds: Callable[[str], float] = lambda name: 1.0
    end_seconds: Callable[[str], float] = lambda name: 0.5
    failure: Callable[[str], str] = lambda name: ""
    sleeps: bool = True
    alive: list["FakeEngine"] = field(default_factory=list)
    starts: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    address: Callable[[str], ServerAddress] = lambda name: ADDRESS
    manager: Any = None
    estimates: int = 0
    plan_seconds: Callable[[str], float] = lambda name: 0.0  # of one model, after 0.5 s for all

    def held(self) -> int:
        return sum(each.held for each in self.alive)

    def check(self) -> None:
        assert self.held() <= self.budget, (self.held(), [(each.name, each.held) for each in self.alive])
        ledger = self.manager.ledger
        assert ledger.planned <= ledger.budget

    async def estimate(self, specs: Sequence[ModelSpec]) -> AsyncGenerator[tuple[int, MemoryEstimate], None]:
        self.estimates += 1
        await asyncio.sleep(0.5)
        for index, model in enumerate(specs):
            await asyncio.sleep(self.plan_seconds(model.name))
            yield index, MemoryEstimate(free=100, total=100, sleeps=self.sleeps, in_host_memory=False)

    def start(self, spec: ModelSpec, cache: int | None, ended: Callable[[str], None]) -> "FakeEngine":
        self.starts.append(spec.name)
        made = FakeEngine(self, spec, ended)
        self.alive.append(made)
        self.check()
        return made

    def make(self, specs: Sequence[ModelSpec], **config: Any) -> ModelManager:
        settings = ModelsConfig(memory_budget=self.budget, **{"keep_alive": -1, **config})
        self.manager = ModelManager(specs, settings, self.start, TIMES, self.estimate)
        return self.manager

    def engine(self, name: str) -> "FakeEngine":
        return next(each for each in self.alive if each.name == name)

    def model(self, name: str) -> Any:
        return next(each for each in self.manager.models if each.name == name)


class FakeEngine:
    """An engine that holds its model's memory from its start to its end."""

    def __init__(self, world: World, spec: ModelSpec, ended: Callable[[str], None]) -> None:
        assert isinstance(spec.memory, int)
        self.world, self.name, self.size, self._ended = world, spec.name, spec.memory, ended
        self.address = world.address(spec.name)
        self.asleep = self.dead = self.ready = self.busy = False

    @property
    def held(self) -> int:
        return 0 if self.asleep else self.size

    async def wait_ready(self, seconds: float) -> None:
        await asyncio.sleep(self.world.load_seconds(self.name))
        if why := self.world.failure(self.name):
            raise EngineFailed(why)
        if self.dead:
            raise EngineFailed("it was killed")
        self.ready = True

    async def is_gone(self) -> bool:
        return self.dead

    async def is_busy(self) -> bool:
        await asyncio.sleep(0.01)
        return self.busy

    async def sleep(self) -> bool:
        assert not self.world.model(self.name).slot.in_flight, "an engine with requests was put to sleep"
        await asyncio.sleep(0.1)
        self.asleep = not self.dead
        return self.asleep

    async def wake(self) -> None:
        self.asleep = False
        self.world.check()
        await asyncio.sleep(0.1)
        if self.dead:
            raise EngineFailed("it was killed")

    async def metrics(self) -> str:
        return ""

    async def end(self) -> None:
        if self.ready and not self.dead:
            assert not self.world.model(self.name).slot.in_flight, "an engine with requests was unloaded"
            await asyncio.sleep(self.world.end_seconds(self.name))
        self.close()

    def kill(self) -> None:
        """Its process dies; the manager hears of it a little later."""
        if not self.dead:
            self.dead = True
            self.close()
            asyncio.get_running_loop().call_later(0.02, self._ended, "it was killed by SIGKILL")

    def close(self, seconds: float = 0.0) -> None:
        if self in self.world.alive:
            self.world.alive.remove(self)

    def ask_to_end(self) -> None:
        pass


def random_world(rng: random.Random, **more: Any) -> World:
    return World(
        load_seconds=lambda name: rng.uniform(0.1, 3.0), end_seconds=lambda name: rng.uniform(0.0, 1.0), **more
    )
