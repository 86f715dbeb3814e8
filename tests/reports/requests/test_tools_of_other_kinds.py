"""/v1/responses serves functions, leaves other tools out and names them (report 15); claim 7."""

import json
from typing import Any

import pytest

from quintet.server.http.inputs.unknown_fields import HEADER
from tests.server.fakes import FakeBackend, bundled_tokenizer
from tests.server.http.serving import client

FUNCTION = {"type": "function", "name": "f", "description": "", "strict": False, "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
OTHERS: list[dict[str, Any]] = [
    {"type": "web_search", "external_web_access": False},
    {"type": "web_search_preview_2025_03_11"},
    {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"},
    },
    {"type": "namespace", "name": "mcp__docs", "description": "", "tools": [FUNCTION]},
    {"type": "image_generation", "output_format": "png"},
    {"type": "local_shell"},
    {"type": "file_search", "vector_store_ids": ["x"]},
    {"type": "code_interpreter", "container": {"type": "auto"}},
]


def saying(text: str) -> FakeBackend:
    return FakeBackend(reply=bundled_tokenizer().encode(text, add_special_tokens=False))


@pytest.mark.parametrize("tool", OTHERS, ids=lambda tool: tool["type"])
async def test_functions_are_served_and_others_named(tool: dict[str, Any]) -> None:
    body = {"input": "Hi", "tools": [tool, FUNCTION], "tool_choice": "auto", "store": False, "include": []}
    async with client(saying(CALL)) as http:
        answer = await http.post("/v1/responses", json=body)
        stream = await http.post("/v1/responses", json={**body, "stream": True})
        counted = await http.post("/v1/responses/input_tokens", json={"input": "Hi", "tools": body["tools"]})
    assert answer.status_code == stream.status_code == counted.status_code == 200, answer.text
    assert [item["type"] for item in answer.json()["output"]] == ["function_call"]
    assert [each["name"] for each in answer.json()["tools"]] == ["f"]
    for each in (answer, stream, counted):
        assert each.headers[HEADER] == f"tools[0].{tool['type']}"


async def test_other_tools_alone_leave_an_answer() -> None:
    async with client(saying("Yes.")) as http:
        answer = await http.post("/v1/responses", json={"input": "Hi", "tools": OTHERS, "store": False})
        forced = await http.post("/v1/responses", json={"input": "Hi", "tools": OTHERS, "tool_choice": "required"})
    assert answer.status_code == 200 and answer.json()["tools"] == []
    assert answer.json()["output"][0]["content"][0]["text"] == "Yes."
    assert forced.status_code == 400 and "no tools" in forced.text


async def test_a_choice_among_tools_leaves_them_out() -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}, OTHERS[0]]}
    body = {"input": "Hi", "tools": [FUNCTION, OTHERS[0]], "tool_choice": allowed, "store": False}
    async with client(saying(CALL)) as http:
        answer = await http.post("/v1/responses", json=body)
        named = await http.post("/v1/responses", json={**body, "tool_choice": {"type": "web_search"}})
    assert answer.status_code == 200, answer.text
    assert named.status_code == 400 and named.json()["error"]["param"] == "tool_choice.type"


async def test_strict_requests_refuse_them_with_a_reason() -> None:
    async with client(saying("Yes."), strict_requests=True) as http:
        answer = await http.post("/v1/responses", json={"input": "Hi", "tools": [FUNCTION, OTHERS[2]]})
        typo = await http.post("/v1/responses", json={"input": "Hi", "tools": [{"type": "functions"}]})
    assert answer.status_code == 400 and "one argument" in answer.json()["error"]["message"]
    assert typo.status_code == 400 and "'function'" in typo.json()["error"]["message"]


async def test_structured_outputs_shape_a_response() -> None:
    """claim 7: as vLLM has them."""
    backend = saying("yes")
    async with client(backend) as http:
        answer = await http.post(
            "/v1/responses", json={"input": "Hi", "structured_outputs": {"choice": ["yes", "no"]}, "store": False}
        )
        both = await http.post(
            "/v1/responses",
            json={
                "input": "Hi",
                "structured_outputs": {"choice": ["yes"]},
                "text": {"format": {"type": "json_object"}},
            },
        )
        wrong = await http.post("/v1/responses", json={"input": "Hi", "structured_outputs": {"choice": []}})
    assert answer.status_code == 200 and HEADER not in answer.headers
    assert backend.submitted[0].grammar and '"yes"' in backend.submitted[0].grammar
    assert both.status_code == 400 and both.json()["error"]["param"] == "text.format"
    assert wrong.status_code == 400 and "structured_outputs" in wrong.text


@pytest.mark.parametrize("shown", [True, False, None])
@pytest.mark.parametrize("stream", [True, False])
async def test_reasoning_is_left_out_where_it_is_not_wanted(shown: bool | None, stream: bool) -> None:
    """claim 7: include_reasoning."""
    body = {"input": "Hi", "include_reasoning": shown, "store": False, "stream": stream}
    async with client(saying("<think>Hm.</think>Yes.")) as http:
        answer = await http.post("/v1/responses", json=body)
    assert answer.status_code == 200 and HEADER not in answer.headers
    if stream:
        last = json.loads(answer.text.strip().split("\n\n")[-1].split("\n")[1].removeprefix("data: "))
        kinds = [item["type"] for item in last["response"]["output"]]
    else:
        kinds = [item["type"] for item in answer.json()["output"]]
    assert kinds == (["message"] if shown is False else ["reasoning", "message"])
