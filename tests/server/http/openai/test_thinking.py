"""Thoughts over HTTP: before an answer with a shape, within a budget, counted, switched off; the bundled model."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.helpers.servers.serving import PATIENCE, Server
from tests.helpers.tools import SUMMANDS as PARTS
from tests.helpers.tools import WEATHER

pytest.importorskip("llguidance", reason="structured_outputs are an extra: pip install 'quintet-llm[structured]'")
jsonschema = pytest.importorskip("jsonschema")

SUM: list[Any] = [{"role": "user", "content": "What is 12 + 30?"}]
FORM = {"type": "json_schema", "json_schema": {"name": "parts", "schema": PARTS, "strict": True}}
THINK = {"enable_thinking": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    bare = '{"disable_any_whitespace": true}'  # which the model would else write on and on
    size = ("--max-model-len", "512", "--num-pages", "200")
    with Server("--device", "cpu", "--structured-outputs-config", bare, *size) as made:
        yield made


@pytest.fixture
def ai(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as made:
        yield made


def chat(server: Server, **fields: Any) -> httpx.Response:
    body = {"messages": SUM, "max_tokens": 300, "temperature": 0, **fields}
    return httpx.post(server.url + "/v1/chat/completions", json=body, timeout=PATIENCE)


def answer(server: Server, **fields: Any) -> dict[str, Any]:
    told = chat(server, **fields)
    assert told.status_code == 200, told.text
    found: dict[str, Any] = told.json()
    return found


def message(server: Server, **fields: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer(server, **fields)["choices"][0]["message"]
    return found


# ---------------------------------------------------------------------------------------- answers with a shape


def test_an_answer_has_its_shape_behind_what_was_thought(server: Server) -> None:
    free = message(server, chat_template_kwargs=THINK)
    shaped = message(server, chat_template_kwargs=THINK, response_format=FORM)
    assert shaped["reasoning"] == shaped["reasoning_content"] == free["reasoning"]  # nothing holds the thought
    jsonschema.validate(json.loads(shaped["content"]), PARTS)


@pytest.mark.parametrize("asked", [{"response_format": FORM}, {"structured_outputs": {"json": PARTS}}])
def test_hot_answers_are_valid_behind_any_thought(server: Server, asked: dict[str, Any]) -> None:
    said = answer(server, chat_template_kwargs=THINK, temperature=1.5, seed=7, n=8, max_tokens=400, **asked)
    ended = [each["message"] for each in said["choices"] if each["finish_reason"] == "stop"]
    assert ended and all("</think>" not in str(each) for each in ended)
    assert any(each.get("reasoning") for each in ended)
    for each in ended:
        jsonschema.validate(json.loads(each["content"]), PARTS)


def test_a_streamed_shape_comes_behind_the_thought(server: Server) -> None:
    fields: dict[str, Any] = {"chat_template_kwargs": THINK, "response_format": FORM}
    lines = chat(server, stream=True, **fields).text.splitlines()
    deltas = [json.loads(each[6:])["choices"][0]["delta"] for each in lines if each.startswith("data: {")]
    whole = message(server, **fields)
    for key in ("reasoning", "content"):
        assert "".join(each.get(key, "") for each in deltas) == whole[key]


@pytest.mark.parametrize("asked", [{}, {"reasoning_effort": "none"}, {"thinking": {"type": "disabled"}}])
def test_a_shape_begins_at_once_where_nothing_is_thought(server: Server, asked: dict[str, Any]) -> None:
    """The bundled model's template leaves thinking off."""
    for seed in range(3):
        said = message(server, response_format=FORM, temperature=1.5, seed=seed, **asked)
        assert "reasoning" not in said
        jsonschema.validate(json.loads(said["content"]), PARTS)


SHAPES: list[dict[str, Any]] = [
    {"regex": "[a-z]{3}"},
    {"choice": ["</think>", "<think>", "yes"]},
    {"grammar": 'start: "a" | r\nr: "b"'},
    {"grammar": 'root ::= "a" | "b"'},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_kind_of_shape_may_follow_a_thought(server: Server, shape: dict[str, Any]) -> None:
    said = message(server, structured_outputs=shape, chat_template_kwargs=THINK)
    assert said["reasoning"] and 0 < len(said["content"]) <= 8


def test_the_clients_own_parse_gives_an_object_and_its_thought(ai: openai.OpenAI) -> None:
    told = ai.chat.completions.create(
        model="bundled", messages=SUM, response_format=FORM, temperature=0, reasoning_effort="high"  # type: ignore[arg-type]
    )  # fmt: skip
    said = told.choices[0].message
    assert said.content is not None and said.model_extra and said.model_extra["reasoning"]
    jsonschema.validate(json.loads(said.content), PARTS)


def test_a_model_may_call_or_answer_in_shape(server: Server) -> None:
    """As agents want it, whose last word has a type."""
    fields: dict[str, Any] = {"tools": [WEATHER], "response_format": FORM}
    paris = [{"role": "user", "content": "What is the weather in Paris?"}]
    called = answer(server, messages=paris, **fields)["choices"][0]
    assert called["finish_reason"] == "tool_calls" and called["message"]["content"] is None
    assert json.loads(called["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
    hot = answer(server, temperature=1.5, seed=5, n=8, chat_template_kwargs=THINK, **fields)["choices"]
    ended = [each for each in hot if each["finish_reason"] != "length"]
    assert ended
    for each in ended:
        if calls := each["message"].get("tool_calls"):
            for call in calls:
                jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER["function"]["parameters"])
        else:
            jsonschema.validate(json.loads(each["message"]["content"]), PARTS)


def test_markers_within_a_shape_are_no_calls(server: Server) -> None:
    shape = {"choice": ["so <tool_call>{} it is", "so </think> it is"]}
    for seed in range(4):
        said = message(server, tools=[WEATHER], structured_outputs=shape, temperature=1.5, seed=seed, n=1)
        assert said["content"] in shape["choice"] or said.get("tool_calls")


# ------------------------------------------------------------------------------------------- budgets and counting


def tokens(server: Server, text: str) -> int:
    body = {"prompt": text, "add_special_tokens": False}
    count: int = httpx.post(server.url + "/tokenize", json=body, timeout=PATIENCE).json()["count"]
    return count


def test_thoughts_are_counted_in_tokens(server: Server, ai: openai.OpenAI) -> None:
    told = ai.chat.completions.create(
        model="bundled", messages=SUM, temperature=0, extra_body={"chat_template_kwargs": THINK}
    )
    assert told.usage and told.usage.completion_tokens_details
    thought = told.usage.completion_tokens_details.reasoning_tokens
    assert thought and thought == tokens(server, told.choices[0].message.model_extra["reasoning"])  # type: ignore[index]
    plain = answer(server)["usage"]
    assert plain["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_a_stream_ends_with_what_was_thought(server: Server) -> None:
    fields: dict[str, Any] = {"chat_template_kwargs": THINK, "n": 2, "temperature": 1, "seed": 3}
    lines = chat(server, stream=True, stream_options={"include_usage": True}, **fields).text.splitlines()
    last = [json.loads(each[6:]) for each in lines if each.startswith("data: {")][-1]
    assert last["choices"] == [] and last["usage"] == {
        **answer(server, **fields)["usage"],
        "prompt_tokens_details": last["usage"]["prompt_tokens_details"],
    }
    assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize("asked", [
    {"thinking_token_budget": 5}, {"thinking": {"type": "enabled", "budget_tokens": 5}},
    {"thinking_token_budget": 5, "response_format": FORM},
])  # fmt: skip
def test_a_budget_ends_a_thought_and_an_answer_follows(server: Server, asked: dict[str, Any]) -> None:
    said = answer(server, chat_template_kwargs=THINK, **asked)
    message = said["choices"][0]["message"]
    assert said["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5
    assert message["reasoning"] and message["content"]
    if "response_format" in asked:
        jsonschema.validate(json.loads(message["content"]), PARTS)


def test_a_budget_of_nothing_leaves_no_marker(server: Server) -> None:
    said = answer(server, chat_template_kwargs=THINK, thinking_token_budget=0)
    message = said["choices"][0]["message"]
    assert message["content"] and "think>" not in message["content"]
    assert said["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_a_text_that_ends_in_a_thought_may_have_a_budget(server: Server) -> None:
    asked = {"prompt": "<|user|>What is 12 + 30?<|end|><|assistant|><think>", "max_tokens": 60, "temperature": 0}
    body = {**asked, "thinking_token_budget": 4, "skip_special_tokens": False, "return_token_ids": True}
    told = httpx.post(server.url + "/v1/completions", json=body, timeout=PATIENCE).json()["choices"][0]
    assert told["token_ids"].index(9) == 4 and "</think>" in told["text"]


@pytest.mark.parametrize("effort", ["minimal", "low", "medium", "high", "xhigh"])
def test_an_effort_lets_a_template_think(server: Server, effort: str) -> None:
    assert message(server, reasoning_effort=effort)["reasoning"]
    quiet = message(server, reasoning_effort=effort, chat_template_kwargs={"enable_thinking": False})
    assert "reasoning" not in quiet  # what names the template's own variable goes before


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"thinking_token_budget": -2}, "thinking_token_budget", "from -1"),
    ({"thinking_token_budget": "many"}, "thinking_token_budget", "whole number"),
    ({"thinking": {"type": "perhaps"}}, "thinking.type", "perhaps"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens", "whole number"),
    ({"reasoning_effort": "some"}, "reasoning_effort", "some"),
]


@pytest.mark.parametrize("fields, param, why", REFUSED)
def test_what_is_wrong_is_refused_by_name(server: Server, fields: dict[str, Any], param: str, why: str) -> None:
    told = chat(server, **fields)
    assert told.status_code == 400, told.text
    error = told.json()["error"]
    assert error["param"].startswith(param) and why in error["message"], error
