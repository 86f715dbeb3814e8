"""Tool calls with arguments in markers of their own, from templates and documentation of their models."""

from dataclasses import replace

from quintet.parsers.combinators import LABEL, NAME, JsonCall, Word, alternatives, one_or_more, optional
from quintet.parsers.formats import CallBlock, ToolParser, call_block
from quintet.parsers.schema import ANY, TEXT
from quintet.parsers.xml_arguments import ElementArguments, XmlArguments

QWEN_FIELDS = XmlArguments("<parameter=", {">\n": None}, "\n</parameter>", "</function>")
SEED_FIELDS = XmlArguments("<parameter=", {">": None}, "</parameter>", "</function>")
GLM_FIELDS = XmlArguments("<arg_key>", {"</arg_key>": None}, "</arg_value>", "</tool_call>", value="\n<arg_value>")
INVOKE_FIELDS = XmlArguments('<parameter name="', {'">': None}, "</parameter>", "</invoke>")
STEP_FIELDS = XmlArguments('<steptml:parameter name="', {'">': None}, "</steptml:parameter>", "</steptml:invoke>")
ATEM_FIELDS = XmlArguments('<atem:parameter name="', {'">': None}, "</atem:parameter>", "</atem:invoke>")
IFM_FIELDS = XmlArguments(
    "<ifm|arg_key>",
    {"</ifm|arg_key>": None},
    "</ifm|arg_value>",
    "</ifm|tool_call>",
    value="\n<ifm|arg_value>",
    kind=("<ifm|arg_type>", "</ifm|arg_type>"),
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
MUSE_DROPS = (
    "<|start|>assistant",
    "to=user<|message|>",
    "to=commentary<|message|>",
    "<|eom|>",
    "<|eot|>",
)
M3 = "]<]minimax[>["  # stands before each tag


def hunyuan(mark: str, line: str = "\n", sep: bool = True) -> CallBlock:
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
    calls = one_or_more(f"<tool_call{mark}>", *name, fields, between=line)
    return call_block(f"<tool_calls{mark}>{line}", calls, f"{line}</tool_calls{mark}>")


def dsml(name: str, space: str = "") -> CallBlock:
    """DeepSeek's markup, in an element of that name; `space` stands before each name of an element."""
    mark = f"｜DSML｜{space}"
    fields = XmlArguments(
        f'<{mark}parameter name="',
        {'" string="true">': TEXT, '" string="false">': ANY},
        f"</{mark}parameter>",
        f"</{mark}invoke>",
    )
    invoke = one_or_more(f'<{mark}invoke name="', NAME, '">\n', fields, between="\n")
    return call_block(f"<{mark}{name}>\n", invoke, f"\n</{mark}{name}>")


# The more telling a parser's signs, the earlier it stands.
XML_FORMATS = {
    "qwen3_coder": ToolParser(
        (
            call_block("<tool_call>\n", "<function=", NAME, ">\n", QWEN_FIELDS, "\n</tool_call>"),
            call_block("<function=", NAME, ">\n", QWEN_FIELDS, optional("\n</tool_call>")),
        ),
        separator="\n",
        aliases=("qwen3_xml", "mimo", "step3p5", "step5"),
        models="Qwen3-Coder, Qwen3.5, Nemotron 3, MiMo, Step-3.5, Step-5, MiniCPM-V, Granite 4.2",
        shape="XML parameters",
        signs=(("<function=", "<parameter=", "<tool_call>"),),
    ),
    "seed_oss": ToolParser(
        (call_block("<seed:tool_call>\n", "<function=", NAME, ">\n", SEED_FIELDS, "\n</seed:tool_call>"),),
        separator="\n",
        models="Seed-OSS",
        shape="XML parameters",
        signs=(("<seed:tool_call>",),),
    ),
    "glm47": ToolParser(
        (call_block("<tool_call>", NAME, replace(GLM_FIELDS, value="<arg_value>", after="")),),
        separator="",
        aliases=("ling3",),
        models="GLM-4.7, Ling 3",
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
        (call_block("<|tool_call:start|>", NAME, "\n", SOLAR_FIELDS),),
        separator="\n",
        models="Solar Open2",
        shape="XML parameters",
        signs=(("<|tool_call:start|>", "<|tool_arg:start|>"),),
    ),
    "kimi_k3": ToolParser(
        (
            call_block(
                "<|open|>tools<|sep|>",
                one_or_more(
                    '<|open|>call tool="', NAME, '" index="', Word(pattern="/[0-9]{1,3}/"), '"<|sep|>', KIMI_FIELDS
                ),
                "<|close|>tools<|sep|>",
            ),
        ),
        drops=KIMI_DROPS,
        models="Kimi-K3",
        shape="XML parameters",
        signs=(("<|open|>", "<|sep|>", "<|close|>"),),
    ),
    "minicpm5": ToolParser(
        (call_block('<function name="', NAME, '">', PARAM_FIELDS),),
        separator="\n",
        models="MiniCPM5",
        shape="XML parameters",
        signs=(("<function name=", "<param name="),),
    ),
    "glm45": ToolParser(
        (call_block("<tool_call>", NAME, "\n", GLM_FIELDS),),
        separator="\n",
        aliases=("poolside_v1",),
        models="GLM-4.5, GLM-4.6, Poolside Laguna",
        shape="XML parameters",
        signs=(("<arg_key>", "<arg_value>"),),
    ),
    "minimax_m2": ToolParser(
        (
            call_block(
                "<minimax:tool_call>\n",
                one_or_more('<invoke name="', NAME, '">\n', INVOKE_FIELDS, between="\n"),
                "\n</minimax:tool_call>",
            ),
        ),
        models="MiniMax-M2",
        shape="XML parameters",
        signs=(("<minimax:tool_call>",),),
    ),
    "step3": ToolParser(
        (
            call_block(
                "<｜tool_calls_begin｜>\n",
                one_or_more(
                    "<｜tool_call_begin｜>",
                    optional("function", "<｜tool_sep｜>", written=True),
                    '<steptml:invoke name="',
                    NAME,
                    '">\n',
                    STEP_FIELDS,
                    "<｜tool_call_end｜>",
                    optional("<｜tool_sep｜>", written=False),
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
    "deepseek_v41": ToolParser(
        (dsml("calls", " "),),
        models="DeepSeek-V4.1",
        shape="XML parameters",
        signs=(("｜DSML｜ calls",),),
    ),
    "minimax_m3": ToolParser(
        (
            call_block(
                f"{M3}<tool_call>\n",
                one_or_more(f'{M3}<invoke name="', NAME, '">', ElementArguments(M3, f"{M3}</invoke>"), between="\n"),
                f"\n{M3}</tool_call>",
            ),
        ),
        models="MiniMax-M3",
        shape="XML elements",
        signs=((M3,),),
    ),
    "dots": ToolParser(
        (
            call_block(
                "<dots_function_call>\n",
                alternatives(
                    (
                        one_or_more('<invoke name="', NAME, '">\n', INVOKE_FIELDS, between="\n"),
                        "\n</dots_function_call>",
                    ),
                    (JsonCall(), "\n</dots_function_call>"),
                    written=1,
                ),
            ),
        ),
        separator="\n",
        models="dots 3",
        shape="XML parameters; JSON object",
        signs=(("<dots_function_call>",),),
    ),
    "k2_horizon": ToolParser(
        (
            call_block(
                "<ifm|tool_calls>\n",
                one_or_more(
                    "<ifm|tool_call>",
                    alternatives((NAME, "\n", IFM_FIELDS), (JsonCall(), "</ifm|tool_call>")),
                    between="\n",
                ),
                "\n</ifm|tool_calls>",
            ),
        ),
        models="K2 Horizon",
        shape="XML parameters; JSON object",
        signs=(("<ifm|tool_calls>",),),
    ),
    "muse": ToolParser(
        (
            call_block(
                " to=",
                LABEL,
                "<|message|>",
                "<atem:function_calls>\n",
                one_or_more('<atem:invoke name="', Word("name", doubled=True), '">\n', ATEM_FIELDS, between="\n"),
                "\n</atem:function_calls>",
                certain=False,
            ),
        ),
        separator="<|eom|><|start|>assistant",
        drops=MUSE_DROPS,
        header=MUSE_DROPS[0],
        aliases=("musespark1x", "muse_glimmer"),
        models="Muse Spark, Muse Glimmer",
        shape="XML parameters",
        signs=(("<atem:function_calls>",),),
    ),
}
