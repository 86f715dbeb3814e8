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
from quintet.clients.json_lines import read_lines
from quintet.clients.latency import RequestOutcome, StreamTimes
from quintet.common.suggestions import refuse_unknown

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

    def make_requests(self, source: RequestSource, num_prompts: int) -> list[LoadRequest]:
        """A chat takes text alone; its template adds tokens of its own."""
        draw = random.Random(self.seed)
        return [self._call(source, draw) for _ in range(num_prompts)]

    def _call(self, source: RequestSource, draw: random.Random) -> LoadRequest:
        if not self.text and source.endpoint == "completions":
            ids = [draw.randrange(self.vocab_size) for _ in range(self.input_len)]
            return source.make_request({"prompt": ids}, self.output_len, self.input_len)
        return source.make_request(_prompt(" ".join(draw.choices(_WORDS, k=self.input_len)), source), self.output_len)


def _prompt(prompt: Any, source: RequestSource) -> dict[str, Any]:
    """A prompt as the endpoint takes it."""
    if source.endpoint == "completions":
        return {"prompt": prompt}
    return {"messages": [{"role": "user", "content": prompt}]}


def read_dataset(file: str) -> list[dict[str, Any]]:
    """Lines of {"prompt": ..., "output_len": ...} or {"messages": [...], "output_len": ...}; output_len may lack."""
    return read_lines(file, _entry, "holds no prompts")


def _entry(entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise ValueError('must be an object such as {"prompt": "Once upon a time", "output_len": 64}')
    refuse_unknown("field", entry, ("prompt", "messages", "output_len"))
    if ("prompt" in entry) == ("messages" in entry):
        raise ValueError("must hold either prompt or messages")
    length = entry.get("output_len", 1)
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ValueError(f"output_len must be a whole number of at least 1, not {length!r}")
    return entry


def dataset_requests(entries: Sequence[Mapping[str, Any]], source: RequestSource, output_len: int) -> list[LoadRequest]:
    """`output_len` is of entries that name none."""
    calls = []
    for entry in entries:
        if "messages" in entry and source.endpoint == "completions":
            raise ValueError("the dataset holds messages, which /v1/completions does not take; use --endpoint chat")
        prompt = {"messages": entry["messages"]} if "messages" in entry else _prompt(entry["prompt"], source)
        calls.append(source.make_request(prompt, entry.get("output_len", output_len)))
    return calls


def arrival_times(num_calls: int, rate: float, seed: int) -> Iterator[float]:
    """Seconds after the start at which each request sets out: a Poisson process of `rate` a second, or all at once."""
    draw, at = random.Random(seed), 0.0
    for _ in range(num_calls):
        yield at
        at += 0.0 if math.isinf(rate) else draw.expovariate(rate)


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
