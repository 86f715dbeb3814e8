"""Fields that nobody knows are left out and named; under --strict-requests they are refused."""

import asyncio
import logging
import sys
from typing import Any

import openai
import pytest
from starlette.requests import Request

from quintet.server.http.inputs.unknown_fields import HEADER, UnknownFieldLog, UnknownFields
from tests.server.fakes import FakeBackend
from tests.server.http.serving import chat, client, events, serving

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
MESSAGE = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}

# path, body, what the header says of it
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "x", "max_token": 1}, "max_token (did you mean max_tokens?)"),
    ("/v1/completions", {"prompt": "x", "qqqq": {"secret": 1}}, "qqqq"),
    ("/v1/chat/completions", chat(temprature=0), "temprature (did you mean temperature?)"),
    ("/v1/chat/completions", chat(features={"web_search": False}), "features"),
    ("/v1/chat/completions", chat(stream=True, stream_options={"zzzz": 1}), "stream_options.zzzz"),
    ("/v1/chat/completions", chat(chat_template_kwargs={"qqqq": 1}), "chat_template_kwargs.qqqq"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x", "zzzz": 1}]}, "messages[0].zzzz"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "zzzz": 1}]}]},
        "messages[0].content[0].zzzz",
    ),
    (
        "/v1/chat/completions",
        chat(tools=[{**TOOL, "zzzz": 1, "function": {**TOOL["function"], "qqqq": 1}}], tool_choice="none"),
        "tools[0].zzzz, tools[0].function.qqqq",
    ),
    (
        "/v1/chat/completions",
        chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "zzzz": 1}}),
        "response_format.json_schema.zzzz",
    ),
    ("/v1/chat/completions", chat(structured_outputs={"regex": "a", "zzzz": 1}), "structured_outputs.zzzz"),
    ("/v1/responses", {"input": "x", "zzzz": 1}, "zzzz"),
    ("/v1/responses", {"input": [{"role": "user", "content": "x", "zzzz": 1}]}, "input[0].zzzz"),
    ("/v1/responses/input_tokens", {"input": "x", "zzzz": 1}, "zzzz"),
    ("/v1/messages", {**MESSAGE, "metadata": {"zzzz": 1}}, "metadata.zzzz"),
    ("/v1/messages", {**MESSAGE, "messages": [{"role": "user", "content": "x", "zzzz": 1}]}, "messages[0].zzzz"),
    ("/v1/messages/count_tokens", {"messages": MESSAGE["messages"], "zzzz": 1}, "zzzz"),
    ("/tokenize", {"prompt": "x", "zzzz": None}, "zzzz"),
    ("/detokenize", {"tokens": [1], "zzzz": 1}, "zzzz"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "named"), CASES, ids=lambda each: each if isinstance(each, str) else "")
async def test_an_unknown_field_is_left_out_and_named(path: str, body: dict[str, Any], named: str) -> None:
    async with client() as http:
        response = await http.post(path, json=body)
        assert response.status_code == 200, response.text
        assert response.headers[HEADER] == named


@pytest.mark.parametrize(("path", "body", "named"), CASES, ids=lambda each: each if isinstance(each, str) else "")
async def test_it_is_refused_where_requests_are_strict(path: str, body: dict[str, Any], named: str) -> None:
    async with client(strict_requests=True) as http:
        response = await http.post(path, json=body)
        assert response.status_code == 400 and "unknown " in response.json()["error"]["message"], response.text
        assert HEADER not in response.headers


async def test_what_is_left_out_reaches_nobody() -> None:
    """Templates write a tool as it came."""
    prompts = []
    for function in (TOOL["function"], {**TOOL["function"], "zzzz": "secret"}):
        fake = FakeBackend()
        async with client(fake) as http:
            asked = chat(tools=[{"type": "function", "function": dict(function)}], tool_choice="required")
            assert (await http.post("/v1/chat/completions", json=asked)).status_code == 200
        prompts.append(fake.submitted[0].prompt.token_ids)
    assert prompts[0] == prompts[1]


async def test_a_known_field_that_is_not_served_is_still_refused_by_name() -> None:
    async with client() as http:
        response = await http.post("/v1/chat/completions", json=chat(zzzz=1, audio={"voice": "x"}))
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, "audio", "unsupported_field")


async def test_a_slip_in_the_place_of_a_field_that_must_be_there_is_named() -> None:
    async with client() as http:
        error = (await http.post("/v1/chat/completions", json={"mesages": []})).json()["error"]
        assert (error["param"], error["message"]) == ("messages", "messages is missing (mesages is not known); give it")


async def test_header_and_log_are_bounded_and_hold_no_values(caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "x", **{f"stray {each}\r\nx-evil: 1 \u00e9" + "y" * 500: "secret" for each in range(2000)}}
    async with client() as http:
        for _ in range(3):
            response = await http.post("/v1/completions", json=body)
            named = response.headers[HEADER]
            assert response.status_code == 200 and "x-evil" not in response.headers
            assert len(named) < 1100 and named.isascii() and named.isprintable(), named
            assert named.startswith("stray%200%0D%0Ax-evil") and named.endswith(" more")
    [line] = [each.getMessage() for each in caplog.records if "not known" in each.getMessage()]
    assert "secret" not in line and "\n" not in line and len(line) < 1300


async def test_the_log_tells_of_each_set_of_fields_once(caplog: pytest.LogCaptureFixture) -> None:
    def asking(*places: int) -> dict[str, Any]:
        return {
            "messages": [{"role": "user", "content": "x", **({"zzzz": 1} if at in places else {})} for at in range(3)]
        }

    async with client() as http:
        for body in (asking(0), asking(2), asking(0), chat(qqqq=1)):
            assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
    said = [each.getMessage() for each in caplog.records if "not known" in each.getMessage()]
    assert len(said) == 2, said
    assert "messages[0].zzzz" in said[0] and "qqqq" in said[1]


def test_a_caller_that_makes_up_names_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    notices = UnknownFieldLog()
    with caplog.at_level(logging.WARNING):
        for each in range(5000):
            strays = UnknownFields(strict=False)
            strays.add("", [f"z{each}"], ["n"])
            notices.log("/v1/completions", strays)
    assert len(caplog.records) <= 256
    assert "further ones are not logged" in caplog.records[-1].getMessage()


def test_long_names_are_not_held_on_to() -> None:
    name = "é" * 10_000
    held = sys.getrefcount(name)
    UnknownFields(strict=False).add("", [name], ["model"])
    assert sys.getrefcount(name) == held


async def test_names_of_a_template_are_told_in_ascii_as_well() -> None:
    """Its variables are what a slip is compared with, and may have any letters."""
    template = "{{ straße_nr }}{{ messages[0].content }}"
    async with client(trust_request_chat_template=True) as http:
        asked = chat(chat_template=template, chat_template_kwargs={"straße": 1}, max_tokens=1)
        answer = await http.post("/v1/chat/completions", json=asked)
        assert answer.status_code == 200, answer.text
        assert answer.headers[HEADER] == "chat_template_kwargs.stra%C3%9Fe (did you mean stra%C3%9Fe_nr?)"


async def test_what_is_left_out_of_tools_counts_no_tokens() -> None:
    async with client() as http:
        counts = []
        for more in ({}, {"zzzz": "secret"}):
            tool = {**TOOL, "function": {**TOOL["function"], **more}}
            answer = await http.post("/tokenize", json=chat(tools=[tool]))
            counts.append(answer.json()["count"])
    assert counts[0] == counts[1]


async def test_behind_an_operators_middleware_it_is_named_all_the_same() -> None:
    """Which runs the routes in a task of its own."""
    async with client(middleware=("tests.server.http.inputs.test_unknown_fields.passes_on",)) as http:
        answer = await http.post("/v1/completions", json={"prompt": "x", "zzzz": 1})
        assert (answer.status_code, answer.headers[HEADER]) == (200, "zzzz")


async def passes_on(request: Request, call_next: Any) -> Any:
    return await call_next(request)


async def test_long_bodies_are_read_beside_the_loop_and_named_as_well() -> None:
    body = {"prompt": "x", "zzzz": "y" * 200_000}
    async with client() as http:
        assert (await http.post("/v1/completions", json=body)).headers[HEADER] == "zzzz"
        long = {"messages": [{"role": "user", "content": "a " * 1200, "zzzz": 1}], "max_tokens": 1}
        assert (await http.post("/v1/chat/completions", json=long)).headers[HEADER] == "messages[0].zzzz"


async def test_requests_at_once_have_each_their_own() -> None:
    async with client() as http:
        asked = [http.post("/v1/completions", json={"prompt": "x", f"zzzz{each}": 1}) for each in range(20)]
        answers = await asyncio.gather(*asked)
    assert [each.headers[HEADER] for each in answers] == [f"zzzz{each}" for each in range(20)]


async def test_a_stream_has_the_header_too() -> None:
    async with client() as http:
        response = await http.post("/v1/chat/completions", json=chat(stream=True, max_tokens=2, zzzz=1))
        assert response.headers[HEADER] == "zzzz" and events(response.text)
        assert HEADER not in (await http.post("/v1/chat/completions", json=chat(max_tokens=2))).headers


def test_the_openai_client_reads_what_was_ignored_of_its_extra_body() -> None:
    with serving() as live, openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as api:
        answer = api.chat.completions.with_raw_response.create(
            model="fake/model", messages=[{"role": "user", "content": "Hi"}], extra_body={"max_token": 3}
        )
        assert answer.headers[HEADER] == "max_token (did you mean max_tokens?)"
        assert answer.parse().choices[0].message.content is not None
