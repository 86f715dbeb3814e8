"""Calls and thoughts over HTTP: the bundled model, a server as users start it, and OpenAI's client."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.helpers.servers.serving import PATIENCE, Server
from tests.helpers.tools import ADD, SCHEMAS, WEATHER

jsonschema = pytest.importorskip("jsonschema")

PARIS: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
SUM: list[Any] = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--device", "cpu", "--max-model-len", "512", "--num-pages", "200") as made:
        yield made


@pytest.fixture
def ai(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as made:
        yield made


def chat(server: Server, messages: list[Any], **fields: Any) -> httpx.Response:
    body = {"messages": messages, "max_tokens": 100, "temperature": 0, **fields}
    return httpx.post(server.url + "/v1/chat/completions", json=body, timeout=PATIENCE)


def choice(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    first: dict[str, Any] = answer.json()["choices"][0]
    return first


def test_a_call_a_result_and_an_answer(ai: openai.OpenAI) -> None:
    """The whole round, as OpenAI's guide has it."""
    first = ai.chat.completions.create(model="bundled", messages=PARIS, tools=[WEATHER], temperature=0)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls" and message.content is None and message.tool_calls
    [call] = message.tool_calls
    assert call.type == "function" and call.function.name == "get_weather" and call.id
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    back: list[Any] = [*PARIS, message, {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "rain"}'}]
    second = ai.chat.completions.create(model="bundled", messages=back, tools=[WEATHER], temperature=0, max_tokens=60)
    assert second.choices[0].message.content and second.choices[0].finish_reason in ("stop", "length")


def test_a_streamed_call_is_the_whole_one(ai: openai.OpenAI) -> None:
    with ai.chat.completions.stream(model="bundled", messages=PARIS, tools=[WEATHER], temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds and final.finish_reason == "tool_calls"
    assert final.message.tool_calls and not final.message.content
    assert json.loads(final.message.tool_calls[0].function.arguments) == {"city": "Paris"}


def test_a_streamed_call_begins_no_text(server: Server) -> None:
    """Some clients begin a text with empty content, and read the first part of a call in a chunk alone."""
    lines = chat(server, PARIS, tools=[WEATHER], tool_choice="required", stream=True).text.splitlines()
    deltas = [json.loads(each[6:])["choices"][0]["delta"] for each in lines if each.startswith("data: {")]
    assert deltas[0] == {"role": "assistant"} and not any("content" in each for each in deltas)
    assert {len(each["tool_calls"]) for each in deltas if "tool_calls" in each} == {1}


def test_what_is_no_call_is_content(server: Server) -> None:
    plain = choice(chat(server, [{"role": "user", "content": "Hello!"}], tool_choice="none", tools=[WEATHER]))
    auto = choice(chat(server, [{"role": "user", "content": "Hello!"}], tools=[WEATHER]))
    assert "tool_calls" not in plain["message"] and plain["finish_reason"] in ("stop", "length")
    assert "tool_calls" not in auto["message"] and auto["message"]["content"] == plain["message"]["content"]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("asked", ["required", "add", "allowed"])
def test_a_call_that_must_come_comes_and_follows_its_schema(server: Server, asked: str, seed: int) -> None:
    wanted: Any = {
        "required": "required",
        "add": {"type": "function", "function": {"name": "add"}},
        "allowed": {"type": "allowed_tools", "allowed_tools": {
            "mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]}},
    }[asked]  # fmt: skip
    answer = choice(
        chat(server, [{"role": "user", "content": "Hello!"}], tools=[WEATHER, ADD], tool_choice=wanted,
             temperature=1.0, seed=seed, parallel_tool_calls=False, max_tokens=300)
    )  # fmt: skip
    assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] is None
    [call] = answer["message"]["tool_calls"]
    name = call["function"]["name"]
    assert asked == "required" or name == "add"
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[name])


def in_rome(strict: bool | None, kind: str = "string") -> dict[str, Any]:
    """The weather's tool, for a city that is not asked about."""
    parameters = {"type": "object", "properties": {"city": {"type": kind, "enum": ["Rome"]}}, "required": ["city"]}
    function = {**WEATHER["function"], "parameters": {**parameters, "additionalProperties": False}, "strict": strict}
    return {"type": "function", "function": function}


def test_a_format_that_json_schema_does_not_know_is_no_reason_to_refuse_a_call(server: Server) -> None:
    word = {"type": "string", "format": "password", "maxLength": 9}
    parameters = {"type": "object", "properties": {"word": word}, "required": ["word"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "enter", "parameters": parameters}}
    for wanted in ({"tool_choice": "required"}, {"tool_choice": "auto"}):
        assert choice(chat(server, PARIS, tools=[tool], max_tokens=60, temperature=0, **wanted))["finish_reason"]
    [call] = choice(chat(server, PARIS, tools=[tool], tool_choice="required"))["message"]["tool_calls"]
    assert len(json.loads(call["function"]["arguments"])["word"]) <= 9


@pytest.mark.parametrize("stream", [False, True])
def test_a_strict_tool_is_called_as_its_schema_says(server: Server, stream: bool) -> None:
    """Also where the model itself decides to; one that is not strict, with anything."""
    said = {}
    for strict in (True, False, None):
        answer = chat(server, PARIS, tools=[in_rome(strict), ADD], stream=stream)
        assert answer.status_code == 200, answer.text
        lines = [json.loads(each[6:]) for each in answer.text.splitlines() if each.startswith("data: {")]
        messages = [each["choices"][0]["delta"] for each in lines] if stream else [choice(answer)["message"]]
        parts = [part["function"] for each in messages for part in each.get("tool_calls", ())]
        assert parts[0]["name"] == "get_weather"
        said[strict] = json.loads("".join(part["arguments"] for part in parts))["city"]
    assert said == {True: "Rome", False: "Paris", None: "Paris"}


def test_beside_strict_tools_there_may_be_an_answer_without_a_call(server: Server) -> None:
    hello = [{"role": "user", "content": "Hello!"}]
    plain, strict = (choice(chat(server, hello, tools=[in_rome(each)]))["message"] for each in (None, True))
    assert "tool_calls" not in strict and strict == plain


def test_thoughts_are_told_apart_streamed_or_not(server: Server) -> None:
    fields: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
    message = choice(chat(server, SUM, **fields))["message"]
    assert message["reasoning"] == message["reasoning_content"] and "carry" in message["reasoning"]
    assert message["content"] and "<think>" not in str(message) and "</think>" not in str(message)
    lines = chat(server, SUM, stream=True, **fields).text.splitlines()
    deltas = [json.loads(each[6:])["choices"][0]["delta"] for each in lines if each.startswith("data: {")]
    for key in ("reasoning", "content"):
        assert "".join(each.get(key, "") for each in deltas) == message[key]
    silent = choice(chat(server, SUM, include_reasoning=False, **fields))["message"]
    assert "reasoning" not in silent and silent["content"] == message["content"]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "code"}]}, "tools[0].type", "code"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "must be an object"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name", "1 to 256"),
    ({"tools": [WEATHER, WEATHER]}, "tools", "twice"),
    ({"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice", "maybe"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "add"}}},
     "tool_choice.function.name", "one of the tools"),
    ({"tools": [WEATHER], "tool_choice": "required", "structured_outputs": {"json_object": True}},
     "tool_choice", "leave one"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}}],
      "tool_choice": "required"}, "tools", "parameters of 'f' cannot be served: Unimplemented keys: [\"not\"]"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}, "tools[0].function.strict", "text"),
    ({"tools": [{"type": "function", "function": {
        "name": "f", "strict": True, "parameters": {"properties": {"a": {"not": {}}}}}}]}, "tools", "not"),
]  # fmt: skip


def test_a_format_that_asks_for_nothing_stands_beside_a_call_that_must_come(server: Server) -> None:
    answer = choice(chat(server, PARIS, tools=[WEATHER], tool_choice="required", response_format={"type": "text"}))
    assert answer["finish_reason"] == "tool_calls"


FORM = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMAS["add"]}}


@pytest.mark.parametrize("thinks", [False, True])
def test_an_answer_is_calls_or_has_its_shape(server: Server, thinks: bool) -> None:
    """As agents ask that have tools and a format for their last answer."""
    fields = {"tools": [WEATHER], "response_format": FORM, "chat_template_kwargs": {"enable_thinking": thinks}}
    called = choice(chat(server, PARIS, **fields))
    assert called["finish_reason"] == "tool_calls" and called["message"]["content"] is None
    assert json.loads(called["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
    said = choice(chat(server, SUM, **fields, tool_choice="none"))
    assert said["finish_reason"] == "stop"
    jsonschema.validate(json.loads(said["message"]["content"]), SCHEMAS["add"])
    for seed in range(3):
        hot = choice(chat(server, SUM, **fields, temperature=1.5, seed=seed, max_tokens=200))
        if hot["finish_reason"] == "stop":
            assert "tool_calls" not in hot["message"]
            jsonschema.validate(json.loads(hot["message"]["content"]), SCHEMAS["add"])


def test_a_schema_that_cannot_be_served_is_no_reason_to_refuse_a_call_that_may_come(server: Server) -> None:
    uri = {"type": "object", "properties": {"at": {"type": "string", "format": "uri-reference"}, "a": {"not": {}}}}
    fetch = {"type": "function", "function": {"name": "fetch", "parameters": uri}}
    fields: dict[str, Any] = {"tools": [fetch, WEATHER], "response_format": FORM}
    assert choice(chat(server, PARIS, **fields))["finish_reason"] in ("tool_calls", "stop")
    fetch["function"]["strict"] = True  # type: ignore[index]
    assert chat(server, PARIS, **fields).json()["error"]["param"] == "tools"


def test_calls_that_must_come_go_before_the_format_of_text(server: Server) -> None:
    answer = choice(chat(server, SUM, tools=[ADD], tool_choice="required", response_format=FORM, max_tokens=200))
    assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] is None


def test_each_of_several_answers_has_its_own_calls(server: Server) -> None:
    answer = chat(server, PARIS, tools=[WEATHER], n=3)
    assert answer.status_code == 200
    calls = [each["message"]["tool_calls"] for each in answer.json()["choices"]]
    assert [[json.loads(call["function"]["arguments"]) for call in each] for each in calls] == [[{"city": "Paris"}]] * 3
    assert len({each[0]["id"] for each in calls}) == 3


def test_a_call_that_is_cut_off_is_no_reason_to_act(server: Server) -> None:
    answers = [choice(chat(server, PARIS, tools=[WEATHER], max_tokens=size)) for size in range(8, 15)]
    assert {each["finish_reason"] for each in answers} == {"length"}
    cut = (each for each in answers if "tool_calls" in each["message"])
    answer = next(each for each in cut if "}" not in each["message"]["tool_calls"][0]["function"]["arguments"])
    [call] = answer["message"]["tool_calls"]
    assert '{"city": "Paris"}'.startswith(call["function"]["arguments"])
    back = [*PARIS, answer["message"], {"role": "tool", "tool_call_id": call["id"], "content": "rain"}]
    assert choice(chat(server, back, tools=[WEATHER]))["finish_reason"] == "stop"  # a history is taken as it is


@pytest.mark.parametrize(("fields", "blamed", "why"), REFUSED)
def test_what_is_wrong_with_tools_is_refused_by_name(
    server: Server, fields: dict[str, Any], blamed: str, why: str
) -> None:
    answer = chat(server, PARIS, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == blamed and why in error["message"]
