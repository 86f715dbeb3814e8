"""Requests to Ollama's routes, and their JSON lines."""

import json
from typing import Any

import httpx

from tests.server.fakes import MODEL, FakeBackend
from tests.server.http.serving import client

SAY = "Nice to meet you 👋🏽"


def backend(**settings: Any) -> FakeBackend:
    """Says SAY."""
    fake = FakeBackend(**settings)
    fake.reply = fake.encode(SAY)
    return fake


async def ask(path: str, fake: FakeBackend | None = None, method: str = "POST", **body: Any) -> httpx.Response:
    async with client(fake or backend()) as http:
        return await http.request(method, path, json={"model": MODEL, **body})


async def chat(fake: FakeBackend | None = None, text: str = "Hi", **body: Any) -> httpx.Response:
    return await ask("/api/chat", fake, **{"messages": [{"role": "user", "content": text}], **body})


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    """The objects of a stream."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in response.text.splitlines()]


def error_of(response: httpx.Response) -> tuple[int, str]:
    """Status and message of an error in Ollama's form, which has nothing else."""
    assert list(response.json()) == ["error"], response.text
    return response.status_code, response.json()["error"]
