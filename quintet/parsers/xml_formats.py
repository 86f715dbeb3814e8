"""Tool calls with arguments in markers of their own, from templates and documentation of their models."""

from dataclasses import replace

from quintet.parsers.combinators import NAME, Word, many, maybe
from quintet.parsers.formats import Block, ToolParser, block
from quintet.parsers.schema import ANY, TEXT
from quintet.parsers.xml_arguments import XmlArguments

QWEN_FIELDS = XmlArguments("<parameter=", {">\n": None}, "\n</parameter>", "</function>")
SEED_FIELDS = XmlArguments("<parameter=", {">": None}, "</parameter>", "</function>")
GLM_FIELDS = XmlArguments("<arg_key>", {"</arg_key>": None}, "</arg_value>", "</tool_call>", value="\n<arg_value>")
INVOKE_FIELDS = XmlArguments('<parameter name="', {'">': None}, "</parameter>", "</invoke>")
STEP_FIELDS = XmlArguments('<steptml:parameter name="', {'">': None}, "</steptml:parameter>", "</steptml:invoke>")
DSML_FIELDS = XmlArguments(
    '<｜DSML｜parameter name="',
    {'" string="true">': TEXT, '" string="false">': ANY},
    "</｜DSML｜parameter>",
    "</｜DSML｜invoke>",
)
SOLAR_FIELDS = XmlArguments("<|tool_arg:start|>", {"<|tool_arg:value|>": None}, "<|tool_arg:end|>", "<|tool_call:end|>")
KIMI_FIELDS = XmlArguments(
    '<|open|>argument key="',
    {f'" type="{kind}"<|sep|>': frozenset({kind}) for kind in ("string", *sorted(ANY))},
    "<|close|>argument<|sep|>",
    "<|close|>call<|sep|>",
    after="",
)
PARAM_FIELDS = XmlArguments('<param name="', {'">': None}, "</param>", "</function>", after="", cdata=True)
KIMI_DROPS = (
    "<|open|>response<|sep|>",
    "<|close|>response<|sep|>",
    "<|close|>message<|sep|>",
    "<|end_of_msg|>",
)


def hunyuan(mark: str, line: str = "\n", sep: bool = True) -> Block:
    """Tencent's markup: its tokens end with the checkpoint's mark; `line` stands between them."""
    fields = XmlArguments(
        f"<arg_key{mark}>",
        {f"</arg_key{mark}>": None},
        f"</arg_value{mark}>",
        f"</tool_call{mark}>",
        value=f"{line}<arg_value{mark}>",
        after=line,
    )
    name = (NAME, f"<tool_sep{mark}>{line}") if sep else (NAME,)
    calls = many(f"<tool_call{mark}>", *name, fields, between=line)
    return block(f"<tool_calls{mark}>{line}", calls, f"{line}</tool_calls{mark}>")


def dsml(name: str) -> Block:
    """DeepSeek's markup, in an element of that name."""
    invoke = many('<｜DSML｜invoke name="', NAME, '">\n', DSML_FIELDS, between="\n")
    return block(f"<｜DSML｜{name}>\n", invoke, f"\n</｜DSML｜{name}>")


# The more telling a parser's signs, the earlier it stands.
XML_FORMATS = {
    "qwen3_coder": ToolParser(
        (
            block("<tool_call>\n", "<function=", NAME, ">\n", QWEN_FIELDS, "\n</tool_call>"),
            block("<function=", NAME, ">\n", QWEN_FIELDS, maybe("\n</tool_call>")),
        ),
        again="\n",
        aliases=("qwen3_xml", "mimo", "step3p5"),
        models="Qwen3-Coder, Qwen3.5, Nemotron 3, MiMo, Step-3.5",
        shape="XML parameters",
        signs=(("<function=", "<parameter=", "<tool_call>"),),
    ),
    "seed_oss": ToolParser(
        (block("<seed:tool_call>\n", "<function=", NAME, ">\n", SEED_FIELDS, "\n</seed:tool_call>"),),
        again="\n",
        models="Seed-OSS",
        shape="XML parameters",
        signs=(("<seed:tool_call>",),),
    ),
    "glm47": ToolParser(
        (block("<tool_call>", NAME, replace(GLM_FIELDS, value="<arg_value>", after="")),),
        again="",
        models="GLM-4.7",
        shape="XML parameters",
        signs=(("</arg_key><arg_value>",),),
    ),
    "hy_v3": ToolParser(
        (hunyuan(":opensource"), hunyuan("")),
        models="Hunyuan Hy3",
        shape="XML parameters",
        signs=(("<tool_sep", "<arg_key"),),
    ),
    "hy_v4": ToolParser(
        (hunyuan(":opensource", "", sep=False),),
        models="Hunyuan Hy4",
        shape="XML parameters",
        families=("hy_v4",),
    ),
    "solar_open2": ToolParser(
        (block("<|tool_call:start|>", NAME, "\n", SOLAR_FIELDS),),
        again="\n",
        models="Solar Open2",
        shape="XML parameters",
        signs=(("<|tool_call:start|>", "<|tool_arg:start|>"),),
    ),
    "kimi_k3": ToolParser(
        (
            block(
                "<|open|>tools<|sep|>",
                many('<|open|>call tool="', NAME, '" index="', Word(pattern="/[0-9]{1,3}/"), '"<|sep|>', KIMI_FIELDS),
                "<|close|>tools<|sep|>",
            ),
        ),
        drops=KIMI_DROPS,
        models="Kimi-K3",
        shape="XML parameters",
        signs=(("<|open|>", "<|sep|>", "<|close|>"),),
    ),
    "minicpm5": ToolParser(
        (block('<function name="', NAME, '">', PARAM_FIELDS),),
        again="\n",
        models="MiniCPM5",
        shape="XML parameters",
        signs=(("<function name=", "<param name="),),
    ),
    "glm45": ToolParser(
        (block("<tool_call>", NAME, "\n", GLM_FIELDS),),
        again="\n",
        aliases=("poolside_v1",),
        models="GLM-4.5, GLM-4.6, Poolside Laguna",
        shape="XML parameters",
        signs=(("<arg_key>", "<arg_value>"),),
    ),
    "minimax_m2": ToolParser(
        (
            block(
                "<minimax:tool_call>\n",
                many('<invoke name="', NAME, '">\n', INVOKE_FIELDS, between="\n"),
                "\n</minimax:tool_call>",
            ),
        ),
        models="MiniMax-M2",
        shape="XML parameters",
        signs=(("<minimax:tool_call>",),),
    ),
    "step3": ToolParser(
        (
            block(
                "<｜tool_calls_begin｜>\n",
                many(
                    "<｜tool_call_begin｜>",
                    maybe("function", "<｜tool_sep｜>", written=True),
                    '<steptml:invoke name="',
                    NAME,
                    '">\n',
                    STEP_FIELDS,
                    "<｜tool_call_end｜>",
                    maybe("<｜tool_sep｜>", written=False),
                    between="\n",
                ),
                "\n<｜tool_calls_end｜>",
            ),
        ),
        models="Step3",
        shape="XML parameters",
        signs=(("<steptml:invoke",), ("<｜tool_calls_begin｜>",)),
    ),
    "deepseek_v32": ToolParser(
        (dsml("function_calls"),),
        models="DeepSeek-V3.2",
        shape="XML parameters",
        signs=(("｜DSML｜function_calls",),),
    ),
    "deepseek_v4": ToolParser(
        (dsml("tool_calls"),),
        models="DeepSeek-V4",
        shape="XML parameters",
        signs=(("｜DSML｜tool_calls",),),
    ),
}
