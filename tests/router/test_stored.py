"""Responses that a server keeps: who made one is asked for it, also by a router that has been started anew."""

import asyncio

from tests.router.fakes import Call, Fake, chunk, routed, until

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def keeper(name: str) -> Fake:
    made: list[str] = []

    async def behave(call: Call) -> None:
        found = call.path.removeprefix("/v1/responses").partition("?")[0].strip("/").split("/")[0]
        if call.method == "POST" and not found:
            made.append(f"resp_{name}{len(made)}")
            if call.json.get("stream"):
                event = b'event: response.created\ndata: {"type":"response.created","response":{"id": "%s"}}\n\n'
                text = event % made[-1].encode()
                await call.raw(HEAD + chunk(text[:60]) + chunk(text[60:]) + b"0\r\n\r\n")
                return
            await call.say({"previous_response_id": "resp_x", "id": made[-1], "by": name})
        elif found in made:
            await call.say({"id": found, "by": name, "how": f"{call.method} {call.path}"})
        else:
            await call.say({"error": {"message": "not here"}}, 404)

    return Fake(name, behave=behave)


async def test_a_response_is_asked_of_who_made_it() -> None:
    one, two = keeper("one"), keeper("two")
    async with routed(one, two, policy="round_robin") as router:
        made = [(await router.post("/v1/responses", json={"model": "m", "input": "x"})).json() for _ in range(4)]
        assert {each["by"] for each in made} == {"one", "two"}
        streamed = await router.post("/v1/responses", json={"model": "m", "input": "x", "stream": True})
        ids = {each["id"]: each["by"] for each in made}
        ids[streamed.text.partition('"id": "')[2].partition('"')[0]] = "one"
        one.calls.clear()
        two.calls.clear()
        for name, by in ids.items():
            path = f"/v1/responses/{name}"
            for method, target in (("GET", path + "?stream=false"), ("GET", path + "/input_items"),
                                   ("POST", path + "/cancel"), ("DELETE", path)):  # fmt: skip
                assert (await router.client.request(method, target)).json()["how"] == f"{method} {target}"
            after = await router.post("/v1/responses", json={"model": "m", "input": "y", "previous_response_id": name})
            assert after.json()["by"] == by
        assert len(one.calls) + len(two.calls) == 5 * len(ids), "none was looked for"


async def test_a_new_router_looks_for_it() -> None:
    one, two = keeper("one"), keeper("two")
    async with routed(one, two) as router:
        made = (await router.post("/v1/responses", json={"model": "m", "input": "x"})).json()
    for each in (one, two):
        await each.start()
    async with routed(one, two) as router:
        for _ in range(2):
            assert (await router.client.get(f"/v1/responses/{made['id']}")).json()["by"] == made["by"]
        missing = await router.client.get("/v1/responses/resp_none")
        assert missing.status_code == 404 and "resp_none" in missing.json()["error"]["message"]


async def test_a_keeper_that_is_away_is_said_and_one_that_drains_is_asked() -> None:
    one, two = keeper("one"), keeper("two")
    async with routed(one, two, policy="round_robin") as router:
        made = (await router.post("/v1/responses", json={"model": "m", "input": "x"})).json()
        where = one if made["by"] == "one" else two
        await router.client.post("/router/drain", json={"url": where.url})
        assert (await router.client.get(f"/v1/responses/{made['id']}")).json()["by"] == made["by"]
        await where.stop()
        await until(lambda: not router.backend(where).up)
        away = await router.client.get(f"/v1/responses/{made['id']}")
        assert away.status_code == 503 and "keeps this response" in away.json()["error"]["message"]


async def test_one_key_does_not_see_anothers() -> None:
    async with routed(keeper("one"), door={"api_key": ["a", "b"]}, backend_api_key="behind") as router:
        made = (await router.post("/v1/responses", json={"model": "m", "input": "x"})).json()
        path = f"/v1/responses/{made['id']}"
        assert (await router.client.get(path)).status_code == 200
        assert (await router.client.get(path, headers={"authorization": "Bearer b"})).status_code == 404


async def test_a_stored_response_is_asked_once_though_its_client_leaves() -> None:
    came = asyncio.Event()

    async def behave(call: Call) -> None:
        came.set()
        await asyncio.sleep(0.05)
        await call.say({"id": "resp_z"})

    fake = Fake(behave=behave)
    async with routed(fake, Fake("other")) as router:
        asking = asyncio.create_task(router.post("/v1/responses", json={"model": "m", "input": "x", "store": True}))
        await asyncio.wait({asking, asyncio.create_task(came.wait())}, return_when=asyncio.FIRST_COMPLETED)
        asking.cancel()
        await until(lambda: router.server.core.queue.in_flight == 0)
        assert len(fake.calls) <= 1
