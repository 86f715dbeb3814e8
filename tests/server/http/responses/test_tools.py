"""Calls and thoughts in responses: the bundled model, a server as users start it, and OpenAI's client."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai import pydantic_function_tool
from openai.types.responses import ResponseFunctionToolCall
from pydantic import BaseModel, Field

from tests.helpers.servers.serving import PATIENCE, Server
from tests.helpers.tools import CITY, SCHEMAS, SUMMANDS

jsonschema = pytest.importorskip("jsonschema")

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": CITY,
    "strict": True,
}
ADD: dict[str, Any] = {"type": "function", "name": "add", "parameters": SUMMANDS, "strict": True}
PARIS = "What is the weather in Paris?"
SUM = "What is 12 + 30?"
THINK: dict[str, Any] = {"reasoning": {"effort": "high"}}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--device", "cpu", "--max-model-len", "512", "--num-pages", "200") as made:
        yield made


@pytest.fixture
def ai(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE, _strict_response_validation=True
    ) as made:
        yield made


def ask(ai: openai.OpenAI, given: Any, **fields: Any) -> Any:
    return ai.responses.create(
        **{"model": "bundled", "input": given, "max_output_tokens": 100, "temperature": 0, **fields}
    )


def stream(ai: openai.OpenAI, given: Any, **fields: Any) -> tuple[list[Any], Any]:
    """The events, and what the client makes of them."""
    asked = {"model": "bundled", "input": given, "max_output_tokens": 100, "temperature": 0, **fields}
    with ai.responses.stream(**asked) as events:
        return list(events), events.get_final_response()


def call_of(response: Any) -> ResponseFunctionToolCall:
    [call] = [item for item in response.output if item.type == "function_call"]
    assert isinstance(call, ResponseFunctionToolCall)
    return call


@pytest.mark.parametrize(("strict", "city"), [(True, "Rome"), (False, "Paris")])
def test_a_strict_tool_is_called_as_its_schema_says(ai: openai.OpenAI, strict: bool, city: str) -> None:
    """Also where the model itself decides to; one that is not strict, with anything."""
    rome = {**CITY, "properties": {"city": {"enum": ["Rome"]}}}
    call = call_of(ask(ai, PARIS, tools=[{**WEATHER, "parameters": rome, "strict": strict}]))
    assert json.loads(call.arguments) == {"city": city}


def bare(response: Any) -> Any:
    """Its output, without what differs each time, and without what the client parses."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            apart = ("id", "call_id", "parsed", "parsed_arguments")
            return {key: plain(each) for key, each in value.items() if key not in apart}
        return [plain(each) for each in value] if isinstance(value, list) else value

    return plain([item.to_dict() for item in response.output])


def result(call: ResponseFunctionToolCall, output: Any = '{"sky": "rain"}') -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call.call_id, "output": output}


def test_a_call_a_result_and_an_answer(ai: openai.OpenAI) -> None:
    """The whole round, as OpenAI's guide has it: the client sends back what it was given."""
    first = ask(ai, PARIS, tools=[WEATHER], store=False)
    call = call_of(first)
    assert call.name == "get_weather" and json.loads(call.arguments) == {"city": "Paris"} and first.output_text == ""
    assert call.id and call.id.startswith("fc_") and call.call_id and call.status == "completed"
    assert first.status == "completed" and first.tool_choice == "auto" and first.parallel_tool_calls
    assert first.tools[0].to_dict() == WEATHER
    back = [{"role": "user", "content": PARIS}, *first.output, result(call)]
    second = ask(ai, back, tools=[WEATHER], store=False, max_output_tokens=60)
    assert second.output_text and second.output[0].type == "message"
    as_parts = [*back[:-1], result(call, [{"type": "input_text", "text": '{"sky": "rain"}'}])]
    assert ask(ai, as_parts, tools=[WEATHER], max_output_tokens=60).output_text == second.output_text


def test_a_result_alone_goes_on_with_the_stored_call(ai: openai.OpenAI) -> None:
    first = ask(ai, PARIS, tools=[WEATHER])
    call = call_of(first)
    by_name = ask(ai, [result(call)], previous_response_id=first.id, tools=[WEATHER])
    given = ask(ai, [{"role": "user", "content": PARIS}, *first.output, result(call)], tools=[WEATHER])
    assert by_name.output_text == given.output_text and by_name.usage.input_tokens == given.usage.input_tokens
    items = list(ai.responses.input_items.list(by_name.id, order="asc"))
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
    named: list[Any] = [{"type": "item_reference", "id": item.id} for item in items]
    assert ask(ai, named, tools=[WEATHER]).output_text == given.output_text
    assert ai.responses.retrieve(first.id).output[0].to_dict() == first.output[0].to_dict()
    counted = ai.responses.input_tokens.count(
        model="bundled", input=[result(call)], previous_response_id=first.id, tools=[WEATHER]
    )
    assert counted.input_tokens == by_name.usage.input_tokens


def test_a_streamed_call_is_the_whole_one(ai: openai.OpenAI) -> None:
    whole = ask(ai, PARIS, tools=[WEATHER])
    events, final = stream(ai, PARIS, tools=[WEATHER])
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(deltas) > 1 and [kind for kind in kinds if "delta" not in kind] == [
        "created", "in_progress", "output_item.added", "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip
    added, done = (next(e for e in events if e.type == f"response.output_item.{what}") for what in ("added", "done"))
    assert added.item.name == "get_weather" and added.item.arguments == "" and added.item.status == "in_progress"
    assert "".join(each.delta for each in deltas) == done.item.arguments == call_of(final).arguments
    assert {each.item_id for each in deltas} == {added.item.id} == {done.item.id} == {call_of(final).id}
    assert added.item.call_id == done.item.call_id == call_of(final).call_id
    assert bare(final) == bare(whole)
    assert json.loads(call_of(whole).arguments) == final.output[0].parsed_arguments


def test_thoughts_are_items_streamed_or_not_and_may_be_sent_back(ai: openai.OpenAI) -> None:
    whole = ask(ai, SUM, **THINK)
    thought, message = whole.output
    assert thought.type == "reasoning" and thought.id.startswith("rs_") and thought.summary == []
    assert "carry" in thought.content[0].text and thought.encrypted_content is None
    assert (
        message.type == "message" and whole.output_text and "think>" not in thought.content[0].text + message.to_json()
    )
    assert whole.reasoning.effort == "high"
    events, final = stream(ai, SUM, **THINK)
    assert bare(final) == bare(whole)
    kinds = [event.type.removeprefix("response.") for event in events if "delta" not in event.type]
    part = ["content_part.added", "{}.done", "content_part.done"]
    assert kinds == [
        "created", "in_progress", "output_item.added", *[each.format("reasoning_text") for each in part],
        "output_item.done", "output_item.added", *[each.format("output_text") for each in part], "output_item.done",
        "completed",
    ]  # fmt: skip
    thoughts = [event for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(event.delta for event in thoughts) == thought.content[0].text
    assert {(event.output_index, event.content_index) for event in thoughts} == {(0, 0)}
    assert {event.output_index for event in events if event.type == "response.output_text.delta"} == {1}
    back = [{"role": "user", "content": SUM}, *whole.output, {"role": "user", "content": "Thanks."}]
    assert ask(ai, back).output_text == ask(ai, "Thanks.", previous_response_id=whole.id).output_text
    assert [item.type for item in ask(ai, SUM, reasoning={"effort": "none"}).output] == ["message"]


def test_a_thought_that_is_asked_for_sealed_comes_back_alone(ai: openai.OpenAI) -> None:
    """What clients do that keep nothing on the server: the opaque text is all that some send back."""
    first = ask(ai, SUM, include=["reasoning.encrypted_content"], store=False, **THINK)
    thought = first.output[0]
    assert thought.encrypted_content and "carry" not in thought.encrypted_content
    opaque = {"type": "reasoning", "id": thought.id, "summary": [], "encrypted_content": thought.encrypted_content}
    asked, more = {"role": "user", "content": SUM}, {"role": "user", "content": "Thanks."}
    whole = ask(ai, [asked, *first.output, more], store=False)
    assert ask(ai, [asked, opaque, first.output[1], more], store=False).output_text == whole.output_text


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("asked", ["required", "add", "allowed"])
def test_a_call_that_must_come_comes_and_follows_its_schema(ai: openai.OpenAI, asked: str, seed: int) -> None:
    wanted: Any = {
        "required": "required",
        "add": {"type": "function", "name": "add"},
        "allowed": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]},
    }[asked]
    answer = ask(
        ai, "Hello!", tools=[WEATHER, ADD], tool_choice=wanted, temperature=1.0, parallel_tool_calls=False,
        max_output_tokens=300, extra_body={"seed": seed},
    )  # fmt: skip
    call = call_of(answer)
    assert asked == "required" or call.name == "add"
    jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    assert answer.to_dict()["tool_choice"] == wanted and not answer.parallel_tool_calls


def test_what_is_no_call_is_a_message(ai: openai.OpenAI) -> None:
    plain = ask(ai, "Hello!", tools=[WEATHER], tool_choice="none")
    auto = ask(ai, "Hello!", tools=[WEATHER])
    assert [item.type for item in auto.output] == ["message"] and auto.output_text == plain.output_text


def test_a_call_that_is_cut_off_is_incomplete_and_no_part_of_what_follows(ai: openai.OpenAI) -> None:
    cut = ask(ai, PARIS, tools=[WEATHER], max_output_tokens=12)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    [call] = cut.output
    assert call.type == "function_call" and call.status == "incomplete"
    assert ask(ai, "Hello!", previous_response_id=cut.id).output_text
    with pytest.raises(openai.BadRequestError, match=call.call_id):
        ask(ai, [result(call)], previous_response_id=cut.id)


def test_a_call_in_the_background_is_read_again_and_continued(ai: openai.OpenAI) -> None:
    with ai.responses.create(
        model="bundled", input=PARIS, tools=[WEATHER], temperature=0, background=True, stream=True
    ) as events:  # type: ignore[call-overload]
        made = list(events)
    last = made[-1]
    assert last.type == "response.completed"
    again = list(ai.responses.retrieve(last.response.id, stream=True, starting_after=3))
    assert [event.to_dict() for event in again] == [event.to_dict() for event in made[4:]]
    after = ask(ai, [result(call_of(last.response))], previous_response_id=last.response.id, tools=[WEATHER])
    assert after.output_text


class Place(BaseModel):
    city: str


class Pet(BaseModel):
    name: str = Field(max_length=12)
    legs: Literal[2, 4]


def test_the_client_parses_calls_and_answers(ai: openai.OpenAI) -> None:
    tool: Any = pydantic_function_tool(Place, name="get_weather")
    made = ai.responses.parse(model="bundled", input=PARIS, tools=[tool], temperature=0)
    assert made.output[0].type == "function_call" and made.output[0].parsed_arguments == Place(city="Paris")
    for asked in ("auto", {"type": "function", "name": "get_weather"}):  # a format is for text: a call may come instead
        made = ai.responses.parse(
            model="bundled", input=PARIS, tools=[tool], tool_choice=asked, text_format=Pet, temperature=0
        )
        assert call_of(made).name == "get_weather" and made.output_parsed is None
    pet = ai.responses.parse(model="bundled", input="A cat, please.", text_format=Pet, temperature=0)
    assert isinstance(pet.output_parsed, Pet)
    with ai.responses.stream(
        model="bundled", input="A cat, please.", text_format=Pet, tools=[tool], tool_choice="none", temperature=0
    ) as events:
        assert isinstance(events.get_final_response().output_parsed, Pet)


def test_an_agent_calls_and_its_last_word_has_a_type(ai: openai.OpenAI) -> None:
    """Tools and a shape in one request, as agents send them: a call first, then an answer in shape."""
    fields: dict[str, Any] = {
        "model": "bundled", "tools": [pydantic_function_tool(Place, name="get_weather")], "text_format": Pet,
        "temperature": 0, "max_output_tokens": 200,
    }  # fmt: skip
    first = ai.responses.parse(input=PARIS, **fields)
    call = call_of(first)
    assert first.output_parsed is None and json.loads(call.arguments) == {"city": "Paris"}
    last = ai.responses.parse(input=[result(call)], previous_response_id=first.id, tool_choice="none", **fields)
    assert isinstance(last.output_parsed, Pet)
    with ai.responses.stream(input=PARIS, **fields) as events:
        assert bare(events.get_final_response()) == bare(first)


CALL: dict[str, Any] = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
OUT: dict[str, Any] = {"type": "function_call_output", "call_id": "call_1", "output": "1"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "function"}]}, "tools[0].name", "1 to 256"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function", "beside"),
    ({"tools": [{**ADD, "parameters": "none"}]}, "tools[0].parameters", "text"),
    ({"tools": [{**ADD, "strict": "yes"}]}, "tools[0].strict", "true or false"),
    ({"tools": [WEATHER, {**ADD, "parameters": {"properties": {"a": {"not": {}}}}}]}, "tools[1].parameters", "not"),
    ({"tools": [ADD, ADD]}, "tools", "twice"),
    ({"tools": [{"type": "mcp", "server_label": "a"}]}, "tools[0].server_label", "--tool-server"),
    ({"tools": [{"type": "functions"}]}, "tools[0].type", "'function'"),
    ({"tools": [{**ADD, "defer_loading": True}]}, "tools[0].defer_loading", "leave it out"),
    ({"tools": [ADD], "tool_choice": "maybe"}, "tool_choice", "maybe"),
    ({"tools": [ADD], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name", "one of the tools"),
    ({"tools": [ADD], "tool_choice": {"type": "web_search"}}, "tool_choice.type", "web_search"),
    ({"tools": [ADD], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
     "tool_choice.tools", "1 to"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tools": [{**ADD, "parameters": {"properties": {"a": {"not": {}}}}}], "tool_choice": "required"},
     "tools[0].parameters", "not"),
    ({"tools": [{**ADD, "parameters": {"properties": {"a": {"not": {}}}}}],
      "text": {"format": {"type": "json_object"}}}, "tools[0].parameters", "not"),
    ({"input": [OUT]}, "input[0].call_id", "'call_1'"),
    ({"input": [OUT, CALL]}, "input[0].call_id", "before"),
    ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments", "an object"),
    ({"input": [{**CALL, "name": ""}]}, "input[0].name", "1 to 256"),
    ({"input": [{**CALL, "namespace": "crm"}]}, "input[0].namespace", "leave"),
    ({"input": [CALL, {**OUT, "output": None}]}, "input[1].output", "null"),
    ({"input": [CALL, {**OUT, "output": [{"type": "input_image"}]}]}, "input[1].output[0].image_url", "must be text"),
    ({"input": [{"type": "reasoning", "content": "Hm."}]}, "input[0].content", "a list"),
    ({"input": [{"type": "reasoning", "summary": [{"type": "summary_text"}]}]}, "input[0].summary[0].text", "null"),
    ({"input": [{"type": "reasoning", "encrypted_content": "gAAAA"}]}, "input[0].encrypted_content", "leave"),
    ({"input": [{"type": "reasoning"}]}, "input", "says nothing"),
    ({"input": [{"type": "computer_call"}]}, "input[0]", "function_call"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort", "much"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "blamed", "why"), REFUSED)
def test_what_is_wrong_is_refused_by_name(ai: openai.OpenAI, fields: dict[str, Any], blamed: str, why: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(ai, given=fields.pop("input", PARIS), extra_body=fields)
    error: Any = caught.value.body
    assert error["param"] == blamed and why in error["message"], error


def test_a_thought_is_counted_and_a_shape_stands_behind_it(ai: openai.OpenAI) -> None:
    form: Any = {
        "format": {"type": "json_schema", "name": "n", "schema": {"type": "integer", "minimum": 0, "maximum": 99}}
    }
    fields: dict[str, Any] = {"model": "bundled", "input": SUM, "temperature": 0, **THINK}
    free, shaped = ai.responses.create(**fields), ai.responses.create(**fields, text=form)
    thoughts = [each.output[0].content[0].text for each in (free, shaped)]  # type: ignore[union-attr, index]
    assert thoughts[0] == thoughts[1] and 0 <= int(shaped.output_text) <= 99
    assert free.usage and shaped.usage
    counts = [each.output_tokens_details.reasoning_tokens for each in (free.usage, shaped.usage)]
    assert counts[0] == counts[1] and 0 < counts[0] < free.usage.output_tokens


def test_a_thought_ends_with_its_budget(ai: openai.OpenAI) -> None:
    _, final = stream(ai, SUM, extra_body={"thinking_token_budget": 3}, **THINK)
    assert final.usage and final.usage.output_tokens_details.reasoning_tokens == 3
    assert [each.type for each in final.output] == ["reasoning", "message"]


def test_an_effort_of_none_switches_thinking_off(ai: openai.OpenAI) -> None:
    quiet = ai.responses.create(model="bundled", input=SUM, temperature=0, reasoning={"effort": "none"})
    assert [each.type for each in quiet.output] == ["message"]
    assert quiet.usage and quiet.usage.output_tokens_details.reasoning_tokens == 0
