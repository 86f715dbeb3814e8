"""How servers are looked at, taken out and brought back; what an administrator may do; the end of a router."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import trustme

from quintet.clients.http_client import HttpClient
from quintet.router.backends import Pool, RouterBackend, address_of
from quintet.router.config import RouterConfig
from tests.router.fakes import EVENTS, SSE, Call, Fake, chunk, routed, until


async def test_a_router_begins_before_its_servers() -> None:
    late = Fake("late", port=0)
    await late.start()
    await late.stop()
    early = Fake("early", has_ready=False)
    await early.start()
    async with routed(backend=[late.url, early.url], wait=False) as router:
        await until(lambda: router.backend(early).up)
        assert (await router.post()).json() == {"by": "early"}, "vLLM's servers have /health alone"
        assert not router.backend(late).up and "no connection" in router.backend(late).unhealthy_reason
        await late.start()
        await until(lambda: router.backend(late).up)
        assert (await router.client.get("/router/backends")).json()["backends"][0]["models"] == ["m"]
    await late.stop()
    await early.stop()


async def test_a_server_that_is_not_ready_is_left_out_and_comes_back() -> None:
    one, two = Fake("one"), Fake("two")
    async with routed(one, two, policy="round_robin") as router:
        one.health = 503
        await until(lambda: not router.backend(one).up)
        assert router.backend(one).unhealthy_reason == "/ready answers 503"
        for _ in range(3):
            assert (await router.post()).json() == {"by": "two"}
        one.health = 200
        await until(lambda: router.backend(one).up)
        assert {(await router.post()).json()["by"] for _ in range(2)} == {"one", "two"}


def test_thresholds_count_looks_in_a_row() -> None:
    url = "http://10.0.0.1:8000"
    backend = RouterBackend(url, Pool.ALL, HttpClient(address_of(url)))
    said = [
        backend.record_health_check((3, 2), trouble)
        for trouble in ("no", "", "no", "no", "", "no", "no", "no", "", "no", "", "")
    ]
    assert [number for number, changed in enumerate(said) if changed] == [1, 7, 11]
    assert backend.up


def test_a_server_that_fails_rests_longer_each_time() -> None:
    url = "http://10.0.0.1:8000"
    backend = RouterBackend(url, Pool.ALL, HttpClient(address_of(url)), up=True)
    rests = []
    for _ in range(9):
        backend.record_failure(100.0, "x")
        rests.append(backend.backoff_until - 100.0)
    assert rests == [0.5, 1, 2, 4, 8, 16, 30, 30, 30] and not backend.usable(100.4)
    backend.record_success()
    assert backend.usable(100.0)


async def test_a_server_that_hides_its_models_is_asked_for_any() -> None:
    async def hides(call: Call) -> None:
        await call.say({"by": "a"})

    fake = Fake(behave=hides, models=())
    async with routed(fake) as router:
        assert (await router.post(json={"model": "whatever", "messages": []})).json() == {"by": "a"}


async def test_servers_are_drained_added_and_removed() -> None:
    hold = asyncio.Event()

    async def wait(call: Call) -> None:
        await hold.wait()
        await call.say({"by": "one"})

    one, two = Fake("one", behave=wait), await Fake("two").start()
    async with routed(one) as router:
        running = asyncio.create_task(router.post())
        await until(lambda: len(one.calls) == 1)
        added = await router.client.post("/router/add", json={"url": two.url})
        assert added.json()["up"] is False
        assert (await router.client.post("/router/add", json={"url": two.url})).status_code == 409
        await until(lambda: router.backend(two).up)
        drained = (await router.client.post("/router/drain", json={"url": one.url})).json()
        assert (drained["draining"], drained["drained"], drained["in_flight"]) == (True, False, 1)
        for _ in range(3):
            assert (await router.post()).json() == {"by": "two"}
        assert (await router.client.post("/router/remove", json={"url": one.url})).json()["in_flight"] == 1
        hold.set()
        assert (await running).json() == {"by": "one"}, "what runs ends as it would"
        await until(lambda: router.server.core.backends.get(one.url) is None)
        states = (await router.client.get("/router/backends")).json()["backends"]
        assert [each["url"] for each in states] == [two.url]
        await router.client.post("/router/drain", json={"url": two.url})
        assert (await router.client.get("/router/backends")).json()["backends"][0]["drained"] is True
        assert (await router.post()).status_code == 503
        await router.client.post("/router/undrain", json={"url": two.url})
        assert (await router.post()).json() == {"by": "two"}
        for order, status in (({"url": "http://10.0.0.9:1"}, 404), ({"url": "x"}, 400), ({"URL": 1}, 400),
                              ({"url": "http://a", "pool": "prefill"}, 400)):  # fmt: skip
            path = "/router/add" if "pool" in order else "/router/drain"
            assert (await router.client.post(path, json=order)).status_code == status, order
        assert (await router.client.get("/router/add")).status_code == 405
    await two.stop()


async def test_who_administers() -> None:
    async with routed(Fake()) as router:
        assert (await router.client.get("/router/backends")).status_code == 200, "this machine's own users"
        passed = await router.client.get("/router/backends", headers={"x-forwarded-for": "10.0.0.1"})
        assert passed.status_code == 403 and "--admin-api-key" in passed.json()["error"]["message"]
    async with routed(Fake(), door={"api_key": ["k"], "admin_api_key": "chief"}) as router:
        for path in ("/router/backends", "/router/drain"):
            method = "GET" if path.endswith("backends") else "POST"
            assert (await router.client.request(method, path)).status_code == 403
            bare = httpx.Request(method, router.url + path)
            assert (await router.client.send(bare)).status_code == 401
        chief = {"authorization": "Bearer chief"}
        assert (await router.client.get("/router/backends", headers=chief)).status_code == 200
        assert (await router.client.get("/metrics", headers={"authorization": ""})).status_code == 401


async def test_a_router_that_ends_takes_nothing_new_and_finishes_what_runs() -> None:
    go_on = asyncio.Event()

    async def behave(call: Call) -> None:
        await call.raw(SSE + chunk(EVENTS[0]))
        await go_on.wait()
        await call.raw(chunk(EVENTS[1]) + b"0\r\n\r\n")

    fake = Fake(behave=behave)
    async with routed(fake) as router:
        async with router.client.stream("POST", "/v1/completions", json={"model": "m", "prompt": "x"}) as answer:
            pieces = answer.aiter_bytes()
            assert await anext(pieces) == EVENTS[0]
            router.server.stop("SIGTERM")
            refused = await router.post()
            assert refused.status_code == 503 and refused.headers["connection"] == "close"
            assert (await router.client.get("/ready")).status_code == 503
            go_on.set()
            assert b"".join([each async for each in pieces]) == EVENTS[1]
        await until(lambda: router.server._server.should_exit)


async def test_an_answer_that_does_not_end_in_time_is_cut_and_one_that_has_not_begun_is_an_error() -> None:
    async def stalls(call: Call) -> None:
        if call.json.get("stream"):
            await call.raw(SSE + chunk(EVENTS[0]))
        await asyncio.sleep(60)

    async with routed(Fake(behave=stalls), door={"drain_timeout": 0.05}) as router:
        silent = asyncio.create_task(router.post())
        async with router.client.stream(
            "POST", "/v1/chat/completions", json={"model": "m", "messages": [], "stream": True}
        ) as answer:
            pieces = answer.aiter_bytes()
            assert await anext(pieces) == EVENTS[0]
            await until(lambda: router.server.core.queue.in_flight == 2)
            router.server.stop("SIGTERM")
            refused = await silent
            with pytest.raises(httpx.RemoteProtocolError):
                await anext(pieces)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"


async def test_a_body_that_ends_after_the_router_began_to_end_is_refused() -> None:
    fake = Fake()
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b'{"model": "m", '
        begun.set()
        await go_on.wait()
        yield b'"prompt": "x"}'

    async with routed(fake) as router:
        headers = {"Content-Type": "application/json"}
        late = asyncio.create_task(router.client.post("/v1/completions", content=body(), headers=headers))
        await begun.wait()
        router.server.core.draining = True
        go_on.set()
        refused = await late
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
    assert fake.calls == []


@pytest.mark.parametrize(("given", "said"), [
    ({}, "there is no server"),
    ({"prefill": ["http://a"]}, "belong together"),
    ({"backend": ["http://a"], "prefill": ["http://b"], "decode": ["http://c"]}, "a router for each"),
    ({"backend": ["http://a", "http://a"]}, "named twice"),
    ({"backend": ["a:8000"]}, "did you mean 'http://a:8000'"),
    ({"backend": ["http://a"], "policy": "prefx"}, "did you mean 'prefix'"),
    ({"backend": ["http://a"], "session_header": "a b"}, "X-Session-Id"),
    ({"backend": ["http://a"], "backend_api_key": "a\nb"}, "one line"),
])  # fmt: skip
def test_what_cannot_be_is_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RouterConfig(**given)  # type: ignore[arg-type]


def test_words_of_other_routers_are_taken() -> None:
    config = RouterConfig(backend=("http://a/v1,http://b:9/",), policy="cache_aware", decode_policy="roundrobin")
    assert config.backend == ("http://a", "http://b:9")
    assert (config.policy, config.decode_policy) == ("prefix", "round_robin")


async def test_tls_at_the_door_and_behind_it(tmp_path: Path) -> None:
    """A router before a router: the one behind shows a certificate, whose authority the first knows or does not."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    door = {"ssl_certfile": str(tmp_path / "cert.pem"), "ssl_keyfile": str(tmp_path / "key.pem")}
    async with routed(Fake(), door=door) as behind:
        url = f"https://127.0.0.1:{behind.port}"
        async with routed(backend=[url], backend_ca_certs=str(tmp_path / "ca.pem")) as before:
            assert (await before.post()).json() == {"by": "a"}
            assert [each["id"] for each in (await before.client.get("/v1/models")).json()["data"]] == ["m"]
        async with routed(backend=[url], wait=False) as stranger:
            (backend,) = stranger.server.core.backends
            await until(lambda: "certificate" in backend.unhealthy_reason)
            assert not backend.up and (await stranger.post()).status_code == 503
