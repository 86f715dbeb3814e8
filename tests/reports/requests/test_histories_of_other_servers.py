"""A conversation that began on another server goes on here: its own items are passed over, or rendered as calls."""

from typing import Any

import pytest

from tests.server.fakes import FakeBackend
from tests.server.http.serving import client

USER = {"role": "user", "content": "Hi"}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content }}{{ m.content if m.content is string else "
    "m.content | map(attribute='text') | join('+') }}{% for c in m.tool_calls %}{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}|{% endfor %}"
)
SEARCH = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}}
FOUND = {"role": "assistant", "content": [{"type": "output_text", "text": "Found.", "annotations": []}]}


async def prompt_of(path: str, body: dict[str, Any]) -> str:
    backend = FakeBackend()
    async with client(backend, chat_template=TEMPLATE) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return backend.submitted[0].prompt.text or ""


@pytest.mark.parametrize(
    "passed",
    [
        SEARCH,
        {"type": "file_search_call", "id": "fs_1", "status": "completed", "queries": ["x"], "results": None},
        {"type": "code_interpreter_call", "id": "ci_1", "status": "completed", "code": "1", "container_id": "c"},
        {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "aGk="},
    ],
    ids=lambda item: item["type"],
)
async def test_calls_of_server_tools_are_passed_over(passed: dict[str, Any]) -> None:
    body = {"input": [USER, passed, FOUND, USER], "max_output_tokens": 16, "store": False}
    assert await prompt_of("/v1/responses", body) == "user: Hi|assistant: Found.|user: Hi|"


@pytest.mark.parametrize(
    ("call", "output", "rendered"),
    [
        (
            {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
            'assistant: patch{"input": "*** Begin"}|tool: done|',
        ),
        (
            {"type": "local_shell_call", "call_id": "c1", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "id": "c1", "output": "a.txt"},
            'assistant: local_shell{"action": {"type": "exec", "command": ["ls"]}}|tool: a.txt|',
        ),
        (
            {"type": "shell_call", "call_id": "c1", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "call_id": "c1", "output": [{"stdout": "a", "stderr": ""}]},
            'assistant: shell{"action": {"commands": ["ls"]}}|tool: [{"stdout":"a","stderr":""}]|',
        ),
    ],
    ids=["custom", "local_shell", "shell"],
)
async def test_calls_of_client_tools_are_rendered(call: dict[str, Any], output: dict[str, Any], rendered: str) -> None:
    body = {"input": [USER, call, output], "max_output_tokens": 16, "store": False}
    assert await prompt_of("/v1/responses", body) == f"user: Hi|{rendered}"


async def test_redacted_thinking_is_passed_over() -> None:
    blocks = [{"type": "redacted_thinking", "data": "EmwK"}, {"type": "text", "text": "Yes."}]
    body = {"messages": [USER, {"role": "assistant", "content": blocks}, USER], "max_tokens": 4}
    assert await prompt_of("/v1/messages", body) == "user: Hi|assistant: Yes.|user: Hi|"


@pytest.mark.parametrize("item", [{"type": "computer_call"}, {"type": "web_serch_call"}, {"type": "function_cal"}])
async def test_other_kinds_are_still_refused(item: dict[str, Any]) -> None:
    async with client(FakeBackend()) as http:
        answer = await http.post("/v1/responses", json={"input": [USER, item], "store": False})
    assert answer.status_code == 400 and "input[1]" in answer.text


async def test_a_passed_over_call_alone_says_nothing() -> None:
    async with client(FakeBackend()) as http:
        answer = await http.post("/v1/responses", json={"input": [SEARCH], "store": False})
    assert answer.status_code == 400 and "says nothing" in answer.text
