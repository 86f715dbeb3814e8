"""Thinking, a call, its result, thinking: what clients send back comes to the chat template as it was said."""

import json
from typing import Any

import pytest

from quintet.config import StructuredOutputsConfig
from quintet.server.processes.grammar_checks import GrammarChecks
from tests.server.fakes import FakeBackend
from tests.server.http.serving import chat, client

TEMPLATE = """
{%- for m in messages %}[{{ m.role }}]
{%- if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>{% endif %}
{%- if m.content is string %}{{ m.content }}{% else %}{% for p in m.content or [] %}{{ p.text }}{% endfor %}{% endif %}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}</tool_call>
{%- endfor %}
{%- endfor %}{% if add_generation_prompt %}[assistant]{% endif %}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"""
SAID = (
    '[user]Sky?[assistant]<think>I look.</think><tool_call>look{"at": "sky"}</tool_call>[tool]rain'
    "[assistant]<think>It rains.</think>Rain.[user]Sure?[assistant]"
)
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
SHAPE = {"type": "json_schema", "json_schema": {"schema": {"enum": [1, 2]}}}


def backend(reply: str = "Yes.", **structured: Any) -> FakeBackend:
    fake = FakeBackend()
    fake.reply = fake.encode(reply)
    fake.grammar_checks = GrammarChecks(StructuredOutputsConfig(**structured))
    return fake


async def prompt(path: str, body: dict[str, Any]) -> str:
    fake = backend()
    async with client(fake, chat_template=TEMPLATE) as http:
        response = await http.post(path, json={"max_tokens": 5, **body})
    assert response.status_code == 200, response.text
    return fake.submitted[0].prompt.text or ""


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
async def test_chats_get_their_thoughts_back(key: str) -> None:
    messages = [
        {"role": "user", "content": "Sky?"},
        {"role": "assistant", "content": None, key: "I look.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "assistant", "content": "Rain.", key: "It rains."},
        {"role": "user", "content": "Sure?"},
    ]
    assert await prompt("/v1/chat/completions", {"messages": messages}) == SAID


async def test_what_an_answer_said_may_be_sent_back_as_it_is() -> None:
    """With every field of the message, as clients do that keep it whole."""
    fake = backend("<think>I look.</think>Rain.")
    async with client(fake, chat_template=TEMPLATE, reasoning_parser="think") as http:
        first = (await http.post("/v1/chat/completions", json=chat("Sky?"))).json()["choices"][0]["message"]
        again = {"messages": [*chat("Sky?")["messages"], first, *chat("Sure?")["messages"]]}
        response = await http.post("/v1/chat/completions", json=again)
    assert response.status_code == 200 and "x-quintet-ignored-fields" not in response.headers
    assert fake.submitted[1].prompt.text == ("[user]Sky?[assistant]<think>I look.</think>Rain.[user]Sure?[assistant]")


async def test_messages_get_their_thoughts_back() -> None:
    thought, last = ({"type": "thinking", "thinking": each, "signature": "x"} for each in ("I look.", "It rains."))
    messages = [
        {"role": "user", "content": "Sky?"},
        {"role": "assistant", "content": [
            thought, {"type": "tool_use", "id": "call_1", "name": "look", "input": {"at": "sky"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "rain"}]},
        {"role": "assistant", "content": [last, {"type": "text", "text": "Rain."}]},
        {"role": "user", "content": "Sure?"},
    ]  # fmt: skip
    assert await prompt("/v1/messages", {"messages": messages}) == SAID


async def test_thoughts_between_calls_of_one_message_stay_apart() -> None:
    thoughts = [{"type": "thinking", "thinking": each, "signature": ""} for each in ("One.", "Two.")]
    content = [thoughts[0], {"type": "text", "text": "Rain."}, thoughts[1]]
    messages = [*chat("Sky?")["messages"], {"role": "assistant", "content": content}, *chat("Sure?")["messages"]]
    assert "<think>One.\n\nTwo.</think>Rain." in await prompt("/v1/messages", {"messages": messages})


async def test_responses_get_their_thoughts_back() -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "id": "rs_" + text[:1], "summary": [],
                "content": [{"type": "reasoning_text", "text": text}]}  # fmt: skip

    items = [
        {"role": "user", "content": "Sky?"},
        thought("I look."),
        {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"at": "sky"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
        thought("It rains."),
        {"role": "assistant", "content": "Rain."},
        {"role": "user", "content": "Sure?"},
    ]
    assert await prompt("/v1/responses", {"input": items, "max_tokens": None}) == SAID


async def test_one_answer_may_think_call_and_think_again() -> None:
    call = '<tool_call>{"name": "look", "arguments": {"at": "sky"}}</tool_call>'
    fake = backend(f"<think>One.</think>{call}<think>Two.</think>{call}")
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    settings = {"chat_template": TEMPLATE, "reasoning_parser": "think", "tool_call_parser": "hermes"}
    async with client(fake, **settings) as http:
        told = (await http.post("/v1/chat/completions", json=chat("Sky?", tools=tools))).json()
    message = told["choices"][0]["message"]
    assert message["reasoning"] == "One.Two." and len(message["tool_calls"]) == 2


# --------------------------------------------------------------------------------- where a shape begins, and why


async def grammar(body: dict[str, Any], structured: dict[str, Any] | None = None, **settings: Any) -> tuple[str, Any]:
    """The grammar that the engine gets, and the message."""
    pytest.importorskip("llguidance", reason="structured_outputs are an extra: pip install 'quintet-llm[structured]'")
    fake = backend("<think>So.</think>1", **(structured or {}))
    async with client(fake, **{"chat_template": TEMPLATE, "reasoning_parser": "think", **settings}) as http:
        response = await http.post("/v1/chat/completions", json={**chat("Sky?"), "response_format": SHAPE, **body})
    assert response.status_code == 200, response.text
    return fake.submitted[0].grammar, response.json()["choices"][0]["message"]


@pytest.mark.parametrize("body", [{}, {"thinking": True}, {"chat_template_kwargs": {"enable_thinking": True}}])
async def test_a_thought_may_come_before_a_shape(body: dict[str, Any]) -> None:
    text, message = await grammar(body)
    first, answer = json.loads(text)["grammars"]
    assert "@answer" in first["lark_grammar"] and answer["name"] == "answer" and answer["json_schema"]["enum"] == [1, 2]
    assert (message["reasoning"], message["content"]) == ("So.", "1")


NO_THOUGHT: list[dict[str, Any]] = [
    {"thinking": False},
    {"reasoning_effort": "none"},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"continue_final_message": True, "add_generation_prompt": False,
     "messages": [{"role": "user", "content": "Sky?"}, {"role": "assistant", "content": "It is "}]},
]  # fmt: skip


async def test_an_operator_may_set_what_requests_leave_open() -> None:
    quiet = {"default_chat_template_kwargs": {"enable_thinking": False, "unread": 1}}
    text, _ = await grammar({}, **quiet)
    assert len(json.loads(text)["grammars"]) == 1
    text, _ = await grammar({"thinking": True}, **quiet)
    assert len(json.loads(text)["grammars"]) == 2


@pytest.mark.parametrize("body", NO_THOUGHT)
async def test_a_shape_begins_at_once_where_no_thought_can_come(body: dict[str, Any]) -> None:
    text, _ = await grammar(body)
    assert len(json.loads(text)["grammars"]) == 1


async def test_a_shape_may_hold_within_thoughts() -> None:
    text, message = await grammar({}, {"enable_in_reasoning": True})
    assert len(json.loads(text)["grammars"]) == 1
    assert "reasoning" not in message and message["content"] == "<think>So.</think>1"  # as the model said it


async def test_without_a_parser_a_shape_begins_at_once() -> None:
    text, _ = await grammar({}, reasoning_parser="none")
    assert len(json.loads(text)["grammars"]) == 1
