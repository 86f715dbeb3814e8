"""What models write, after their public templates and documentation: a writer for each tool parser."""

import json
from collections.abc import Callable
from typing import Any

from quintet.parsers import Tool

Asked = tuple[str, dict[str, Any]]
"""A function's name and its arguments."""

WEATHER: Asked = ("get_weather", {"city": "Zürich 🌧", "days": 3})
NESTED: Asked = ("book", {"trip": {"legs": [{"from": "A", "to": "B"}, {"from": "B"}], "fare": -1.5e3}, "paid": True})
QUOTED: Asked = ("say", {"text": 'He said "{[hi]}" \\ and left\n\tat 5'})
EMPTY: Asked = ("now", {})
CASES: dict[str, list[Asked]] = {
    "one call": [WEATHER],
    "parallel calls": [WEATHER, ("get_time", {"zone": "Europe/Zurich"})],
    "nested objects": [NESTED],
    "quotes and braces in strings": [QUOTED],
    "no arguments": [EMPTY],
    "everything": [QUOTED, EMPTY, NESTED, WEATHER],
}
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}


def schema(value: Any) -> dict[str, Any]:
    """The types of a value and of what is in it; those of a list's first item count for all."""
    if isinstance(value, dict):
        return {"type": "object", "properties": {key: schema(each) for key, each in value.items()}}
    return {"type": TYPES[type(value)]} | ({"items": schema(value[0])} if isinstance(value, list) else {})


TOOLS = [Tool(name, schema(arguments)) for name, arguments in [WEATHER, NESTED, QUOTED, EMPTY]]


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: Any) -> str:
    """As templates write an argument in XML: strings as they are, the rest in JSON."""
    return value if isinstance(value, str) else dumps(value)


def call(name: str, arguments: dict[str, Any], keys: tuple[str, str] = ("name", "arguments")) -> str:
    return dumps(dict(zip(keys, (name, arguments), strict=True)))


def each(form: Callable[[str, dict[str, Any]], str], between: str = "\n", around: tuple[str, str] = ("", "")) -> Any:
    return lambda calls: around[0] + between.join(form(name, arguments) for name, arguments in calls) + around[1]


def fields(form: str, between: str = "\n") -> Callable[[dict[str, Any]], str]:
    return lambda arguments: "".join(
        form.format(key=key, value=plain(value), text=str(isinstance(value, str)).lower()) + between
        for key, value in arguments.items()
    )


def k3(arguments: dict[str, Any]) -> str:
    """Each with its type, as Kimi-K3's template tags it."""
    names = {str: "string", int: "number", float: "number", bool: "boolean", dict: "object", list: "array"}
    return "".join(
        f'<|open|>argument key="{key}" type="{names[type(value)]}"<|sep|>{plain(value)}<|close|>argument<|sep|>'
        for key, value in arguments.items()
    )


def elements(value: Any, mark: str = "]<]minimax[>[") -> str:
    """As the macro to_xml of MiniMax-M3's template."""
    if isinstance(value, dict):
        return "".join(f"{mark}<{key}>{elements(each)}{mark}</{key}>" for key, each in value.items())
    if isinstance(value, list):
        return "".join(f"{mark}<item>{elements(each)}{mark}</item>" for each in value)
    return plain(value)


def python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def gemma(quote: str) -> Callable[[Any], str]:
    def write(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{write(inner)}" for key, inner in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(write(inner) for inner in value) + "]"
        return f"{quote}{value}{quote}" if isinstance(value, str) else dumps(value)

    return write


QWEN = fields("<parameter={key}>\n{value}\n</parameter>")
SEED = fields("<parameter={key}>{value}</parameter>")
GLM = fields("<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>")
INVOKE = fields('<parameter name="{key}">{value}</parameter>')
STEP = fields('<steptml:parameter name="{key}">{value}</steptml:parameter>')
DSML = fields('<｜DSML｜parameter name="{key}" string="{text}">{value}</｜DSML｜parameter>')
DSML_41 = fields('<｜DSML｜ parameter name="{key}" string="{text}">{value}</｜DSML｜ parameter>')
ATEM = fields('<atem:parameter name="{key}">{value}</atem:parameter>')
IFM = fields("<ifm|arg_key>{key}</ifm|arg_key>\n<ifm|arg_value>{value}</ifm|arg_value>")
HY3 = fields("<arg_key:opensource>{key}</arg_key:opensource>\n<arg_value:opensource>{value}</arg_value:opensource>")
HY4 = fields("<arg_key:opensource>{key}</arg_key:opensource><arg_value:opensource>{value}</arg_value:opensource>", "")
SOLAR = fields("<|tool_arg:start|>{key}<|tool_arg:value|>{value}<|tool_arg:end|>")
PARAM = fields('<param name="{key}">{value}</param>', "")
LISTED = {"between": ", "}

WRITERS: dict[str, Callable[[list[Asked]], str]] = {
    "hermes": each(lambda n, a: f"<tool_call>\n{call(n, a)}\n</tool_call>"),
    "longcat": each(lambda n, a: f"<longcat_tool_call>{call(n, a)}</longcat_tool_call>"),
    "granite-20b-fc": each(lambda n, a: f"<function_call> {call(n, a)}"),
    "gigachat3": each(lambda n, a: f"function call<|role_sep|>\n{call(n, a)}"),
    "internlm": each(
        lambda n, a: f"<|action_start|><|plugin|>\n{call(n, a, ('name', 'parameters'))}<|action_end|>",
    ),
    "mistral": each(lambda n, a: f"[TOOL_CALLS]{n}[ARGS]{dumps(a)}", between=""),
    "granite": each(call, **LISTED, around=("<|tool_call|>[", "]")),
    "jamba": each(call, between=",\n", around=("<tool_calls>[\n", "\n]</tool_calls>")),
    "minimax": each(call, around=("<tool_calls>\n", "\n</tool_calls>")),
    "phi4_mini_json": each(call, **LISTED, around=("functools[", "]")),
    "xlam": each(call, **LISTED, around=("[", "]")),
    "json": each(call),
    "llama3_json": each(lambda n, a: call(n, a, ("name", "parameters")), between="; "),
    "cohere_command3": each(
        lambda n, a: dumps({"tool_call_id": "0", "tool_name": n, "parameters": a}),
        between=",\n    ",
        around=("<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"),
    ),
    "apertus": each(lambda n, a: dumps({n: a}), **LISTED, around=("<|tools_prefix|>[", "]<|tools_suffix|>")),
    "pythonic": each(python, **LISTED, around=("[", "]")),
    "llama4_pythonic": each(python, **LISTED, around=("<|python_start|>[", "]<|python_end|>")),
    "lfm2": each(python, **LISTED, around=("<|tool_call_start|>[", "]<|tool_call_end|>")),
    "olmo3": each(python, around=("<function_calls>\n", "\n</function_calls>")),
    "functiongemma": each(
        lambda n, a: f"<start_function_call>call:{n}{gemma('<escape>')(a)}<end_function_call>", between=""
    ),
    "gemma4": each(lambda n, a: "<|tool_call>call:" + n + gemma('<|"|>')(a) + "<tool_call|>", between=""),
    "qwen3_coder": each(lambda n, a: f"<tool_call>\n<function={n}>\n{QWEN(a)}</function>\n</tool_call>"),
    "seed_oss": each(lambda n, a: f"<seed:tool_call>\n<function={n}>\n{SEED(a)}</function>\n</seed:tool_call>"),
    "glm45": each(lambda n, a: f"<tool_call>{n}\n{GLM(a)}</tool_call>"),
    # zai-org/GLM-4.7, chat_template.jinja
    "glm47": each(
        lambda n, a: (
            f"<tool_call>{n}"
            + "".join(f"<arg_key>{k}</arg_key><arg_value>{plain(v)}</arg_value>" for k, v in a.items())
            + "</tool_call>"
        ),
        between="",
    ),
    # vLLM's tests of hy_v3, hy_v4, solar_open2 and minicpm5, and what its parser of kimi_k3 says of the template
    "hy_v3": each(
        lambda n, a: f"<tool_call:opensource>{n}<tool_sep:opensource>\n{HY3(a)}</tool_call:opensource>",
        around=("<tool_calls:opensource>\n", "\n</tool_calls:opensource>"),
    ),
    "hy_v4": each(
        lambda n, a: f"<tool_call:opensource>{n}{HY4(a)}</tool_call:opensource>",
        between="",
        around=("<tool_calls:opensource>", "</tool_calls:opensource>"),
    ),
    "solar_open2": each(lambda n, a: f"<|tool_call:start|>{n}\n{SOLAR(a)}<|tool_call:end|>"),
    "kimi_k3": lambda calls: (
        "<|open|>tools<|sep|>"
        + "".join(
            f'<|open|>call tool="{n}" index="{at}"<|sep|>{k3(a)}<|close|>call<|sep|>'
            for at, (n, a) in enumerate(calls, 1)
        )
        + "<|close|>tools<|sep|>"
    ),
    "minicpm5": each(lambda n, a: f'<function name="{n}">{PARAM(a)}</function>'),
    "minimax_m2": each(
        lambda n, a: f'<invoke name="{n}">\n{INVOKE(a)}</invoke>',
        around=("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
    ),
    "step3": each(
        lambda n, a: (
            "<｜tool_call_begin｜>function<｜tool_sep｜>"
            f'<steptml:invoke name="{n}">\n{STEP(a)}</steptml:invoke><｜tool_call_end｜>'
        ),
        around=("<｜tool_calls_begin｜>\n", "\n<｜tool_calls_end｜>"),
    ),
    "deepseek_v32": each(
        lambda n, a: f'<｜DSML｜invoke name="{n}">\n{DSML(a)}</｜DSML｜invoke>',
        around=("<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>"),
    ),
    "deepseek_v4": each(
        lambda n, a: f'<｜DSML｜invoke name="{n}">\n{DSML(a)}</｜DSML｜invoke>',
        around=("<｜DSML｜tool_calls>\n", "\n</｜DSML｜tool_calls>"),
    ),
    # the reference encoding of DeepSeek-V4.1, as vLLM has it in its tokenizers
    "deepseek_v41": each(
        lambda n, a: f'<｜DSML｜ invoke name="{n}">\n{DSML_41(a)}</｜DSML｜ invoke>',
        around=("<｜DSML｜ calls>\n", "\n</｜DSML｜ calls>"),
    ),
    # MiniMaxAI/MiniMax-M3, chat_template.jinja
    "minimax_m3": each(
        lambda n, a: f']<]minimax[>[<invoke name="{n}">{elements(a)}]<]minimax[>[</invoke>',
        around=("]<]minimax[>[<tool_call>\n", "\n]<]minimax[>[</tool_call>"),
    ),
    # what vLLM's parsers of dots and plamo3 say of the formats
    "dots": each(
        lambda n, a: f'<invoke name="{n}">\n{INVOKE(a)}</invoke>',
        around=("<dots_function_call>\n", "\n</dots_function_call>"),
    ),
    "plamo3": each(
        lambda n, a: (
            f"<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>{n}<|plamo:end_tool_name:plamo|>"
            f"<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{dumps(a)}"
            "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
        ),
        between="",
        around=("<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>"),
    ),
    # IFM/K2-Horizon, chat_template.jinja
    "k2_horizon": each(
        lambda n, a: f"<ifm|tool_call>{n}\n{IFM(a)}</ifm|tool_call>",
        around=("<ifm|tool_calls>\n", "\n</ifm|tool_calls>"),
    ),
    # meta-models/Muse-Glimmer-30B, chat_template.jinja
    "muse": each(
        lambda n, a: (
            f'<|start|>assistant to={n}<|message|><atem:function_calls>\n<atem:invoke name="{n}">\n'
            f"{ATEM(a)}</atem:invoke>\n</atem:function_calls>"
        ),
        between="<|eom|>",
    ),
    # Inkling's documentation of its messages
    "inkling": each(
        lambda n, a: (
            f"<|message_model|>{n}<|content_invoke_tool_json|>"
            + json.dumps({"name": n, "args": a}, separators=(",", ":"), ensure_ascii=False)
            + "<|end_message|>"
        ),
        between="",
    ),
    "deepseek_v3": each(
        lambda n, a: (
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n"
            f"```json\n{json.dumps(a, indent=4)}\n```<｜tool▁call▁end｜>"
        ),
        around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "deepseek_v31": each(
        lambda n, a: f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{dumps(a)}<｜tool▁call▁end｜>",
        between="",
        around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "kimi_k2": lambda calls: (
        "<|tool_calls_section_begin|>"
        + "".join(
            f"<|tool_call_begin|>functions.{n}:{at}<|tool_call_argument_begin|>{dumps(a)}<|tool_call_end|>"
            for at, (n, a) in enumerate(calls)
        )
        + "<|tool_calls_section_end|>"
    ),
    "openai": each(
        lambda n, a: f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{dumps(a)}<|call|>",
        between="<|start|>assistant",
    ),
}
PROMPTS = {"inkling": "<|message_model|>", "muse": "<|start|>assistant"}
"""What a writer begins with that stands in the prompt where nothing is said before."""
ALONE = ("xlam", "json", "llama3_json", "pythonic")  # nothing is said before their calls
