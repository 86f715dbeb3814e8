"""Answers taken apart for HTTP: what is told, and what is not."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import quintet
from quintet.chat import output_parser
from quintet.chat.output_parser import OutputFormat, OutputParser, Parsers, marker_ids
from quintet.chat.tool_choice import MAX_TOOLS, ToolChoice, forced_grammar, read_tools, strict_grammar
from quintet.parsers import REASONING_PARSERS, TOOL_PARSERS, CallBegin, Parsed, Tool, ToolCall, parse
from quintet.sampling_params import ParameterError
from quintet.server.config import ServerConfig
from quintet.server.http.cooperative import CooperativeWork
from quintet.server.http.openai.messages import deltas_of, message_of, parse_all
from quintet.tokenizers.tokenizer import load_tokenizer
from tests.server.fakes import bundled_tokenizer

HERMES, THINK = TOOL_PARSERS.get("hermes"), REASONING_PARSERS.get("think")
LISTENING = OutputFormat(HERMES, THINK, (Tool("f"), Tool("g")))
CALL = '<tool_call>{"name": "f", "arguments": {"a": [1, "<"]}}</tool_call>'
TEXT = f"<think>Hm.</think>Well: {CALL}{CALL.replace('f', 'g', 1)}"


async def whole(text: str, listening: OutputFormat = LISTENING) -> tuple[Any, str | None]:
    speech = OutputParser(listening, whole=True)
    return message_of(await parse_all(speech, text, CooperativeWork())), speech.finish_reason_of("stop")


@pytest.mark.parametrize("step", [1, 2, 7, 10_000])
async def test_deltas_add_up_to_the_message(step: int) -> None:
    message, reason = await whole(TEXT)
    speech = OutputParser(LISTENING)
    pieces = [TEXT[at : at + step] for at in range(0, len(TEXT), step)]
    deltas = [delta for piece in pieces for delta in deltas_of(speech.feed(piece, ended=False))]
    deltas += deltas_of(speech.feed("", ended=True))
    assert "".join(each.content for each in deltas if isinstance(each.content, str)) == message.content == "Well:"
    assert "".join(each.reasoning for each in deltas if isinstance(each.reasoning, str)) == message.reasoning == "Hm."
    parts = [part for each in deltas if isinstance(each.tool_calls, list) for part in each.tool_calls]
    for index, call in enumerate(message.tool_calls):
        mine = [part.function for part in parts if part.index == index]
        assert "".join(part.arguments for part in mine) == call.function.arguments == '{"a": [1, "<"]}'
        assert mine[0].name == call.function.name == "fg"[index]
    for each in deltas:
        indices = [part.index for part in each.tool_calls] if isinstance(each.tool_calls, list) else []
        assert len(set(indices)) == len(indices)  # clients read the first part of a call alone
        assert each.content != ""  # a text would begin there
    assert reason == speech.finish_reason_of("stop") == "tool_calls"


async def test_a_call_that_broke_is_no_call() -> None:
    broken = '<tool_call>{"name": "f", "arguments": {"a": 1, oops}}</tool_call>'
    message, reason = await whole(broken)
    assert reason == "stop" and not message.tool_calls and message.content == broken
    speech = OutputParser(LISTENING)
    begun = speech.feed(broken, ended=True)[0]  # in a stream it has been sent
    assert isinstance(begun, CallBegin) and begun.name == "f"
    assert speech.finish_reason_of("stop") == "stop"


async def test_without_parallel_calls_the_first_alone_is_told() -> None:
    message, _ = await whole(TEXT, OutputFormat(HERMES, THINK, LISTENING.tools, parallel=False))
    assert [call.function.name for call in message.tool_calls] == ["f"]


async def test_thoughts_are_left_out_where_nobody_wants_them() -> None:
    message, _ = await whole(TEXT, OutputFormat(HERMES, THINK, LISTENING.tools, include_reasoning=False))
    assert message.content == "Well:" and not isinstance(message.reasoning, str)


def test_a_prompt_that_ends_within_the_answer_begins_no_thought() -> None:
    r1 = REASONING_PARSERS.get("deepseek_r1")
    assert r1.begins_inside("<a>") and not r1.begins_inside("<a><think>x</think>The answer is", continues=True)
    assert r1.begins_inside("<a><think>so far", continues=True)


def test_the_family_settles_which_of_several_formats_it_is() -> None:
    template = "{{ '<tool_calls>' }}{{ '</tool_calls>' }}"
    found = {family: Parsers.select(ServerConfig(), None, template, family).tool for family in ("jamba", "minimax")}
    assert found == {family: TOOL_PARSERS.get(family) for family in found}


def test_the_checkpoint_describes_its_parsers(tmp_path: Path) -> None:
    own = Path(quintet.__file__).parent / "bundled"
    shutil.copy(own / "tokenizer.json", tmp_path)
    config = json.loads((own / "tokenizer_config.json").read_text())
    template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "thinking": {"open": "<hm>", "close": "</hm>"},
            "tool_calls": {"open": "<c>", "close": "</c>", "content": "json", "transform": {"function": "{content}"}},
        },
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "response_template": template}))
    named = ServerConfig(tool_call_parser="hf", reasoning_parser="beam")
    found = Parsers.select(named, load_tokenizer(tmp_path), None)
    assert found.tool is not None and found.reasoning is not None
    read = parse('<hm>Hm.</hm>So: <c>{"name": "f", "arguments": {}}</c>', found.tool, found.reasoning)
    assert read == Parsed("Hm.", "So:", (ToolCall("f", "{}"),))
    with pytest.raises(ValueError, match="'hf' reads response_template of tokenizer_config.json, which this"):
        Parsers.select(ServerConfig(tool_call_parser="hf"), bundled_tokenizer(), None)


def test_of_special_tokens_markers_alone_are_asked_for() -> None:
    bundled = bundled_tokenizer()
    assert marker_ids(LISTENING, bundled) == []  # <tool_call> and <think> are tokens like others there
    solar = "\0".join(output_parser._texts(TOOL_PARSERS.get("solar_open2")))
    assert "<|tool_arg:value|>" in solar  # between a name and its value
    within = REASONING_PARSERS.get("openai_gptoss")
    assert marker_ids(OutputFormat(None, within), bundled) == [bundled.added["<|end|>"]] != sorted(bundled.special_ids)


def test_a_schema_without_an_end_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"properties": {"a": schema}}
    wanted = ToolChoice((Tool("f", schema, strict=True),), "required")
    with pytest.raises(ParameterError, match="nested too deep"):
        forced_grammar(wanted, LISTENING, {})
    assert strict_grammar(wanted._replace(mode="auto"), LISTENING, {}) == ""


def test_a_level_of_the_server_holds_tools_that_are_not_strict() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool, hermes = Tool("f", schema), OutputFormat(TOOL_PARSERS.get("hermes"))
    loose, strict = (ToolChoice((replace(tool, strict=each),), "auto") for each in (False, True))
    assert strict_grammar(loose, hermes, {}) == "" != strict_grammar(strict, hermes, {})
    assert strict_grammar(loose, hermes, {}, "parameter") == strict_grammar(strict, hermes, {})
    form = strict_grammar(loose, hermes, {}, "function")
    assert form and "city" not in form and "city" in strict_grammar(strict, hermes, {}, "function")
    assert strict_grammar(ToolChoice(), hermes, {}, "function") == ""


def test_allowed_tools_are_bounded_and_looked_up() -> None:
    tools = [{"type": "function", "function": {"name": f"f{each}"}} for each in range(MAX_TOOLS)]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools[::-1]}}
    assert len(read_tools(tools, choice).tools) == MAX_TOOLS
    choice["allowed_tools"] = {"mode": "auto", "tools": tools * 2}
    with pytest.raises(ParameterError, match="a list of 1 to 1024 tools"):
        read_tools(tools, choice)
