"""A request is sent again where it was not answered, and never where it may have been; every one is answered once."""

import asyncio
import itertools

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import APIError, AsyncOpenAI

from tests.router.fakes import DONE, EVENTS, SSE, Behaviour, Call, Fake, chunk, routed, until

TALK = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
STORED = {"model": "m", "input": "Hi"}


async def cut(call: Call) -> None:
    call.cut()


async def busy(call: Call) -> None:
    await call.say({"error": {"message": "full"}}, 429, "retry-after: 7\r\n")


async def loading(call: Call) -> None:
    await call.say({"error": {"message": "loads"}}, 503, "retry-after: 7\r\n")


async def bad_gateway(call: Call) -> None:
    await call.say({}, 502)


async def half_a_head(call: Call) -> None:
    await call.raw(b"HTTP/1.1 200 OK\r\ncontent-le")
    call.cut()


async def nonsense(call: Call) -> None:
    await call.raw(b"\x00\x01 nothing\r\n\r\n")


NOT_ANSWERED = (cut, busy, loading, bad_gateway, half_a_head, nonsense)


@pytest.mark.parametrize("behave", NOT_ANSWERED, ids=lambda each: each.__name__)
async def test_another_is_asked_where_one_did_not_answer(behave: object) -> None:
    bad, good = Fake("bad", behave=behave), Fake("good")  # type: ignore[arg-type]
    async with routed(bad, good, policy="round_robin") as router:
        assert (await router.post()).json() == {"by": "good"}
        assert (len(good.calls), router.server.core.totals.retries) == (1, 1)
        calls = len(bad.calls)
        assert calls == 1 or (calls == 2 and behave is cut), "a kept connection that ends may have been closed before"
        if behave is not busy:
            assert (await router.post()).json() == {"by": "good"}
            assert len(bad.calls) == calls, "it is left alone for a while"


async def test_what_is_stored_is_sent_again_only_where_it_was_certainly_not_done() -> None:
    for behave, repeats in ((cut, False), (half_a_head, False), (bad_gateway, False), (busy, True), (loading, True)):
        bad, good = Fake("bad", behave=behave), Fake("good")
        async with routed(bad, good, policy="round_robin") as router:
            answer = await router.post("/v1/responses", json=STORED)
            assert len(bad.calls) == 1 and len(good.calls) == repeats, behave
            assert (answer.status_code == 200) is repeats
            if behave is cut:
                assert answer.status_code == 502 and "may have done" in answer.json()["error"]["message"]
            if behave is bad_gateway:
                assert answer.status_code == 502 and answer.json() == {}, "the server's own words"
            unstored = await router.post("/v1/responses", json={**STORED, "store": False})
            assert unstored.json() == {"by": "good"}


async def test_a_server_that_is_not_there_is_no_reason_to_fail() -> None:
    one, two = Fake("one"), Fake("two")
    async with routed(one, two, policy="round_robin", health_check_interval=30) as router:
        await one.stop()
        for _ in range(4):
            assert (await router.post("/v1/responses", json=STORED)).json() == {"by": "two"}
        assert router.backend(one).up and router.backend(one).counts.failures["unreached"] == 1, "it rests"
        await two.stop()
        answer = await router.post()
        assert answer.status_code == 503 and answer.json()["error"]["code"] in ("backend_unreachable", "no_backend")
        assert answer.headers["retry-after"] == "1"


async def test_the_last_answer_is_passed_on_where_nobody_takes_it() -> None:
    async with routed(Fake("one", behave=busy), Fake("two", behave=busy)) as router:
        answer = await router.post()
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
        assert answer.json() == {"error": {"message": "full"}}


async def test_no_more_are_asked_than_are_allowed() -> None:
    fakes = [Fake(str(number), behave=busy) for number in range(4)]
    async with routed(*fakes, max_retries=1) as router:
        assert (await router.post()).status_code == 429
        assert sum(len(each.calls) for each in fakes) == 2


async def test_a_connection_that_was_closed_when_it_was_used_again_is_no_failure() -> None:
    """The server closes it after an answer, as servers do with idle ones, and the router does not know yet."""
    fake = Fake()
    async with routed(fake) as router:
        assert (await router.post()).status_code == 200

        async def closing(call: Call) -> None:  # on the connection that was kept alone
            fake.behave = None
            call.cut()

        fake.behave = closing
        assert (await router.post()).json() == {"by": "a"}
        assert router.backend(fake).counts.failures["broken"] == 0 and len(fake.calls) == 3


async def test_who_may_not_be_asked_twice_gets_a_connection_of_its_own() -> None:
    fake = Fake()
    async with routed(fake) as router:
        await router.post()
        await router.post("/v1/responses", json=STORED)
        ports = [call.writer.get_extra_info("peername")[1] for call in fake.calls]
        assert ports[0] != ports[1]


async def test_a_stream_that_breaks_off_says_so_and_is_not_begun_again() -> None:
    async def breaking(call: Call) -> None:
        await call.raw(SSE + chunk(EVENTS[0]) + chunk(EVENTS[1]))
        call.cut()

    one, two = Fake("one", behave=breaking), Fake("two", behave=breaking)
    async with (
        routed(one, two) as router,
        AsyncOpenAI(base_url=f"{router.url}/v1", api_key="k", max_retries=0) as client,
    ):
        said = []
        with pytest.raises(APIError, match="in the middle of the answer"):
            async for each in await client.chat.completions.create(stream=True, **TALK):  # type: ignore[call-overload]
                said.append(each.choices[0].delta.content)
        assert said == ["0", "1"]
        assert len(one.calls) + len(two.calls) == 1
        message = await router.client.post("/v1/messages", json={**TALK, "stream": True})
        assert message.text.endswith('"}}\n\n') and "event: error\ndata: " in message.text


async def test_what_breaks_off_within_an_event_or_is_no_stream_is_cut() -> None:
    async def within(call: Call) -> None:
        await call.raw(SSE + chunk(EVENTS[0]) + chunk(EVENTS[1][:9]))
        call.cut()

    async def whole(call: Call) -> None:
        await call.raw(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{"a"')
        call.cut()

    for behave in (within, whole):
        fake = Fake(behave=behave)
        async with routed(fake) as router:
            with pytest.raises(httpx.RemoteProtocolError):
                await router.post()
            assert len(fake.calls) == 1
            assert router.backend(fake).counts.failures["mid_stream"] == 1
            await until(lambda: router.server.core.queue.in_flight == 0)


async def test_who_says_nothing_is_given_up() -> None:
    async def silent(call: Call) -> None:
        await asyncio.sleep(60)

    async def stops(call: Call) -> None:
        await call.raw(SSE + chunk(EVENTS[0]))
        await asyncio.sleep(60)

    slow, other = Fake("slow", behave=silent), Fake("other", behave=silent)
    async with routed(slow, other, first_byte_timeout=0.2, idle_timeout=0.2) as router:
        answer = await router.post()
        assert answer.status_code == 504 and len(slow.calls) + len(other.calls) == 1, "it may still compute"
        slow.behave = other.behave = stops
        answer = await router.post()
        assert answer.text.startswith(EVENTS[0].decode()) and "for too long" in answer.text
        assert answer.text.endswith(DONE.decode())


async def test_servers_die_and_come_back_under_load() -> None:
    """Each request is answered once: whole, or with an error, and none is begun at two servers after its first byte."""
    served: list[str] = []

    async def behave(call: Call) -> None:
        served.append(call.json["user"])
        await call.raw(SSE)
        for each in EVENTS:
            await call.raw(chunk(each))
            await asyncio.sleep(0.002)
        await call.raw(chunk(DONE) + b"0\r\n\r\n")

    fakes = [Fake(str(number), behave=behave) for number in range(3)]
    ends: dict[str, list[str]] = {"whole": [], "told": [], "refused": []}

    async def ask(number: int) -> None:
        answer = await router.post(json={**TALK, "user": str(number), "stream": True})
        text = answer.text
        if answer.status_code == 200 and text == b"".join([*EVENTS, DONE]).decode():
            ends["whole"].append(str(number))
        elif answer.status_code == 200:
            assert text.count("[DONE]") == 1 and '"code":"backend_failed"' in text
            ends["told"].append(str(number))
        else:
            assert answer.status_code in (502, 503)
            ends["refused"].append(str(number))

    async with routed(*fakes, policy="least_loaded") as router:
        asked = []
        for number in range(90):
            asked.append(asyncio.create_task(ask(number)))
            await asyncio.sleep(0.001)
            if number % 30 == 10:
                await fakes[number // 30].stop()
            if number % 30 == 25:
                await fakes[number // 30].start()
        await asyncio.gather(*asked)
        assert sorted(map(int, itertools.chain(*ends.values()))) == list(range(90))
        assert len(ends["whole"]) > 45
        for each in ends["whole"]:
            assert served.count(each) >= 1
        await until(lambda: all(each.up for each in router.server.core.backends))


@settings(max_examples=8, deadline=None)
@given(st.lists(st.lists(st.sampled_from([*range(len(NOT_ANSWERED)), -1, -1]), min_size=3, max_size=3),
                min_size=4, max_size=12))  # fmt: skip
def test_a_request_is_answered_exactly_once_whatever_servers_do(plan: list[list[int]]) -> None:
    """A plan says for each request how each of three servers behaves, in the order in which they are asked."""

    async def main() -> None:
        asked: list[str] = []  # servers, in order
        answered: list[int] = []

        def behave(name: str) -> Behaviour:
            async def answer(call: Call) -> None:
                number = call.json["number"]
                if name not in asked:
                    asked.append(name)
                how = plan[number][asked.index(name)]
                if how >= 0:
                    return await NOT_ANSWERED[how](call)
                answered.append(number)
                await call.say({"answer": number})

            return answer

        fakes = [Fake(name, behave=behave(name)) for name in "abc"]
        async with routed(*fakes, policy="random") as router:
            for number, row in enumerate(plan):
                asked.clear()
                for each in router.server.core.backends:  # none rests because of the request before
                    each.record_success()
                answer = await router.post(json={**TALK, "number": number})
                if -1 in row:
                    assert answer.json() == {"answer": number} and len(asked) == row.index(-1) + 1
                else:
                    assert answer.status_code in (429, 502, 503) and len(asked) == 3
            assert answered == [number for number, row in enumerate(plan) if -1 in row]

    asyncio.run(main())
