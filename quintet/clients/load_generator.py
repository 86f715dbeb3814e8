"""Load on a server: which requests, when each sets out, and sending them."""

import asyncio
import contextlib
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quintet.clients import errors
from quintet.clients.http_client import HttpClient
from quintet.clients.http_connection import ConnectionLost, HttpProtocolError
from quintet.clients.latency import RequestOutcome, StreamTimes

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

# Words that most vocabularies hold as one token, with the space before them.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information"
).split()


@dataclass(frozen=True)
class LoadRequest:
    """One request, ready to be sent."""

    body: bytes
    prompt_len: int | None = None  # tokens, where we know


@dataclass(frozen=True)
class RequestSource:
    """Fields that the bodies of all requests share."""

    model: str
    endpoint: str  # of PATHS
    ignore_eos: bool = False
    extra: Mapping[str, Any] | None = None

    def make_request(self, prompt: Mapping[str, Any], output_len: int, prompt_len: int | None = None) -> LoadRequest:
        """`prompt` holds prompt or messages. Greedy unless `extra` says otherwise: a load is the same each time."""
        body = {
            "model": self.model,
            **prompt,
            "max_tokens": output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
            **(self.extra or {}),
        }
        return LoadRequest(json.dumps(body).encode(), prompt_len)


@dataclass(frozen=True)
class RandomPrompts:
    """Prompts from a seed. No two begin alike for long, so that a prefix cache answers none."""

    input_len: int
    output_len: int
    vocab_size: int
    text: bool  # words instead of token ids
    seed: int
    range_ratio: float = 0.0  # lengths are from (1 - ratio) to (1 + ratio) times the above
    prefix_len: int = 0  # tokens before each prompt, the same in all

    def make_requests(self, source: RequestSource, num_prompts: int) -> list[LoadRequest]:
        """A chat takes text alone; its template adds tokens of its own."""
        draw = random.Random(self.seed)
        ids = not self.text and source.endpoint == "completions"
        prefix = self._tokens(random.Random(f"prefix {self.seed}"), self.prefix_len, ids)
        return [self._call(source, draw, ids, prefix) for _ in range(num_prompts)]

    def _call(self, source: RequestSource, draw: random.Random, ids: bool, prefix: list[Any]) -> LoadRequest:
        tokens = [*prefix, *self._tokens(draw, self._length(draw, self.input_len), ids)]
        output_len = self._length(draw, self.output_len)
        if ids:
            return source.make_request({"prompt": tokens}, output_len, len(tokens))
        return source.make_request(prompt_fields(" ".join(tokens), source), output_len)

    def _length(self, draw: random.Random, mean: int) -> int:
        if not self.range_ratio:
            return mean
        return draw.randint(max(1, int(mean * (1 - self.range_ratio))), int(mean * (1 + self.range_ratio)))

    def _tokens(self, draw: random.Random, count: int, ids: bool) -> list[Any]:
        return [draw.randrange(self.vocab_size) for _ in range(count)] if ids else draw.choices(_WORDS, k=count)


def prompt_fields(prompt: Any, source: RequestSource) -> dict[str, Any]:
    """A prompt as the endpoint takes it."""
    if source.endpoint == "completions":
        return {"prompt": prompt}
    return {"messages": [{"role": "user", "content": prompt}]}


def arrival_times(num_calls: int, rate: float, seed: int, burstiness: float = 1.0) -> Iterator[float]:
    """Seconds after the start at which each request sets out: a Poisson process of `rate` a second, or all at once.

    `burstiness`: shape of the gamma distribution of the times between two; 1 is a Poisson process.
    """
    draw, at = random.Random(seed), 0.0
    for _ in range(num_calls):
        yield at
        if not math.isinf(rate):
            at += draw.expovariate(rate) if burstiness == 1 else draw.gammavariate(burstiness, 1 / (rate * burstiness))


@dataclass(frozen=True)
class Sender:
    """Sends calls to one endpoint of one server, and keeps what comes of them."""

    connections: HttpClient
    where: str
    endpoint: str

    async def send(self, call: LoadRequest) -> RequestOutcome:
        """One request. What goes wrong is part of the outcome."""
        path, stream = PATHS[self.endpoint], StreamTimes(self.where)
        started = time.perf_counter()
        try:
            answer = await self.connections.request("POST", path, call.body, stream.feed)
            if answer.status != 200:
                raise errors.status_error(self.where, path, answer.status, answer.body)
            if "text/event-stream" not in answer.headers.get("content-type", ""):
                raise errors.incompatible_server(self.where, f"{path} answers with no event stream")
            stream.finish()
        except errors.ServerError as error:
            return RequestOutcome(started, stream.times, failure=error)
        except (ConnectionLost, HttpProtocolError, TimeoutError) as error:
            return RequestOutcome(started, stream.times, failure=errors.connection_broken(self.where, error))
        except OSError as error:
            return RequestOutcome(started, failure=errors.unreachable(self.where, error))
        return RequestOutcome.from_stream(started, stream, call.prompt_len)

    async def send_all(
        self, calls: Sequence[LoadRequest], times: Iterator[float], most: int | None, tell: Callable[[], object]
    ) -> list[RequestOutcome]:
        """Sends each call at its time, `most` at once; calls `tell` for each that has ended."""
        gate = asyncio.Semaphore(most) if most else contextlib.nullcontext()

        async def one(call: LoadRequest) -> RequestOutcome:
            async with gate:
                outcome = await self.send(call)
            tell()
            return outcome

        started, tasks = time.perf_counter(), []
        for call, at in zip(calls, times, strict=True):
            wait = started + at - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(call)))
        return await asyncio.gather(*tasks)
