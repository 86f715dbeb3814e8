"""Tool call formats of the model families, from their chat templates and documentation."""

from quintet.parsers.combinators import NAME, Arguments, Call, Word, either, many, maybe
from quintet.parsers.formats import ToolParser, block, short_id
from quintet.parsers.value_reader import PYTHON, gemma
from quintet.parsers.xml_formats import XML_FORMATS

CALL, ARGUMENTS = Call(), Arguments()
STRICT = Call(strict=True)
PARAMETERS = Call(arguments="parameters")
CALLS = many(CALL, between=", ")
STRICT_CALLS = many(STRICT, between=", ")
PYTHON_CALLS = many(NAME, Arguments(PYTHON), between=", ")
MISTRAL_ID = Word("id", "/[a-zA-Z0-9]{9}/")
FUNCTIONS = maybe("functions.", written=True)
CHANNEL = Word(pattern='"commentary"')
HARMONY_BODY = (
    maybe("<|constrain|>", Word(pattern='"json"'), written=True),
    "<|message|>",
    ARGUMENTS,
    maybe("<|call|>"),
)
COHERE_DROPS = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
HARMONY_DROPS = (
    "<|start|>assistant",
    "<|channel|>analysis<|message|>",
    "<|channel|>commentary<|message|>",
    "<|channel|>final<|message|>",
    "<|channel|>final <|constrain|>json<|message|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
)


def kimi_id(name: str, position: int) -> str:
    """As Kimi's template writes it."""
    return f"functions.{name}:{position}"


# The more telling a parser's signs, the earlier it stands.
TOOL_FORMATS = {
    **XML_FORMATS,
    "deepseek_v3": ToolParser(
        (
            block(
                "<｜tool▁calls▁begin｜>",
                many(
                    "<｜tool▁call▁begin｜>",
                    "function",
                    "<｜tool▁sep｜>",
                    NAME,
                    "\n```json\n",
                    ARGUMENTS,
                    "\n```",
                    "<｜tool▁call▁end｜>",
                    between="\n",
                ),
                "<｜tool▁calls▁end｜>",
            ),
        ),
        models="DeepSeek-V3, DeepSeek-R1",
        shape="name, then JSON",
        signs=(("<｜tool▁calls▁begin｜>", "```json"),),
    ),
    "deepseek_v31": ToolParser(
        (
            block(
                "<｜tool▁calls▁begin｜>",
                many("<｜tool▁call▁begin｜>", NAME, "<｜tool▁sep｜>", ARGUMENTS, "<｜tool▁call▁end｜>"),
                "<｜tool▁calls▁end｜>",
            ),
        ),
        models="DeepSeek-V3.1",
        shape="name, then JSON",
        signs=(("<｜tool▁calls▁begin｜>",),),
    ),
    "kimi_k2": ToolParser(
        (
            block(
                "<|tool_calls_section_begin|>",
                many(
                    "<|tool_call_begin|>",
                    FUNCTIONS,
                    NAME,
                    ":",
                    Word(pattern="/[0-9]{1,3}/"),
                    "<|tool_call_argument_begin|>",
                    ARGUMENTS,
                    "<|tool_call_end|>",
                ),
                "<|tool_calls_section_end|>",
            ),
        ),
        models="Kimi-K2",
        shape="name, then JSON",
        signs=(("<|tool_calls_section_begin|>",),),
        call_id=kimi_id,
    ),
    "mistral": ToolParser(
        (
            block(
                "[TOOL_CALLS]",
                either(("[", CALLS, "]"), (NAME, maybe("[CALL_ID]", MISTRAL_ID), "[ARGS]", ARGUMENTS)),
            ),
        ),
        again="",
        models="Mistral, Ministral, Devstral, Magistral",
        shape="name, then JSON; JSON list",
        signs=(("[TOOL_CALLS]",),),
        call_id=short_id,
    ),
    "openai": ToolParser(
        (
            block(
                "<|channel|>",
                CHANNEL,
                " to=",
                maybe("functions.", written=True),
                NAME,
                " ",
                *HARMONY_BODY,
                certain=False,
            ),
            block(
                "to=",
                FUNCTIONS,
                NAME,
                "<|channel|>",
                CHANNEL,
                " ",
                *HARMONY_BODY,
                anchored=True,
            ),
        ),
        drops=HARMONY_DROPS,
        aliases=("gpt_oss",),
        models="gpt-oss",
        shape="harmony channels",
        signs=(("<|channel|>", "<|call|>"),),
    ),
    "gemma4": ToolParser(
        (block("<|tool_call>", "call:", NAME, Arguments(gemma('<|"|>'), ","), "<tool_call|>"),),
        again="",
        models="Gemma 4",
        shape="name, then Gemma's notation",
        signs=(("<|tool_call>", "<tool_call|>"),),
    ),
    "functiongemma": ToolParser(
        (block("<start_function_call>", "call:", NAME, Arguments(gemma("<escape>"), ","), "<end_function_call>"),),
        again="",
        models="FunctionGemma",
        shape="name, then Gemma's notation",
        signs=(("<start_function_call>",),),
    ),
    "llama4_pythonic": ToolParser(
        (
            block("<|python_start|>", "[", PYTHON_CALLS, "]", "<|python_end|>"),
            block("[", PYTHON_CALLS, "]", anchored=True),
        ),
        models="Llama 4",
        shape="Python list",
        signs=(("<|python_start|>",),),
    ),
    "olmo3": ToolParser(
        (block("<function_calls>\n", many(NAME, Arguments(PYTHON), between="\n"), "\n</function_calls>"),),
        models="Olmo 3",
        shape="Python calls",
        signs=(("<function_calls>",),),
    ),
    "lfm2": ToolParser(
        (block("<|tool_call_start|>", "[", PYTHON_CALLS, "]", "<|tool_call_end|>"),),
        models="LFM2",
        shape="Python list",
        signs=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
    ),
    "internlm": ToolParser(
        (block("<|action_start|>", "<|plugin|>\n", PARAMETERS, "<|action_end|>"),),
        again="\n",
        models="InternLM 2.5",
        shape="JSON object per call",
        signs=(("<|plugin|>",),),
    ),
    "phi4_mini_json": ToolParser(
        (block("functools", "[", CALLS, "]", certain=False),),
        models="Phi-4-mini",
        shape="JSON list",
        signs=(("functools",),),
    ),
    "granite-20b-fc": ToolParser(
        (block("<function_call> ", CALL),),
        again="\n",
        models="Granite-20B-FunctionCalling",
        shape="JSON object per call",
        signs=(("<function_call>",),),
    ),
    "granite": ToolParser(
        (block("<|tool_call|>", "[", CALLS, "]"), block("<tool_call>", "[", CALLS, "]", maybe("</tool_call>"))),
        models="Granite 3.0 to 3.3",
        shape="JSON list",
        signs=(("<|tool_call|>",),),
    ),
    "longcat": ToolParser(
        (block("<longcat_tool_call>", CALL, "</longcat_tool_call>"),),
        again="\n",
        models="LongCat-Flash",
        shape="JSON object per call",
        signs=(("<longcat_tool_call>",),),
    ),
    "gigachat3": ToolParser(
        (block("function call<|role_sep|>\n", CALL), block("<|function_call|>", CALL)),
        drops=("<|message_sep|>",),
        models="GigaChat 3",
        shape="JSON object per call",
        signs=(("function call<|role_sep|>",), ("<|function_call|>",)),
        families=("gigachat",),
    ),
    "cohere_command3": ToolParser(
        (
            block(
                "<|START_ACTION|>",
                "[\n    ",
                many(Call("tool_name", "parameters", number="tool_call_id"), between=",\n    "),
                "\n]",
                "<|END_ACTION|>",
            ),
        ),
        drops=COHERE_DROPS,
        aliases=("cohere_command4",),
        models="Command A, Command R7B",
        shape="JSON list",
        signs=(("<|START_ACTION|>",),),
    ),
    "apertus": ToolParser(
        (
            block(
                "<|tools_prefix|>", "[", many('{"', NAME, '": ', ARGUMENTS, "}", between=", "), "]", "<|tools_suffix|>"
            ),
        ),
        models="Apertus",
        shape="JSON list",
        signs=(("<|tools_prefix|>",),),
    ),
    "minimax": ToolParser(
        (block("<tool_calls>\n", many(CALL, between="\n"), "\n</tool_calls>"),),
        models="MiniMax-M1",
        shape="JSON object per line",
        signs=(("<tool_calls>",),),
        families=("minimax",),
    ),
    "jamba": ToolParser(
        (block("<tool_calls>", "[\n", many(CALL, between=",\n"), "\n]", "</tool_calls>"),),
        aliases=("hunyuan_a13b",),
        models="Jamba 1.5, Hunyuan-A13B",
        shape="JSON list",
        signs=(("<tool_calls>",),),
        families=("jamba", "hunyuan"),
    ),
    "hermes": ToolParser(
        (block("<tool_call>\n", CALL, "\n</tool_call>"),),
        again="\n",
        aliases=("granite4", "ernie45"),
        models="Hermes 2 Pro and 3, Qwen2.5, Qwen3, QwQ, SmolLM3, Granite 4, ERNIE-4.5",
        shape="JSON object per call",
        signs=(("<tool_call>",),),
    ),
    "llama3_json": ToolParser(
        (
            block(many(Call(arguments="parameters", strict=True), between="; "), anchored=True),
            block("<|python_tag|>", many(PARAMETERS, between="; ")),
        ),
        aliases=("llama4_json",),
        models="Llama 3.1, 3.2, 3.3",
        shape="bare JSON",
        signs=(("<|python_tag|>",), ('"parameters"', "ipython")),
    ),
    "xlam": ToolParser(
        (
            block("[", STRICT_CALLS, "]", anchored=True),
            block("```json", "[", CALLS, "]", "```", certain=False),
            block("[TOOL_CALLS]", "[", CALLS, "]"),
            block("<tool_call>", either(("[", CALLS, "]"), (CALL,)), "</tool_call>"),
        ),
        models="xLAM",
        shape="bare JSON list",
    ),
    "pythonic": ToolParser(
        (block("[", PYTHON_CALLS, "]", anchored=True),),
        models="Llama 3.2, ToolACE",
        shape="Python list",
    ),
    "json": ToolParser(
        (
            block(either(("[", STRICT_CALLS, "]"), (many(STRICT, between="\n"),)), anchored=True),
            block("```json", either(("[", CALLS, "]"), (CALL,)), "```", certain=False),
        ),
        models="any model whose prompt asks for calls in JSON",
        shape="bare JSON",
    ),
}
