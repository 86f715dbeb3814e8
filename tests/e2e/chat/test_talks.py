"""LLM.chat and AsyncLLM.chat: what an answer is made of, beside its text; and answers that must be calls."""

import functools
import json
import pickle
from typing import Any

import pytest

from quintet import LLM, AsyncLLM, CompletionOutput, RequestOutputKind, SamplingParams
from quintet.config import BUNDLED
from quintet.parsers import CallArguments, CallBegin, CallEnd, Content, Reasoning, ToolCall

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PLACE = {"type": "object", "properties": {"place": {"enum": ["Rome", "Oslo"]}}, "required": ["place"]}


def tool(name: str, parameters: dict[str, Any] = CITY) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "Get it", "parameters": parameters}}


TOOLS = [tool("get_weather")]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
SUM = [{"role": "user", "content": "What is 27 + 45?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=100)
THINK = {"enable_thinking": True}


@functools.cache
def bundled() -> LLM:
    return LLM(BUNDLED, device="cpu", use_tqdm=False, kv_cache_memory_bytes="64M")


def chat(messages: Any, params: SamplingParams = GREEDY, **options: Any) -> list[CompletionOutput]:
    return [each.outputs[0] for each in bundled().chat(messages, params, use_tqdm=False, **options)]


def test_a_call_stands_beside_the_text_and_its_result_is_answered() -> None:
    (answer,) = chat(WEATHER, tools=TOOLS)
    assert answer.text == '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
    (call,) = answer.tool_calls
    assert (call.name, json.loads(call.arguments), call.complete) == ("get_weather", {"city": "Paris"}, True)
    assert (answer.content, answer.reasoning, answer.finish_reason) == ("", "", "stop")
    assert answer.message is not None
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"}
    (answer,) = chat([*WEATHER, answer.message, result], tools=TOOLS)
    assert answer.content == answer.text == "The weather in Paris: sunny, 21 degrees."
    assert answer.message == {"role": "assistant", "content": answer.text} and answer.tool_calls == []


def test_thoughts_stand_apart_in_each_of_several_conversations() -> None:
    thinking, plain = chat([SUM, WEATHER], chat_template_kwargs=THINK)
    assert thinking.text == f"<think>{thinking.reasoning}</think>{thinking.content}"
    assert thinking.content == "27 + 45 = 72" and "carry 1" in thinking.reasoning
    assert thinking.message == {"role": "assistant", "content": thinking.content, "reasoning": thinking.reasoning}
    assert plain.message is not None and plain.tool_calls == []
    (unsplit,) = chat(SUM, chat_template_kwargs=THINK, reasoning_parser="none")
    assert unsplit.content == unsplit.text == thinking.text and not unsplit.reasoning


@pytest.mark.parametrize(
    ("choice", "name"),
    [("required", "get_weather"), ({"type": "function", "function": {"name": "go"}}, "go")],
)
def test_calls_that_must_come_come_as_their_schema_says(choice: Any, name: str) -> None:
    hello = [{"role": "user", "content": "Hello!"}]
    params = SamplingParams(temperature=0, max_tokens=100)
    greeting = chat(hello, tools=[tool("go", PLACE)])[0]
    assert greeting.tool_calls == [] and greeting.content
    tools = [tool("get_weather", PLACE), tool("go", PLACE)] if name == "go" else [tool("get_weather", PLACE)]
    for answer in chat([hello, WEATHER], params, tools=tools, tool_choice=choice):
        assert [each.name for each in answer.tool_calls][:1] == [name]
        assert json.loads(answer.tool_calls[0].arguments)["place"] in ("Rome", "Oslo")
    assert params.structured_outputs is None  # the caller's own


def test_a_strict_tool_is_called_as_its_schema_says() -> None:
    """Also where the model itself decides to."""
    strict = tool("get_weather", PLACE)
    strict["function"]["strict"] = True
    (answer,) = chat(WEATHER, tools=[strict])
    assert json.loads(answer.tool_calls[0].arguments)["place"] in ("Rome", "Oslo")


def test_shapes_are_kept_in_chats_and_are_content() -> None:
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs={"choice": ["Paris", "<think>"]})
    (answer,) = chat(WEATHER, params, tools=TOOLS, tool_choice="none")
    assert answer.content == answer.text in ("Paris", "<think>")
    with pytest.raises(ValueError, match="tool_choice asks for calls, and structured_outputs for another answer"):
        chat(WEATHER, params, tools=TOOLS, tool_choice="required")


def test_a_shape_stands_behind_what_is_thought() -> None:
    shape = {"json": {"type": "integer", "maximum": 99, "minimum": 0}}
    for seed in range(4):
        params = SamplingParams(temperature=1.5, seed=seed, max_tokens=200, structured_outputs=shape)
        (answer,) = chat(SUM, params, chat_template_kwargs=THINK)
        assert answer.finish_reason != "stop" or 0 <= json.loads(answer.content) <= 99
        (bare,) = chat(SUM, params)  # the template leaves thinking off
        assert not bare.reasoning and 0 <= json.loads(bare.content) <= 99
    (greedy,) = chat(SUM, SamplingParams(temperature=0, max_tokens=200, structured_outputs=shape),
                     chat_template_kwargs=THINK)  # fmt: skip
    assert "carry" in greedy.reasoning and greedy.content.isdigit()


def test_hot_answers_of_a_model_without_weights_have_their_shape_behind_a_thought() -> None:
    """It says anything that it may: thoughts are cut by their budget, and what follows is valid."""
    bare = {"disable_any_whitespace": True}
    wild = LLM(BUNDLED, device="null", load_format="dummy", use_tqdm=False, num_pages=200, max_model_len=512,
               structured_outputs_config=bare)  # fmt: skip
    parts = {"a": {"type": "string", "maxLength": 5}, "b": {"enum": [1, None]}}
    schema = {"type": "object", "properties": parts, "required": ["a", "b"], "additionalProperties": False}
    thought = 0
    for seed in range(30):
        params = SamplingParams(temperature=1.5, seed=seed, max_tokens=120, structured_outputs={"json": schema},
                                thinking_token_budget=seed % 10)  # fmt: skip
        (output,) = wild.chat(SUM, params, use_tqdm=False, chat_template_kwargs=THINK)
        answer = output.outputs[0]
        thought += "<think>" in answer.text
        if answer.finish_reason == "stop":
            assert set(json.loads(answer.content)) == {"a", "b"} and "think>" not in answer.reasoning
    assert 5 < thought < 30


def test_two_calls_and_the_first_alone() -> None:
    both = [{"role": "user", "content": "What is the weather in Rome and Berlin?"}]
    arguments = [[each.arguments for each in chat(both, tools=TOOLS, parallel_tool_calls=many)[0].tool_calls]
                 for many in (True, False)]  # fmt: skip
    assert arguments == [['{"city": "Rome"}', '{"city": "Berlin"}'], ['{"city": "Rome"}']]


def test_a_call_that_was_cut_off_is_no_part_of_the_message() -> None:
    (answer,) = chat(WEATHER, SamplingParams(temperature=0, max_tokens=12), tools=TOOLS)
    (call,) = answer.tool_calls
    assert not call.complete and answer.finish_reason == "length"
    assert answer.message == {"role": "assistant", "content": ""}


def test_a_stream_adds_up_to_the_answer() -> None:
    outputs = [each.outputs[0] for each in bundled().stream_chat(SUM, GREEDY, chat_template_kwargs=THINK)]
    (whole,) = chat(SUM, chat_template_kwargs=THINK)
    assert "".join(each.reasoning for each in outputs) == whole.reasoning
    assert "".join(each.content for each in outputs) == whole.content
    events = [event for each in outputs for event in each.events]
    assert "".join(each.text for each in events if isinstance(each, Reasoning)) == whole.reasoning
    assert "".join(each.text for each in events if isinstance(each, Content)) == whole.content
    assert [each.message for each in outputs] == [None] * (len(outputs) - 1) + [whole.message]


def test_calls_stream_as_they_come_from_every_completion() -> None:
    params = SamplingParams(temperature=0, max_tokens=100, n=2)
    events: dict[int, list[Any]] = {0: [], 1: []}
    last: dict[int, list[ToolCall]] = {}
    for output in bundled().stream_chat(WEATHER, params, tools=TOOLS):
        for each in output.outputs:
            events[each.index] += each.events
            last[each.index] = list(each.tool_calls)
    for index, heard in events.items():
        begin, *middle, end = heard
        assert isinstance(begin, CallBegin) and end == CallEnd(0) and len(middle) > 1
        arguments = "".join(each.text for each in middle if isinstance(each, CallArguments))
        assert last[index] == [ToolCall("get_weather", arguments, begin.id)]
    assert last[0][0].id != last[1][0].id


@pytest.mark.parametrize("kind", list(RequestOutputKind))
async def test_coroutines_get_the_same(kind: RequestOutputKind) -> None:
    llm = AsyncLLM(BUNDLED, device="cpu", kv_cache_memory_bytes="64M")
    params = SamplingParams(temperature=0, max_tokens=100, output_kind=kind)
    (whole,) = chat(SUM, chat_template_kwargs=THINK)
    try:
        outputs = [each.outputs[0] async for each in llm.chat(SUM, params, chat_template_kwargs=THINK)]
        said = [each.reasoning + each.content for each in outputs]
        assert ("".join(said) if kind == RequestOutputKind.DELTA else said[-1]) == whole.reasoning + whole.content
        assert outputs[-1].message == whole.message
        calls = [each.outputs[0] async for each in llm.chat(WEATHER, params, tools=TOOLS, tool_choice="required")]
        assert json.loads(calls[-1].tool_calls[0].arguments).keys() == {"city"}
        shaped = params.clone()
        shaped.structured_outputs = {"regex": "[0-9]{3}"}
        digits = [each.outputs[0] async for each in llm.chat(SUM, shaped)]
        assert calls[-1].message and digits[-1].message and digits[-1].message["content"].isdigit()
    finally:
        llm.shutdown()


def test_outputs_travel() -> None:
    (answer,) = chat(WEATHER, tools=TOOLS)
    assert pickle.loads(pickle.dumps(answer)) == answer  # noqa: S301


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tool_chioce": "auto"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice is wrong: unknown value 'sometimes'"),
        ({"tool_choice": "required"}, "tool_choice is required, and there are no tools"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\]\.function"),
        ({"tools": TOOLS * 2}, "has a name twice"),
        ({"reasoning_parser": "qwen4"}, "no reasoning parser is named 'qwen4'"),
        ({"tool_call_parser": "hermess"}, "no tool parser is named 'hermess'"),
        (
            {"tool_call_parser": "hf"},
            "reads response_template of tokenizer_config.json, which this checkpoint",
        ),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        chat(WEATHER, **options)
