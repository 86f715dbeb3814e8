"""Callers of one router with keys of their own stay apart at the servers behind it (attack A4, A15)."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from quintet.server.http.middleware.auth import OWNER_HEADER
from tests.router.fakes import Call, Fake, Routed, routed
from tests.server.fakes import FakeBackend
from tests.server.http.serving import client

BODY = {"input": "Hi", "max_output_tokens": 1}
NOT_PASSED = ("host", "content-length", "connection", "transfer-encoding")


class Served(Fake):
    """A server of quintet's, with a fake engine, behind a socket."""

    def __init__(self, http: httpx.AsyncClient, engine: FakeBackend) -> None:
        super().__init__("real", models=("tiny",), behave=self.ask)
        self.http, self.engine = http, engine

    async def ask(self, call: Call) -> None:
        headers = [each for each in call.headers if each[0] not in NOT_PASSED]
        answer = await self.http.request(call.method, call.path, headers=headers, content=call.body)
        lines = "".join(f"{name}: {answer.headers[name]}\r\n" for name in (OWNER_HEADER,) if name in answer.headers)
        await call.say(answer.json(), answer.status_code, lines)


@contextlib.asynccontextmanager
async def servers(num: int = 1, **door: Any) -> AsyncIterator[list[Served]]:
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for _ in range(num):
            engine = FakeBackend()
            found.append(Served(await stack.enter_async_context(client(engine, **door)), engine))
        yield found


def two_keys(*fakes: Fake, backend_api_key: str | None = "behind", **config: Any) -> Any:
    return routed(*fakes, door={"api_key": ["a", "b"]}, backend_api_key=backend_api_key, **config)


async def asked(router: Routed, key: str, method: str, path: str, **more: Any) -> httpx.Response:
    return await router.client.request(method, path, headers={"authorization": f"Bearer {key}"}, **more)


async def seen(router: Routed, key: str, response_id: str, item_id: str) -> dict[str, int]:
    """Statuses of all the ways to a response."""
    path, go_on = f"/v1/responses/{response_id}", {**BODY, "previous_response_id": response_id}
    reference = {**BODY, "input": [{"type": "item_reference", "id": item_id}]}
    asks = {
        "read": ("GET", path, None),
        "items": ("GET", path + "/input_items", None),
        "go on": ("POST", "/v1/responses", go_on),
        "count": ("POST", "/v1/responses/input_tokens", {"input": "Hi", "previous_response_id": response_id}),
        "refer": ("POST", "/v1/responses", reference),
        "refer and count": ("POST", "/v1/responses/input_tokens", {"input": reference["input"]}),
        "delete": ("DELETE", path, None),
    }
    return {
        name: (await asked(router, key, method, where, **({} if body is None else {"json": body}))).status_code
        for name, (method, where, body) in asks.items()
    }


@pytest.mark.parametrize("restarted", [False, True], ids=["same_router", "router_restarted"])
@pytest.mark.parametrize("keys", [["behind"], ["behind", "other"], []], ids=["one_key", "two_keys", "no_key"])
async def test_a_response_is_its_callers_alone(keys: list[str], restarted: bool) -> None:
    """Also where the other caller is the first who asks a router that knows nothing of it."""
    async with servers(api_key=keys) as [server], contextlib.AsyncExitStack() as stack:
        router = await stack.enter_async_context(two_keys(server))
        made = (await asked(router, "a", "POST", "/v1/responses", json=BODY)).json()
        ids = made["id"], made["output"][0]["id"]
        if restarted:
            await stack.aclose()
            await server.start()
            router = await stack.enter_async_context(two_keys(server))
        assert set((await seen(router, "b", *ids)).values()) == {404}
        assert set((await seen(router, "a", *ids)).values()) == {200}


async def test_callers_share_no_cached_prompts_and_their_salt_is_their_own() -> None:
    async with servers(api_key=["behind"]) as [server]:
        for _ in range(2):  # a router that is started anew names them alike
            await server.start()
            async with two_keys(server) as router:
                for key in ("a", "b"):
                    await asked(router, key, "POST", "/v1/responses", json=BODY)
        a, b, a_again, b_again = (each.prompt.cache_salt for each in server.engine.submitted)
        assert a and b and (a, b) == (a_again, b_again) and a != b


async def test_keys_that_are_passed_on_are_the_same_owners_with_and_without_the_router() -> None:
    async with servers(api_key=["a", "b"]) as [server], two_keys(server, backend_api_key=None) as router:
        made = (await asked(router, "a", "POST", "/v1/responses", json=BODY)).json()["id"]
        for key, status in (("a", 200), ("b", 404)):
            direct = await server.http.get(f"/v1/responses/{made}", headers={"authorization": f"Bearer {key}"})
            assert direct.status_code == status


async def test_a_caller_cannot_name_another_owner() -> None:
    """Neither at the router, which writes the header itself, nor at a server, where it divides what is one key's."""
    async with servers(api_key=["behind", "other"]) as [server], two_keys(server) as router:
        made = (await asked(router, "a", "POST", "/v1/responses", json=BODY)).json()["id"]
        name = server.calls[-1].header(OWNER_HEADER)
        assert name is not None and len(name) == 64
        at_router = {"authorization": "Bearer b", OWNER_HEADER: name}
        assert (await router.client.get(f"/v1/responses/{made}", headers=at_router)).status_code == 404
        at_server = {"authorization": "Bearer other", OWNER_HEADER: name}
        assert (await server.http.get(f"/v1/responses/{made}", headers=at_server)).status_code == 404


async def test_a_server_that_separates_no_owners_is_not_believed_by_a_new_router() -> None:
    """As vLLM's: it answers any caller. The router that saw the response being made still knows its owner."""

    async def behave(call: Call) -> None:
        await call.say({"id": "resp_1", "output": []})

    server = Fake(behave=behave)
    async with two_keys(server) as router:
        await asked(router, "a", "POST", "/v1/responses", json={**BODY, "model": "m"})
        statuses = [(await asked(router, key, "GET", "/v1/responses/resp_1")).status_code for key in "ba"]
        assert statuses == [404, 200]
        more = {**BODY, "model": "m", "previous_response_id": "resp_1"}
        assert [(await asked(router, key, "POST", "/v1/responses", json=more)).status_code for key in "ba"] == [
            404,
            200,
        ]
    async with two_keys(await server.start()) as router:
        assert [(await asked(router, key, "GET", "/v1/responses/resp_1")).status_code for key in "ba"] == [404, 404]


async def test_counting_asks_the_server_that_keeps_the_response() -> None:
    async with servers(2, api_key=["behind"]) as both, two_keys(*both, policy="round_robin") as router:
        made = (await asked(router, "a", "POST", "/v1/responses", json=BODY)).json()["id"]
        body = {"input": "Hi", "previous_response_id": made}
        for _ in range(3):
            assert (await asked(router, "a", "POST", "/v1/responses/input_tokens", json=body)).status_code == 200


async def test_a_key_that_is_listed_in_connection_still_reaches_the_server() -> None:
    server = Fake()
    async with routed(server, door={"api_key": ["a"]}) as router:
        headers = {"connection": "authorization, x-other", "x-other": "y"}
        assert (await router.post(headers=headers)).status_code == 200
        assert server.calls[-1].header("authorization") == "Bearer a" and server.calls[-1].header("x-other") is None
