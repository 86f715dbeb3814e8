"""One preparation of chats: four APIs that ask for the same get the same prompt, params and grammar."""

import json
from typing import Any

import pytest

from quintet.api.chat_call import ChatCall, run_without_loop
from quintet.chat.prepare import PreparedChat
from quintet.config import StructuredOutputsConfig
from quintet.sampling_params import RequestOutputKind, SamplingParams
from tests.server.fakes import FakeBackend, Submitted, bundled_tokenizer
from tests.server.http.serving import client

pytest.importorskip("llguidance", reason="structured_outputs are an extra: pip install 'quintet-llm[structured]'")

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Get it", "parameters": CITY}
NAMED = {"function": {"name": "get_weather"}, "type": "function"}
SAMPLED = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 50}


def text(role: str, said: str) -> dict[str, Any]:
    return {"role": role, "content": said}


TALK = [text("user", "Weather in Rome?"), text("assistant", "Sunny."), text("user", "And in Oslo?")]


def chat_completion(tools: bool, choice: str, form: bool, thinks: bool) -> tuple[str, dict[str, Any]]:
    body = {"messages": [text("system", "Be kind."), *TALK], **SAMPLED}
    if tools:
        choices = {"auto": "auto", "required": "required", "named": NAMED, "none": "none"}
        body |= {"tools": [{"type": "function", "function": WEATHER}], "tool_choice": choices[choice]}
    if form:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    return "/v1/chat/completions", {**body, "thinking": True} if thinks else body


def response(tools: bool, choice: str, form: bool, thinks: bool) -> tuple[str, dict[str, Any]]:
    kept = {name: value for name, value in SAMPLED.items() if name != "max_tokens"}
    body = {"input": TALK, "instructions": "Be kind.", "max_output_tokens": SAMPLED["max_tokens"], **kept}
    if tools:
        named = {"type": "function", "name": "get_weather"}
        choices = {"auto": "auto", "required": "required", "named": named, "none": "none"}
        body |= {"tools": [{"type": "function", **WEATHER}], "tool_choice": choices[choice]}
    if form:
        body["text"] = {"format": {"type": "json_schema", "name": "city", "schema": CITY}}
    return "/v1/responses", {**body, "chat_template_kwargs": {"enable_thinking": True}} if thinks else body


def message(tools: bool, choice: str, form: bool, thinks: bool) -> tuple[str, dict[str, Any]]:
    body = {"messages": TALK, "system": "Be kind.", **SAMPLED}
    if tools:
        tool = {"name": "get_weather", "description": "Get it", "input_schema": CITY}
        choices = {"required": {"type": "any"}, "named": {"type": "tool", "name": "get_weather"}}
        body |= {"tools": [tool], "tool_choice": choices.get(choice, {"type": choice})}
    if form:
        body["output_config"] = {"format": {"type": "json_schema", "schema": CITY}}
    return "/v1/messages", {**body, "thinking": {"type": "enabled"}} if thinks else body


async def submitted(path: str, body: dict[str, Any], **settings: Any) -> Submitted:
    fake = FakeBackend()
    async with client(fake, **settings) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    [found] = fake.submitted
    return found


def offline(tools: bool, choice: str, form: bool, thinks: bool) -> PreparedChat:
    options: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}} if thinks else {}
    if tools:
        options |= {"tools": [{"type": "function", "function": WEATHER}]}
        options["tool_choice"] = NAMED if choice == "named" else choice
    params = SamplingParams(**SAMPLED, structured_outputs={"json": CITY} if form else None)
    messages = [text("system", "Be kind."), *TALK]
    call = ChatCall(bundled_tokenizer(), "", messages, options, StructuredOutputsConfig())
    [prepared] = run_without_loop(call.prepare([params]))
    return prepared


@pytest.mark.parametrize(
    ("tools", "choice", "form", "thinks"),
    [
        (False, "none", False, False),
        (False, "none", True, True),
        (True, "auto", False, True),
        (True, "auto", True, False),
        (True, "none", True, False),
        (True, "required", False, False),
        (True, "named", False, True),
    ],
)
async def test_four_apis_prepare_the_same(tools: bool, choice: str, form: bool, thinks: bool) -> None:
    given = (tools, choice, form, thinks)
    wanted = offline(*given)
    for api in (chat_completion, response, message):
        found = await submitted(*api(*given))
        assert found.prompt.token_ids == wanted.prompt.token_ids, api
        assert found.grammar == wanted.grammar, api
        assert isinstance(found.params, SamplingParams)
        found.params.output_kind = RequestOutputKind.CUMULATIVE  # only this is the API's own
        assert found.params == wanted.params, api
    assert bool(wanted.grammar) == (form or choice in ("required", "named"))


@pytest.mark.parametrize("api", [chat_completion, response, message])
async def test_tools_that_may_not_be_called_are_left_out_if_the_operator_says_so(api: Any) -> None:
    given = (True, "none", False, False)
    shown = await submitted(*api(*given))
    hidden = await submitted(*api(*given), exclude_tools_when_tool_choice_none=True)
    assert "get_weather" in str(shown.prompt.text) and "get_weather" not in str(hidden.prompt.text)


async def test_a_malformed_tool_is_an_error_of_the_count_too() -> None:
    async with client() as http:
        answer = await http.post("/v1/messages/count_tokens", json={"messages": TALK, "tools": [{"type": "custom"}]})
    assert answer.status_code == 400 and "tools[0]" in json.dumps(answer.json())
