"""Earlier turns that clients send back are taken as they are (report 16, 17, 18)."""

from typing import Any

import pytest

from quintet.chat.history import arguments_of, rewrites
from quintet.chat.messages import ChatOptions, render_chat
from tests.server.fakes import FakeBackend, bundled_tokenizer
from tests.server.http.serving import client

USER = {"role": "user", "content": "Hi"}
LINES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no system here') }}"
    "{% endif %}{{ m.role }}: {{ m.content if m.content is string else m.content | map(attribute='text') | join('+') }}"
    "\n{% endfor %}"
)
ADDED = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% endfor %}"
ITEMS = (
    "{% for m in messages %}{% for c in m.tool_calls %}{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};"
    "{% endfor %}{% endfor %}{% endfor %}"
)
SHOWN = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
LLAMA = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call') }}{% endif %}{% else %}{{ m.role + m.content }}{% endif %}{% endfor %}"
)


def rendered(messages: list[dict[str, Any]], template: str) -> str:
    return render_chat(bundled_tokenizer(), messages, ChatOptions(chat_template=template)).text or ""


def called(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]


SYSTEM, LATER = {"role": "system", "content": "Be short."}, {"role": "system", "content": "Agents: a."}


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([SYSTEM, USER, LATER], "system: Be short.\n\nAgents: a.\nuser: Hi\n"),
        ([USER, LATER], "system: Agents: a.\nuser: Hi\n"),
        ([SYSTEM, LATER, USER], "system: Be short.\n\nAgents: a.\nuser: Hi\n"),
        ([SYSTEM, USER], "system: Be short.\nuser: Hi\n"),
    ],
)
def test_a_system_message_in_the_middle_joins_the_first(messages: list[dict[str, Any]], text: str) -> None:
    """report 16"""
    assert rendered(messages, FIRST) == text
    unchanged = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
    assert rendered(messages, LINES) == unchanged


def test_other_refusals_stay() -> None:
    with pytest.raises(ValueError, match="the chat template refuses these messages: never"):
        rendered([SYSTEM, USER, LATER], "{{ raise_exception('never') }}{{ 'system' }}")


BROKEN = ["", " ", "\n", '{"path": "a.txt", "text": "and', '{"s": "He said "x""}', "[1, 2]", "null", "a.txt", "5", None]


@pytest.mark.parametrize("arguments", BROKEN)
def test_broken_arguments_are_rendered(arguments: Any) -> None:
    """report 17: as text, or as none where the template wants an object."""
    assert rendered(called(arguments), ITEMS) == ""
    assert rendered(called(arguments), SHOWN)


def test_arguments_that_are_right_are_objects() -> None:
    assert rendered(called('{"a": 1}'), ITEMS) == rendered(called({"a": 1}), ITEMS) == "a=1;"
    assert arguments_of('{"a": "one\ntwo"}') == {"a": "one\ntwo"}
    assert arguments_of('{"a": "cut') == '{"a": "cut'
    assert rendered(called('{"a": "cut'), SHOWN) == '"{\\"a\\": \\"cut"'


HABITS: list[list[dict[str, Any]]] = [
    [USER, {"role": "assistant", "content": "Yes", "tool_calls": []}, USER],
    [USER, {"role": "assistant", "content": None}, USER],
    [USER, {"role": "assistant", "content": []}, USER],
    [USER, {"role": "assistant"}, USER],
    [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "a"}]}],
    [USER, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, USER],
    [USER, {"role": "assistant", "content": [{"type": "reasoning", "summary": [{"text": "Hm."}]}]}, USER],
    [USER, {"role": "tool", "tool_call_id": "c1", "content": None}, USER],
]


@pytest.mark.parametrize("template", [LLAMA, ADDED, LINES], ids=["llama", "adds", "writes"])
@pytest.mark.parametrize("messages", HABITS)
def test_habits_of_clients_are_taken(messages: list[dict[str, Any]], template: str) -> None:
    """report 18"""
    assert "Hi" in rendered(messages, template)


def test_parts_of_thinking_are_reasoning() -> None:
    template = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }}{% endfor %}"
    parts = [{"type": "thinking", "thinking": "Hm.", "signature": "x"}, {"type": "text", "text": "Yes"}]
    assert rendered([{"role": "assistant", "content": parts}], template) == "Hm.|Yes"
    own = {"role": "assistant", "content": parts, "reasoning_content": "Own."}
    assert rendered([own], template) == "Own.|Yes"


def test_a_message_that_is_right_has_no_other_way() -> None:
    assert list(rewrites([SYSTEM, USER, {"role": "assistant", "content": ""}])) == []


TOOL = {"name": "f", "parameters": {"type": "object"}}


@pytest.mark.parametrize("arguments", BROKEN[:9])
async def test_each_api_takes_them(arguments: str) -> None:
    """report 17: in chats, responses and messages."""
    result = {"role": "tool", "tool_call_id": "c1", "content": "error"}
    use = {"type": "tool_use", "id": "c1", "name": "f", "input": arguments}
    items = [
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": arguments},
        {"type": "function_call_output", "call_id": "c1", "output": "error"},
    ]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [*called(arguments), result, USER], "max_tokens": 4},
        "/v1/responses": {"input": [USER, *items, USER], "max_output_tokens": 16, "store": False},
        "/v1/messages": {
            "max_tokens": 4,
            "messages": [
                USER,
                {"role": "assistant", "content": [use]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "error"}]},
            ],
        },
    }
    async with client(FakeBackend()) as http:
        for path, body in bodies.items():
            answer = await http.post(path, json=body)
            assert answer.status_code == 200, (path, answer.text)


async def test_messages_join_a_system_message_in_the_middle() -> None:
    """report 16: Claude Code."""
    body = {
        "system": [{"type": "text", "text": "Be short."}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, LATER],
    }
    async with client(FakeBackend(), chat_template=FIRST) as http:
        answer = await http.post("/v1/messages", json={**body, "max_tokens": 4})
        counted = await http.post("/v1/messages/count_tokens", json=body)
    assert answer.status_code == counted.status_code == 200, answer.text
