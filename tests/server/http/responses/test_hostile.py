"""Bodies made at random from right and wrong pieces: whatever they are, the answer is no failure of the server."""

import json
import random
from typing import Any

import pytest

from quintet.server.http.anthropic.request import CountTokens, CreateMessage
from quintet.server.http.inputs.body import Body
from quintet.server.http.responses.request import CreateResponse
from tests.server.http.anthropic.anthropic_requests import body as message
from tests.server.http.responses.responses_requests import backend
from tests.server.http.serving import client

COUNT = 1000
FIELDS: dict[str, type[Body]] = {
    "/v1/responses": CreateResponse,
    "/v1/messages": CreateMessage,
    "/v1/messages/count_tokens": CountTokens,
}
WORDS = [
    "", "user", "assistant", "system", "text", "input_text", "output_text", "message", "auto", "none", "disabled", "Hi",
    "ephemeral", "function", "function_call", "reasoning", "allowed_tools", "required", "{}",
    "resp_w0_1", "resp_w9_1_2", "\x00", "é" * 50, "x" * 5000, "<|end|>", "\u202e", "{{ 7 * 7 }}",
]  # fmt: skip
NUMBERS = [0, 1, -1, 2, 0.5, 1.5, 2**31, 2**63, -(2**70), 1e300, 10**400, True, False, None]
KEYS = [
    "type", "role", "content", "text", "format", "effort", "id", "cache_control", "ttl", "annotations", "logprobs",
    "user_id", "include_obfuscation", "refusal", "status", "x", "", "call_id", "name", "arguments", "output", "summary",
    "encrypted_content", "parameters", "strict", "tools", "mode",
]  # fmt: skip


def junk(rng: random.Random, depth: int = 3) -> Any:
    kind = rng.randrange(6 if depth else 2)
    if kind < 2:
        return rng.choice(WORDS if kind else NUMBERS)
    if kind < 4:
        return [junk(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(KEYS): junk(rng, depth - 1) for _ in range(rng.randrange(5))}


def talk(rng: random.Random) -> list[Any]:
    """Messages that are nearly right."""
    made = []
    for _ in range(rng.randrange(1, 4)):
        parts = [{"type": rng.choice(["text", "input_text", "output_text"]), "text": rng.choice(WORDS)}] * 2
        each: Any = {"role": rng.choice(["user", "assistant", "system"]), "content": rng.choice([parts, "Hi"])}
        if rng.random() < 0.3:
            each[rng.choice(KEYS)] = junk(rng)
        elif rng.random() < 0.3:
            made.append({"type": "function_call", "call_id": "a", "name": "f", "arguments": rng.choice(["{}", "{"])})
            each = {"type": "function_call_output", "call_id": "a", "output": rng.choice([parts, "Hi", ""])}
        made.append(each if rng.random() < 0.9 else junk(rng))
    return made


@pytest.mark.parametrize("path", FIELDS)
async def test_nothing_that_is_sent_makes_the_server_fail(path: str) -> None:
    rng = random.Random(path)
    fields: type[Body] = FIELDS[path]
    names = sorted({*fields.model_fields, *fields.unsupported_fields})
    right: dict[str, Any] = {"max_output_tokens": 5, "input": "Hi"}
    if fields is not CreateResponse:
        right = message(max_tokens=5)
    if fields is CountTokens:
        del right["max_tokens"]
    talks = list(right)[-1]
    statuses = set()
    async with client(backend()) as http:
        for _ in range(COUNT):
            body = dict(right)
            if rng.random() < 0.5:
                body[talks] = talk(rng)
            for name in rng.sample(names, rng.randrange(3)):
                body[name] = junk(rng)
            raw = json.dumps(body)
            if rng.random() < 0.05:
                raw = raw[: rng.randrange(len(raw))]
            answer = await http.post(path, content=raw, headers={"content-type": "application/json"})
            assert answer.status_code < 500 and answer.status_code != 422, (raw, answer.text)
            if "stream" not in answer.headers["content-type"]:
                assert answer.json()
            statuses.add(answer.status_code)
    assert {200, 400} <= statuses


async def test_no_id_or_query_makes_the_server_fail() -> None:
    rng = random.Random(1)
    async with client(backend()) as http:
        made = (await http.post("/v1/responses", json={"input": "Hi", "background": True})).json()["id"]
        for _ in range(300):
            name = rng.choice([made, made[:-1], "resp_w1_" + "0" * 48, "%00", "a" * 3000, "..", "resp___", "é"])
            tail = rng.choice(["", "/input_items", "/cancel", "/input_items/", "/x"])
            query = {rng.choice(["stream", "starting_after", "limit", "after", "order", "x"]): rng.choice(WORDS)}
            answer = await http.request(
                rng.choice(["GET", "DELETE", "POST", "PUT"]), f"/v1/responses/{name}{tail}", params=query
            )
            assert answer.status_code < 500 and answer.status_code != 422, answer.text
