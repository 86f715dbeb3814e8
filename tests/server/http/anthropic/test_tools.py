"""Calls and thoughts in messages: the bundled model, a server as users start it, and Anthropic's client."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.helpers.servers.serving import PATIENCE, Server
from tests.helpers.tools import CITY as SCHEMA

jsonschema = pytest.importorskip("jsonschema")

WEATHER: Any = {"name": "get_weather", "description": "Weather of a city", "input_schema": SCHEMA}
PARIS: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
SUM: list[Any] = [{"role": "user", "content": "What is 12 + 30?"}]
GREEDY = {"temperature": 0}  # which the client has no name for any more
THINK: Any = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    bare = '{"disable_any_whitespace": true}'  # which the model would else write on and on
    size = ("--max-model-len", "512", "--num-pages", "200")
    with Server("--device", "cpu", "--structured-outputs-config", bare, *size) as made:
        yield made


@pytest.fixture
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE) as made:
        yield made


def ask(claude: anthropic.Anthropic, messages: list[Any], **fields: Any) -> anthropic.types.Message:
    asked = {"model": "bundled", "max_tokens": 100, "extra_body": GREEDY, "messages": messages, **fields}
    return claude.messages.create(**asked)


def test_a_call_a_result_and_an_answer(claude: anthropic.Anthropic) -> None:
    first = ask(claude, PARIS, tools=[WEATHER])
    assert first.stop_reason == "tool_use"
    [call] = first.content
    assert call.type == "tool_use" and (call.name, call.input) == ("get_weather", {"city": "Paris"}) and call.id
    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"sky": "rain"}'}
    back = [*PARIS, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = ask(claude, back, tools=[WEATHER])
    assert second.content[0].type == "text" and second.stop_reason in ("end_turn", "max_tokens")


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner_of_the_client(claude: anthropic.Anthropic, stream: bool) -> None:
    """It asks for a thread first, which there is none of here, and then sends all messages."""
    cities = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Weather of a city.

        Args:
            city: its name
        """
        cities.append(city)
        return "rain"

    asked: dict[str, Any] = {"model": "bundled", "max_tokens": 60, "messages": PARIS, "tools": [get_weather]}
    runner = claude.beta.messages.tool_runner(**asked, max_iterations=2, stream=stream)
    turns: list[Any] = [turn.get_final_message() if stream else turn for turn in runner]  # type: ignore[union-attr]
    assert turns[0].stop_reason == "tool_use" and cities[0] == "Paris" and len(turns) == 2


def test_a_context_that_is_to_be_managed_is_left_as_it_is(claude: anthropic.Anthropic) -> None:
    keep: Any = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}, {"type": "clear_tool_uses_20250919"}]}
    asked: dict[str, Any] = {"model": "bundled", "max_tokens": 5, "messages": SUM, "context_management": keep}
    answer = claude.beta.messages.create(**asked)
    assert answer.context_management is not None and answer.context_management.applied_edits == []
    with claude.beta.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    assert final.context_management is not None and final.context_management.applied_edits == []
    assert claude.beta.messages.count_tokens(model="bundled", messages=SUM, context_management=keep).input_tokens > 0
    with pytest.raises(anthropic.BadRequestError, match="edits must be a list"):
        claude.beta.messages.create(**{**asked, "context_management": {"edits": "all"}})


def test_a_streamed_call_is_the_whole_one(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(
        model="bundled", max_tokens=100, extra_body=GREEDY, messages=PARIS, tools=[WEATHER]
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    [call] = final.content
    assert call.type == "tool_use" and call.input == {"city": "Paris"} and final.stop_reason == "tool_use"
    assert "input_json" in kinds and kinds.count("content_block_start") == kinds.count("content_block_stop") == 1


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_a_call_that_must_come_comes_and_follows_its_schema(claude: anthropic.Anthropic, choice: Any) -> None:
    fields: dict[str, Any] = {"tools": [WEATHER], "tool_choice": {**choice, "disable_parallel_tool_use": True}}
    fields["extra_body"] = {"temperature": 1.0, "seed": 1}
    *thoughts, call = ask(claude, [{"role": "user", "content": "Hello!"}], max_tokens=300, **fields).content
    assert call.type == "tool_use" and all(block.type == "thinking" for block in thoughts)
    jsonschema.validate(call.input, SCHEMA)


def test_a_strict_tool_is_called_as_its_schema_says(claude: anthropic.Anthropic) -> None:
    """Also where the model itself decides to."""
    rome = {**SCHEMA, "properties": {"city": {"enum": ["Rome"]}}}
    [call] = ask(claude, PARIS, tools=[{**WEATHER, "input_schema": rome, "strict": True}]).content
    assert call.type == "tool_use" and call.input == {"city": "Rome"}


def test_a_budget_ends_a_thought(claude: anthropic.Anthropic) -> None:
    free = ask(claude, SUM, thinking=THINK).content[0]
    short = ask(claude, SUM, thinking={"type": "enabled", "budget_tokens": 4}).content
    assert free.type == short[0].type == "thinking"
    assert short[0].thinking != free.thinking and [each.type for each in short] == ["thinking", "text"]
    assert "think>" not in short[1].text  # what the model thinks behind the budget is thought, up to its own end


def test_thoughts_that_are_not_to_be_shown_are_not(claude: anthropic.Anthropic) -> None:
    shown: Any = {**THINK, "display": "summarized"}
    omitted: Any = {**THINK, "display": "omitted"}
    both = [ask(claude, SUM, thinking=each) for each in (shown, omitted)]
    assert [each.type for each in both[0].content] == ["thinking", "text"]
    assert [each.type for each in both[1].content] == ["text"] and both[1].content[0] == both[0].content[1]
    assert both[0].usage.output_tokens == both[1].usage.output_tokens


def test_a_shape_comes_behind_a_thought(claude: anthropic.Anthropic) -> None:
    city: Any = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form: Any = {"format": {"type": "json_schema", "schema": city}, "effort": "low"}
    thought, text = ask(claude, SUM, thinking=THINK, output_config=form, max_tokens=400).content
    assert thought.type == "thinking" and thought.thinking and text.type == "text"
    jsonschema.validate(json.loads(text.text), city)


def test_a_thought_is_a_block_streamed_or_not_and_may_be_sent_back(claude: anthropic.Anthropic) -> None:
    whole = ask(claude, SUM, thinking=THINK)
    thought, text = whole.content
    assert thought.type == "thinking" and "carry" in thought.thinking and text.type == "text" and text.text
    assert "think>" not in thought.thinking + text.text
    with claude.messages.stream(
        model="bundled", max_tokens=100, extra_body=GREEDY, messages=SUM, thinking=THINK
    ) as stream:
        streamed = stream.get_final_message()
    assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in whole.content]
    back = [*SUM, {"role": "assistant", "content": whole.content}, {"role": "user", "content": "Thanks."}]
    assert ask(claude, back).stop_reason in ("end_turn", "max_tokens")
    silent = ask(claude, SUM, thinking={"type": "disabled"})
    assert [block.type for block in silent.content] == ["text"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema must be a JSON schema"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    ({"tools": [WEATHER, WEATHER]}, "twice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}}, "there are no tools"),
    ({"messages": [*PARIS, {"role": "assistant", "content": [
        {"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]}, "ends with a call"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": 3}]}]},
     "input must"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "why"), REFUSED)
def test_what_is_wrong_is_refused_by_name(claude: anthropic.Anthropic, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(claude, **{"messages": PARIS, **fields})
    assert why in str(caught.value)
