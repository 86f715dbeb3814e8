"""Prompts computed by one server and answered by another, by vLLM's protocol; what happens where one fails."""

import json

import pytest

from quintet.router.request_info import prefill_body, with_pages
from tests.router.fakes import DONE, EVENTS, Call, Fake, routed

TALK = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
PAGES = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [3, 1], "remote_engine_id": "p-1",
         "remote_host": "10.0.0.1", "remote_port": 5600, "tp_size": 1}  # fmt: skip
ASKED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
         "remote_host": None, "remote_port": None}  # fmt: skip


async def computes(call: Call) -> None:
    await call.say({"id": "p", "choices": [], "kv_transfer_params": PAGES})


async def cut(call: Call) -> None:
    call.cut()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_the_first_server_keeps_the_pages_and_the_second_is_told_where(path: str) -> None:
    prefill, decode = Fake("p", behave=computes), Fake("d", behave=lambda call: call.stream([*EVENTS, DONE]))
    body = {**TALK, "stream": True, "stream_options": {"include_usage": True}, "min_tokens": 5, "seed": 7,
            "max_completion_tokens": 8}  # fmt: skip
    async with routed(prefill, decode, prefill=[prefill], decode=[decode]) as router:
        answer = await router.post(path, json=body, headers={"x-request-id": "one-name"})
        assert answer.text == b"".join([*EVENTS, DONE]).decode()
        (first,), (second,) = prefill.calls, decode.calls
        assert first.path == second.path == path
        kept = {name: body[name] for name in ("model", "messages", "seed")}
        assert first.json == {
            **kept, "max_tokens": 1, "max_completion_tokens": 1, "stream": False, "kv_transfer_params": ASKED
        }  # fmt: skip
        assert second.json == {**body, "kv_transfer_params": PAGES}
        assert first.header("x-request-id") == second.header("x-request-id") == "one-name"


def test_bodies_are_spliced_and_not_written_anew() -> None:
    for body in (b'{"a":1.10, "b":"\\u00e9"}', b" { } \n", b'{"prompt":"}"}\r\n'):
        told = with_pages(body, b'{"x": 1e2}')
        assert json.loads(told) == {**json.loads(body), "kv_transfer_params": {"x": 100.0}}
        assert told.startswith(body.rstrip()[:-1].rstrip())
    assert "max_completion_tokens" not in json.loads(prefill_body(b'{"max_tokens": 7}'))
    assert b"1.10" in prefill_body(b'{"temperature":1.10}'), "what is not changed stays as it was written"


async def test_what_needs_no_prompt_elsewhere_is_answered_at_once() -> None:
    prefill, decode = Fake("p", behave=computes), Fake("d")
    async with routed(prefill, decode, prefill=[prefill], decode=[decode]) as router:
        for path in ("/v1/embeddings", "/tokenize", "/v1/responses"):
            assert (await router.post(path, json={"model": "m", "input": "x"})).json() == {"by": "d"}
        assert (await router.post(json={**TALK, "n": 2})).json() == {"by": "d"}, "pages are one completion's"
        assert prefill.calls == []


async def test_no_caller_says_where_pages_are() -> None:
    prefill, decode = Fake("p", behave=computes), Fake("d")
    async with routed(prefill, decode, prefill=[prefill], decode=[decode]) as router:
        for name in ("kv_transfer_params", "kv\\u005ftransfer_params"):
            body = f'{{"model":"m","{name}":{{"remote_host":"10.9.9.9"}}}}'
            answer = await router.post(json=None, content=body)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "kv_transfer_params"
        assert prefill.calls == decode.calls == []


async def test_another_computes_the_prompt_where_one_fails() -> None:
    bad, good, decode = Fake("bad", behave=cut), Fake("good", behave=computes), Fake("d")
    async with routed(
        bad, good, decode, prefill=[bad, good], decode=[decode], prefill_policy="round_robin", prefill_failure="fail"
    ) as router:
        assert (await router.post(json=TALK)).json() == {"by": "d"}
        assert decode.calls[0].json["kv_transfer_params"] == PAGES and len(good.calls) == 1


@pytest.mark.parametrize("failure", ["cut", "500", "nonsense", "null", "gone"])
async def test_where_no_prompt_is_computed_the_second_does_it_or_nobody(failure: str) -> None:
    async def fails(call: Call) -> None:
        if failure == "cut":
            return call.cut()
        said = {"500": {}, "nonsense": [], "null": {"kv_transfer_params": None}}[failure]
        await call.say(said, 500 if failure == "500" else 200)

    for policy in ("recompute", "fail"):
        prefill, decode = Fake("p", behave=fails), Fake("d")
        async with routed(
            prefill, decode, prefill=[prefill], decode=[decode], prefill_failure=policy, health_check_interval=30
        ) as router:
            if failure == "gone":
                await prefill.stop()
            answer = await router.post(json=TALK)
            if policy == "recompute" or failure == "null":
                assert answer.json() == {"by": "d"} and "kv_transfer_params" not in decode.calls[0].json
                assert router.server.core.totals.recomputed == 1
            else:
                assert answer.status_code == 503 and answer.json()["error"]["code"] == "prefill_failed"
                assert decode.calls == []


async def test_what_is_wrong_with_a_request_is_said_by_the_first() -> None:
    async def refuses(call: Call) -> None:
        await call.say({"error": {"message": "max_model_len"}}, 400)

    prefill, decode = Fake("p", behave=refuses), Fake("d")
    async with routed(prefill, decode, prefill=[prefill], decode=[decode]) as router:
        answer = await router.post(json=TALK)
        assert answer.status_code == 400 and answer.json() == {"error": {"message": "max_model_len"}}
        assert len(prefill.calls) == 1 and decode.calls == []
        assert router.backend(decode).in_flight == router.backend(prefill).in_flight == 0


async def test_another_that_answers_gets_pages_of_its_own() -> None:
    """The first may have had them fetched and given away."""
    prefill, bad, good = Fake("p", behave=computes), Fake("bad", behave=cut), Fake("good")
    async with routed(prefill, bad, good, prefill=[prefill], decode=[bad, good], decode_policy="round_robin") as router:
        assert (await router.post(json=TALK)).json() == {"by": "good"}
        assert len(prefill.calls) == 2 and good.calls[0].json["kv_transfer_params"] == PAGES


async def test_prompts_go_where_their_beginning_is_and_answers_to_who_has_least() -> None:
    one, two = Fake("p1", behave=computes), Fake("p2", behave=computes)
    decode = [Fake("d1"), Fake("d2")]
    async with routed(one, two, *decode, prefill=[one, two], decode=decode) as router:
        for _ in range(12):
            await router.post(json={**TALK, "messages": [{"role": "user", "content": "a" * 900}]})
        assert sorted(len(each.calls) for each in (one, two)) == [0, 12]
        assert all(each.calls for each in decode)
