"""Asks for responses, and holds what comes back against the types of OpenAI's own client."""

import functools
import json
from typing import Any

import httpx
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from quintet.tokenizers.tokenizer import Tokenizer, load_tokenizer
from tests.server.fakes import BUNDLED, FakeBackend
from tests.server.http.serving import client

SAY = "Nice to meet you 👋🏽, wörld"
PATH = "/v1/responses"

_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@functools.cache
def _tokenizer() -> Tokenizer:
    return load_tokenizer(BUNDLED)


def backend(**settings: Any) -> FakeBackend:
    """Says SAY."""
    fake = FakeBackend(tokenizer=_tokenizer(), **settings)
    fake.reply = fake.encode(SAY)
    return fake


def is_response(answer: dict[str, Any]) -> None:
    Response.model_validate(answer)
    assert set(answer) <= set(Response.model_fields) | {"store"}  # which OpenAI sends and its client does not name


def read_events(text: str, first: int = 0) -> list[dict[str, Any]]:
    """The data of the events: each as OpenAI's client knows it, named as it says, and numbered."""
    made = []
    assert not text or text.endswith("\n\n")
    for number, part in enumerate(text.split("\n\n")[:-1], first):
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == number
        assert _EVENT.validate_python(event).type == event["type"]
        if "response" in event:
            is_response(event["response"])
        made.append(event)
    return made


async def create(http: httpx.AsyncClient, **body: Any) -> Any:
    """The response, or its events."""
    answer = await http.post(PATH, json={"input": "Hi", **body})
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        assert answer.headers["content-type"].startswith("text/event-stream")
        return read_events(answer.text)
    is_response(answer.json())
    return answer.json()


async def create_once(fake: FakeBackend | None = None, **body: Any) -> Any:
    async with client(fake or backend()) as http:
        return await create(http, **body)


async def fail(http: httpx.AsyncClient, method: str, path: str, status: int = 400, **rest: Any) -> dict[str, Any]:
    """The error that an API call ends with."""
    answer = await http.request(method, path, **rest)
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
