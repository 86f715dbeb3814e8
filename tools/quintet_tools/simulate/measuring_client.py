"""Client that times a real server: prompts, and requests that decode, on so many of its engines at once."""

import asyncio
import math
import random
import statistics
import subprocess
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType

from quintet.clients import errors
from quintet.clients.http_client import HttpClient, ServerAddress
from quintet.clients.latency import StreamTimes
from quintet.clients.load_generator import PATHS, RequestSource
from quintet.common.processes import Child
from quintet.common.socket_folder import PrivateFolder
from quintet.config import EngineConfig
from quintet.engine.parallel.multiproc import plain_fields
from quintet_tools.simulate.cost_model import Sample, Work

COMPANY = "quintet_tools.simulate.measured_server"
DECODES = 16  # steps of each number of requests that are timed
RECORDED = 4  # steps before them, in which a size may be compiled, or recorded
LOOK = 0.02  # seconds between two looks whether the server is ready
ENDS = 60  # seconds that it may take to end
LEAST = 1e-5  # seconds of a step: less is what a caller's clock cannot tell


class Server:
    """Server process and its engines'; ends with this one."""

    def __init__(self, config: EngineConfig) -> None:
        self._folder = PrivateFolder()
        self.where = str(self._folder.path / "http")
        orders = {"uds": self.where, "engine": plain_fields(config, "bench simulate --measure")}
        self._child = Child(COMPANY, orders, stdout=subprocess.DEVNULL)

    def check(self) -> None:
        """ValueError if it is gone; the reason is on standard error."""
        if self._child.exit is not None:
            raise ValueError("the server that was to be measured did not start, or has ended; it says why above")

    def close(self) -> None:
        self._child.let_go()
        self._child.close(ENDS)
        self._folder.remove()


@dataclass(frozen=True)
class _Said:
    """One answer: when it was asked for, when its tokens came, and how many of its prompt's were cached."""

    began: float
    times: Sequence[float]
    cached: int


@dataclass
class Caller:
    """Asks all of a server's engines, or some, for the same at once. The router gives each its share."""

    server: Server
    config: EngineConfig
    vocab_size: int
    latency: float = 0.0  # seconds from a caller to a step and back, beside the step; taken from what prompts take
    ratios: list[float] = field(default_factory=list)  # of times between tokens, over their mean
    _draw: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        self._connections = HttpClient(ServerAddress("localhost", 80, uds=self.server.where))
        self._source = RequestSource(self.config.model, "completions", ignore_eos=True)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Caller":
        """Waits until all engines serve."""
        self._stack.callback(self._connections.close)
        while True:
            self.server.check()
            try:
                if (await self._connections.request("GET", "/ready")).status == 200:
                    return self
            except OSError:
                pass  # it does not listen yet
            await asyncio.sleep(LOOK)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def prompt(self, count: int) -> list[int]:
        return [self._draw.randrange(self.vocab_size) for _ in range(count)]

    async def prefill(self, prompts: Sequence[Sequence[int]]) -> Sample:
        """A prompt for each engine that computes -> what a step with one takes, of what is not cached of it. Each must
        fit into one step."""
        said = await self._all(prompts, 1)
        count, cached = len(prompts[0]) - said[0].cached, said[0].cached
        took = statistics.mean(each.times[0] - each.began for each in said) - self.latency
        return Sample(Work(count, 1, 0, count * cached + count * (count + 1) // 2), max(took, LEAST))

    async def decode(self, requests: int, context: int, engines: int) -> Sample | None:
        """Measures the mean time of a step in which so many requests of each engine decode, while all of them do. None
        if that was not to be seen: some had ended when others began."""
        lead = 2 * math.ceil(requests * context / self.config.step_tokens)  # steps in which others begin
        output = min(lead + RECORDED + DECODES, int(self.config.max_model_len or 0) - context)
        said = await self._all([self.prompt(context) for _ in range(requests * engines)], output)
        begin, end = max(each.times[0] for each in said), min(each.times[-1] for each in said)
        inside = [[at for at in each.times if begin <= at <= end] for each in said]
        inside = [each[min(RECORDED, len(each) // 2) :] for each in inside]
        if min(map(len, inside)) < 2:
            return None
        # tokens that are half a letter come with the next: what is counted is chunks, and all are tokens in the end
        steps = [(len(each) - 1) * output / len(whole.times) for each, whole in zip(inside, said, strict=True)]
        took = max(LEAST, sum(each[-1] - each[0] for each in inside) / sum(steps))
        for each in inside:
            self.ratios += [(later - at) / took for at, later in zip(each, each[1:], strict=False)]
        looked = requests * (context + output // 2)
        return Sample(Work(requests, requests, looked, 0), took)

    async def _all(self, prompts: Sequence[Sequence[int]], output: int) -> list[_Said]:
        return await asyncio.gather(*(self._ask(each, output) for each in prompts))

    async def _ask(self, ids: Sequence[int], output: int) -> _Said:
        call, stream = self._source.make_request({"prompt": list(ids)}, output), StreamTimes(self.server.where)
        began = time.perf_counter()
        answer = await self._connections.request("POST", PATHS["completions"], call.body, stream.feed)
        if answer.status != 200:
            raise errors.status_error(self.server.where, PATHS["completions"], answer.status, answer.body)
        stream.finish()
        details = stream.usage.get("prompt_tokens_details") or {}
        return _Said(began, stream.times, details.get("cached_tokens") or 0)
