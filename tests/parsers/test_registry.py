"""Parsers by name: vLLM's names, and those that others bring."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from quintet.parsers import (
    FROM_CHECKPOINT,
    REASONING_PARSERS,
    TOOL_PARSERS,
    ReasoningParser,
    ToolParser,
    call_block,
    detect,
    load_plugin,
    parse,
    register,
)
from quintet.parsers.combinators import JsonCall
from quintet.parsers.registry import Registry

VLLM_TOOLS = """apertus cohere_command3 deepseek_v3 deepseek_v31 deepseek_v32 ernie45 functiongemma gemma4
gigachat3 glm45 glm47 granite granite-20b-fc granite4 hermes hunyuan_a13b internlm jamba kimi_k2 lfm2 llama3_json
llama4_json llama4_pythonic longcat mimo minimax minimax_m2 mistral olmo3 openai phi4_mini_json pythonic
qwen3_coder qwen3_xml seed_oss step3 step3p5 xlam deepseek_v4 deepseek_v41 dots hy_v3 hy_v4 inkling k2_horizon kimi_k3
ling3 minicpm5 minimax_m3 muse muse_glimmer musespark1x plamo3 poolside_v1 qwen3_json step5""".split()
VLLM_REASONING = """cohere_command3 deepseek_r1 deepseek_v3 ernie45 gemma4 glm45 glm47 granite holo2 hunyuan_a13b
kimi_k2 mimo minimax_m2 mistral nemotron_v3 olmo3 openai_gptoss qwen3 seed_oss step3 step3p5 deepseek_v41
granite_thinking_parser inkling k2_horizon ling3 minicpmv minimax_m2_append_think minimax_m3 muse muse_glimmer
musespark1x plamo3 step5""".split()
PLUGIN = """
from quintet.parsers import ToolParser, call_block, register
from quintet.parsers.combinators import JsonCall
register("{name}", ToolParser((call_block("<{name}>", JsonCall(), "</{name}>"),), aliases=("{name}_too",)))
"""


def test_vllms_names_are_known() -> None:
    assert set(VLLM_TOOLS) - set(TOOL_PARSERS.names()) == set()
    assert set(VLLM_REASONING) - set(REASONING_PARSERS.names()) == set()


def test_an_unknown_name_is_told_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="no tool parser is named 'hermess'; there are .*hermes, hf, hunyuan"):
        TOOL_PARSERS.get("hermess")


def test_a_name_has_one_parser() -> None:
    with pytest.raises(ValueError, match="a tool parser is already named 'qwen3_xml'"):
        register("never_there", ToolParser((call_block("<a>", JsonCall()),), aliases=("qwen3_xml",)))
    with pytest.raises(ValueError, match="a tool parser is already named 'hf'"):
        register("never_there", ToolParser((call_block("<a>", JsonCall()),), aliases=("hf",)))
    with pytest.raises(ValueError, match="no tool parser is named 'never_there'"):
        TOOL_PARSERS.get("never_there")
    register("hermes", TOOL_PARSERS.get("hermes"))  # the same once more
    with pytest.raises(ValueError, match="must be a ToolParser or a ReasoningParser, not int"):
        register("mine", 1)  # type: ignore[arg-type]


def test_a_file_brings_parsers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for held in ("_parsers", "_names"):
        monkeypatch.setattr(TOOL_PARSERS, held, dict(vars(TOOL_PARSERS)[held]))
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN.format(name="from_file"))
    assert load_plugin(file) == ["from_file", "from_file_too"]
    found = parse('<from_file>{"name": "f", "arguments": {}}</from_file>', TOOL_PARSERS.get("from_file_too"))
    assert [call.name for call in found.calls] == ["f"]


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("a.txt", "", "must be a Python file"),
        ("a.py", "x = 1", "registered no parser; call quintet.parsers.register in it"),
        ("a.py", "1 / 0", "failed: ZeroDivisionError: division by zero"),
        ("a.py", "(", "failed: SyntaxError"),
    ],
)
def test_a_file_that_brings_none_is_refused(tmp_path: Path, name: str, text: str, why: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(why)):
        load_plugin(tmp_path / name)
    with pytest.raises(ValueError, match="must be a Python file"):
        load_plugin(tmp_path / "missing.py")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package beside quintet with two entry points."""
    (tmp_path / "their_parsers.py").write_text(
        "from quintet.parsers import ReasoningParser\ntheirs = ReasoningParser(('<hm>',), ('</hm>',))\nwrong = 1\n"
    )
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[quintet.reasoning_parsers]\ntheirs = their_parsers:theirs\nwrong = their_parsers:wrong\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path


def test_an_installed_package_brings_parsers(installed: Path) -> None:
    registry = Registry(ReasoningParser, "reasoning", "quintet.reasoning_parsers", {})
    assert registry.names() == [*FROM_CHECKPOINT, "theirs", "wrong"]
    assert registry.items() == []  # nothing is loaded before it is asked for
    assert parse("<hm>x</hm>y", None, registry.get("theirs")).reasoning == "x"
    with pytest.raises(
        ValueError, match="'their_parsers:wrong' of quintet.reasoning_parsers must be a ReasoningParser"
    ):
        registry.get("wrong")


TEMPLATES = [
    ("hermes", "qwen3", "qwen3", "<tool_call>\n{'name': } </tool_call> {{ '<think>\\n\\n</think>' }}"),
    ("hermes", None, "qwen2", "within <tool_call></tool_call> XML tags:"),
    ("qwen3_coder", None, "qwen3_moe", "<tool_call>\n<function=example>\n<parameter=a>\n"),
    ("hermes", "deepseek_r1", "qwen2", "<tool_call> {{- '<|im_start|>assistant\\n<think>\\n' }} split('</think>')"),
    ("mistral", None, "mistral", "{{ '[TOOL_CALLS] [' }}"),
    ("mistral", "mistral", "mistral3", "[TOOL_CALLS] [THINK]"),
    ("llama3_json", None, "llama", 'Environment: ipython {"name": function name, "parameters": dictionary}'),
    ("llama4_pythonic", None, "llama4", '<|python_start|> ipython "parameters"'),
    ("deepseek_v3", "deepseek_r1", "deepseek_v3", "<｜tool▁calls▁begin｜> ```json <｜Assistant｜> </think>"),
    ("deepseek_v31", "deepseek_r1", "deepseek_v3", "<｜tool▁calls▁begin｜> <｜Assistant｜> <think> </think>"),
    ("kimi_k2", None, "kimi_k2", "<|tool_calls_section_begin|>"),
    ("glm45", "qwen3", "glm4_moe", "<tool_call> <arg_key> <arg_value> <think></think>"),
    ("openai", "openai_gptoss", "gpt_oss", "<|channel|>analysis<|message|> <|call|>"),
    ("minimax_m2", "qwen3", "minimax_m2", "<minimax:tool_call> <think> </think>"),
    ("jamba", None, "jamba", "<tool_calls>[ ]</tool_calls>"),
    ("minimax", None, "minimax_m1", "<tool_calls>\n</tool_calls>"),
    ("jamba", "hunyuan_a13b", "hunyuan_v1_moe", "<tool_calls> <think> </think> <answer>"),
    ("hermes", "ernie45", "ernie4_5_moe", "<tool_call> <think> </think> <response>"),
    ("seed_oss", "seed_oss", "seed_oss", "<seed:tool_call> <seed:think>"),
    ("granite", "granite", "granite", "<|tool_call|> Here is my thought process:"),
    ("gemma4", "gemma4", "gemma4", "<|tool_call>call:<tool_call|> <|channel>thought"),
    ("deepseek_v41", "qwen3", None, "<｜DSML｜ calls> <think> </think>"),
    ("minimax_m3", "minimax_m3", "minimax_m3_vl", "']<]minimax[>[' ~ '<tool_call>' '<mm:think>'"),
    ("k2_horizon", "k2_horizon", "k2_horizon", "<ifm|tool_calls>\n<ifm|tool_call> <ifm|think>"),
    ("muse", "muse", "muse_spark", "<atem:function_calls> '<|start|>assistant to=self<|message|>'"),
    ("muse", "muse_glimmer", "muse_glimmer", "<atem:function_calls> '<|start|>assistant to=self<|message|>'"),
    ("inkling", "inkling", "inkling", "<|content_invoke_tool_json|> <|content_thinking|>"),
    (None, None, "llama", "{% for message in messages %}{{ message.content }}{% endfor %}"),
    (None, None, None, ""),
]


@pytest.mark.parametrize(("tool", "reasoning", "model_type", "template"), TEMPLATES)
def test_a_template_tells_its_parsers(
    tool: str | None, reasoning: str | None, model_type: str | None, template: str
) -> None:
    assert detect(template, model_type) == (tool, reasoning)


def test_special_tokens_tell_where_there_is_no_template() -> None:
    assert detect("", "mistral", ["[TOOL_CALLS]", "[INST]"]) == ("mistral", None)
    assert detect("{{ messages }}", "qwen2", ["<tool_call>"]) == (None, None)


def test_a_file_with_parsers_of_both_kinds_is_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be named for both; and its dataclasses may have annotations that are text."""
    for registry in (TOOL_PARSERS, REASONING_PARSERS):
        for held in ("_parsers", "_names"):
            monkeypatch.setattr(registry, held, dict(vars(registry)[held]))
    file = tmp_path / "both.py"
    file.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\nfrom typing import ClassVar\n"
        "from quintet.parsers import ReasoningParser, ToolParser, call_block, register\n"
        "from quintet.parsers.combinators import JsonCall\n"
        "@dataclass\nclass Mine:\n    kind: ClassVar[int] = 1\n"
        "register('both_here', ToolParser((call_block('<c>', JsonCall(), '</c>'),), separator=''))\n"
        "register('both_here_too', ReasoningParser(opens=('<h>',), closes=('</h>',)))\n"
    )
    assert load_plugin(file) == load_plugin(str(file)) == ["both_here", "both_here_too"]
