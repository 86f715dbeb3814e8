"""Asks for messages, and holds what comes back against the types of Anthropic's own client."""

import json
from typing import Any

import anthropic.types
import httpx
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from tests.server.fakes import FakeBackend
from tests.server.http.responses.responses_requests import backend
from tests.server.http.serving import client

PATH = "/v1/messages"

_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
_ERROR: TypeAdapter[Any] = TypeAdapter(anthropic.types.ErrorResponse)


def body(text: Any = "Hi", **fields: Any) -> dict[str, Any]:
    return {"max_tokens": 100, "messages": [{"role": "user", "content": text}], **fields}


def read_events(text: str) -> list[dict[str, Any]]:
    """The data of the events, each as Anthropic's client knows it, and named as it says."""
    assert text.endswith("\n\n")
    made = []
    for part in text.split("\n\n")[:-1]:
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] == "error":
            _ERROR.validate_python(event)
        elif event["type"] != "ping":
            assert _EVENT.validate_python(event).type == event["type"]
        made.append(event)
    return made


async def create(fake: FakeBackend | None = None, **fields: Any) -> Any:
    """The message, or its events."""
    async with client(fake or backend()) as http:
        answer = await http.post(PATH, json={**body(), **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    if fields.get("stream"):
        return read_events(answer.text)
    Message.model_validate(answer.json())
    assert set(answer.json()) <= set(Message.model_fields)
    return answer.json()


def error_of(answer: httpx.Response, status: int) -> tuple[str, str]:
    """Type and message of an error in Anthropic's shape."""
    assert answer.status_code == status, answer.text
    assert answer.headers["x-request-id"]
    told = _ERROR.validate_python(answer.json())
    return told.error.type, told.error.message
