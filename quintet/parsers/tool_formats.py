"""Tool call formats of the model families, from their chat templates and documentation."""

from quintet.parsers.combinators import LABEL, NAME, Arguments, JsonCall, Word, alternatives, one_or_more, optional
from quintet.parsers.formats import ToolParser, call_block, short_id
from quintet.parsers.value_reader import PYTHON, gemma
from quintet.parsers.xml_formats import XML_FORMATS

CALL, ARGUMENTS = JsonCall(), Arguments()
STRICT = JsonCall(strict=True)
PARAMETERS = JsonCall(arguments="parameters")
CALLS = one_or_more(CALL, between=", ")
STRICT_CALLS = one_or_more(STRICT, between=", ")
PYTHON_CALLS = one_or_more(NAME, Arguments(PYTHON), between=", ")
FUNCTION_GEMMA = gemma("<escape>", "<escape>")
MISTRAL_ID = Word("id", "/[a-zA-Z0-9]{9}/")
FUNCTIONS = optional("functions.", written=True)
CHANNEL = Word(pattern='"commentary"')
HARMONY_BODY = (
    optional("<|constrain|>", Word(pattern='"json"'), written=True),
    "<|message|>",
    ARGUMENTS,
    optional("<|call|>"),
)
COHERE_DROPS = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
INKLING_CALL = (
    "<|content_invoke_tool_json|>",
    JsonCall(arguments="args", compact=True),
    optional("<|end_message|>", written=True),
)
INKLING_TEXTS = ("<|content_text|>", "<|content_invoke_tool_text|>", "<|content_tool_error|>")
INKLING_DROPS = (
    *(before + kind for before in ("", "<|message_model|>") for kind in INKLING_TEXTS),
    "<|end_message|>",
    "<|content_model_end_sampling|>",
)
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
            call_block(
                "<｜tool▁calls▁begin｜>",
                one_or_more(
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
            call_block(
                "<｜tool▁calls▁begin｜>",
                one_or_more("<｜tool▁call▁begin｜>", NAME, "<｜tool▁sep｜>", ARGUMENTS, "<｜tool▁call▁end｜>"),
                "<｜tool▁calls▁end｜>",
            ),
        ),
        models="DeepSeek-V3.1",
        shape="name, then JSON",
        signs=(("<｜tool▁calls▁begin｜>",),),
    ),
    "inkling": ToolParser(
        (
            call_block(LABEL, *INKLING_CALL, anchored=True),
            call_block(*INKLING_CALL),
            call_block("<|message_model|>", optional(LABEL), *INKLING_CALL, written=False),
        ),
        separator="<|message_model|>",
        drops=INKLING_DROPS,
        models="Inkling",
        shape="JSON object per call",
        signs=(("<|content_invoke_tool_json|>",),),
    ),
    "plamo3": ToolParser(
        (
            call_block(
                "<|plamo:begin_tool_requests:plamo|>",
                one_or_more(
                    "<|plamo:begin_tool_request:plamo|>",
                    "<|plamo:begin_tool_name:plamo|>",
                    NAME,
                    "<|plamo:end_tool_name:plamo|>",
                    "<|plamo:begin_tool_arguments:plamo|>",
                    optional("<|plamo:constrain|>", Word(pattern='"json"'), written=True),
                    "<|plamo:msg|>",
                    ARGUMENTS,
                    "<|plamo:end_tool_arguments:plamo|>",
                    "<|plamo:end_tool_request:plamo|>",
                ),
                "<|plamo:end_tool_requests:plamo|>",
            ),
        ),
        drops=("<|plamo:tag|>",),
        models="PLaMo 3",
        shape="name, then JSON",
        signs=(("<|plamo:begin_tool_request",),),
    ),
    "kimi_k2": ToolParser(
        (
            call_block(
                "<|tool_calls_section_begin|>",
                one_or_more(
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
            call_block(
                "[TOOL_CALLS]",
                alternatives(
                    ("[", CALLS, "]"),
                    (NAME, optional("[CALL_ID]", MISTRAL_ID), optional("[ARGS]", written=True), ARGUMENTS),
                ),
            ),
        ),
        separator="",
        models="Mistral, Ministral, Devstral, Magistral",
        shape="name, then JSON; JSON list",
        signs=(("[TOOL_CALLS]",),),
        call_id=short_id,
    ),
    "openai": ToolParser(
        (
            call_block(
                "<|channel|>",
                CHANNEL,
                " to=",
                optional("functions.", written=True),
                NAME,
                " ",
                *HARMONY_BODY,
                certain=False,
            ),
            call_block(
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
        (call_block("<|tool_call>", "call:", NAME, Arguments(gemma('<|"|>', '"'), ","), "<tool_call|>"),),
        separator="",
        models="Gemma 4",
        shape="name, then Gemma's notation",
        signs=(("<|tool_call>", "<tool_call|>"),),
    ),
    "functiongemma": ToolParser(
        (
            call_block(
                "<start_function_call>",
                "call:",
                NAME,
                Arguments(FUNCTION_GEMMA, ","),
                "<end_function_call>",
            ),
        ),
        separator="",
        models="FunctionGemma",
        shape="name, then Gemma's notation",
        signs=(("<start_function_call>",),),
    ),
    "llama4_pythonic": ToolParser(
        (
            call_block("<|python_start|>", "[", PYTHON_CALLS, "]", "<|python_end|>"),
            call_block("[", PYTHON_CALLS, "]", anchored=True),
        ),
        models="Llama 4",
        shape="Python list",
        signs=(("<|python_start|>",),),
    ),
    "olmo3": ToolParser(
        (call_block("<function_calls>\n", one_or_more(NAME, Arguments(PYTHON), between="\n"), "\n</function_calls>"),),
        models="Olmo 3",
        shape="Python calls",
        signs=(("<function_calls>",),),
    ),
    "lfm2": ToolParser(
        (call_block("<|tool_call_start|>", "[", PYTHON_CALLS, "]", "<|tool_call_end|>"),),
        models="LFM2",
        shape="Python list",
        signs=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
    ),
    "internlm": ToolParser(
        (call_block("<|action_start|>", "<|plugin|>\n", PARAMETERS, "<|action_end|>"),),
        separator="\n",
        models="InternLM 2.5",
        shape="JSON object per call",
        signs=(("<|plugin|>",),),
    ),
    "phi4_mini_json": ToolParser(
        (call_block("functools", "[", CALLS, "]", certain=False),),
        models="Phi-4-mini",
        shape="JSON list",
        signs=(("functools",),),
    ),
    "granite-20b-fc": ToolParser(
        (call_block("<function_call> ", CALL),),
        separator="\n",
        models="Granite-20B-FunctionCalling",
        shape="JSON object per call",
        signs=(("<function_call>",),),
    ),
    "granite": ToolParser(
        (
            call_block("<|tool_call|>", "[", CALLS, "]"),
            call_block("<tool_call>", "[", CALLS, "]", optional("</tool_call>")),
        ),
        models="Granite 3.0 to 3.3",
        shape="JSON list",
        signs=(("<|tool_call|>",),),
    ),
    "longcat": ToolParser(
        (call_block("<longcat_tool_call>", CALL, "</longcat_tool_call>"),),
        separator="\n",
        models="LongCat-Flash",
        shape="JSON object per call",
        signs=(("<longcat_tool_call>",),),
    ),
    "gigachat3": ToolParser(
        (call_block("function call<|role_sep|>\n", CALL), call_block("<|function_call|>", CALL)),
        drops=("<|message_sep|>",),
        models="GigaChat 3",
        shape="JSON object per call",
        signs=(("function call<|role_sep|>",), ("<|function_call|>",)),
        families=("gigachat",),
    ),
    "cohere_command3": ToolParser(
        (
            call_block(
                "<|START_ACTION|>",
                "[\n    ",
                one_or_more(JsonCall("tool_name", "parameters", index_key="tool_call_id"), between=",\n    "),
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
            call_block(
                "<|tools_prefix|>",
                "[",
                one_or_more('{"', NAME, '": ', ARGUMENTS, "}", between=", "),
                "]",
                "<|tools_suffix|>",
            ),
        ),
        models="Apertus",
        shape="JSON list",
        signs=(("<|tools_prefix|>",),),
    ),
    "minimax": ToolParser(
        (call_block("<tool_calls>\n", one_or_more(CALL, between="\n"), "\n</tool_calls>"),),
        models="MiniMax-M1",
        shape="JSON object per line",
        signs=(("<tool_calls>",),),
        families=("minimax",),
    ),
    "jamba": ToolParser(
        (call_block("<tool_calls>", "[\n", one_or_more(CALL, between=",\n"), "\n]", "</tool_calls>"),),
        aliases=("hunyuan_a13b",),
        models="Jamba 1.5, Hunyuan-A13B",
        shape="JSON list",
        signs=(("<tool_calls>",),),
        families=("jamba", "hunyuan"),
    ),
    "hermes": ToolParser(
        (call_block("<tool_call>\n", CALL, "\n</tool_call>"),),
        separator="\n",
        aliases=("granite4", "ernie45", "qwen3_json"),
        models="Hermes 2 Pro and 3, Qwen2.5, Qwen3, QwQ, SmolLM3, Granite 4, ERNIE-4.5",
        shape="JSON object per call",
        signs=(("<tool_call>",),),
    ),
    "llama3_json": ToolParser(
        (
            call_block(one_or_more(JsonCall(arguments="parameters", strict=True), between="; "), anchored=True),
            call_block("<|python_tag|>", one_or_more(PARAMETERS, between="; ")),
        ),
        aliases=("llama4_json",),
        models="Llama 3.1, 3.2, 3.3",
        shape="bare JSON",
        signs=(("<|python_tag|>",), ('"parameters"', "ipython")),
    ),
    "xlam": ToolParser(
        (
            call_block("[", STRICT_CALLS, "]", anchored=True),
            call_block("```json", "[", CALLS, "]", "```", code=True),
            call_block("[TOOL_CALLS]", "[", CALLS, "]"),
            call_block("<tool_call>", alternatives(("[", CALLS, "]"), (CALL,)), "</tool_call>"),
        ),
        models="xLAM",
        shape="bare JSON list",
    ),
    "pythonic": ToolParser(
        (call_block("[", PYTHON_CALLS, "]", anchored=True),),
        models="Llama 3.2, ToolACE",
        shape="Python list",
    ),
    "json": ToolParser(
        (
            call_block(alternatives(("[", STRICT_CALLS, "]"), (one_or_more(STRICT, between="\n"),)), anchored=True),
            call_block("```json", alternatives(("[", CALLS, "]"), (CALL,)), "```", code=True),
        ),
        models="any model whose prompt asks for calls in JSON",
        shape="bare JSON",
    ),
}
