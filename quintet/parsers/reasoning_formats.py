"""How each family of models marks what it thinks."""

from quintet.parsers.formats import ReasoningParser
from quintet.parsers.tool_formats import COHERE_DROPS, HARMONY_DROPS

REASONING_FORMATS = {
    "openai_gptoss": ReasoningParser(
        ("<|channel|>analysis<|message|>",),
        ("<|end|>", "<|return|>"),
        until=("<|start|>assistant",),
        drops=HARMONY_DROPS,
        leads=("<|start|>assistant", "<|channel|>final<|message|>"),
        aliases=("gpt_oss",),
        models="gpt-oss",
        signs=(("<|channel|>", "analysis"),),
    ),
    "gemma4": ReasoningParser(
        ("<|channel>thought",),
        ("<channel|>",),
        models="Gemma 4",
        signs=(("<|channel>",),),
    ),
    "mistral": ReasoningParser(
        ("[THINK]",),
        ("[/THINK]",),
        models="Magistral, Ministral 3",
        signs=(("[THINK]",),),
    ),
    "seed_oss": ReasoningParser(
        ("<seed:think>",),
        ("</seed:think>",),
        inside=True,
        models="Seed-OSS",
        signs=(("<seed:think>",), ("seed:think",)),
    ),
    "longcat": ReasoningParser(
        ("<longcat_think>",),
        ("</longcat_think>",),
        models="LongCat-Flash-Thinking",
        signs=(("<longcat_think>",),),
    ),
    "cohere_command3": ReasoningParser(
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        drops=COHERE_DROPS,
        leads=("<|START_RESPONSE|>",),
        aliases=("cohere_command4",),
        models="Command A Reasoning",
        signs=(("<|START_THINKING|>",),),
    ),
    "apertus": ReasoningParser(
        ("<|inner_prefix|>",),
        ("<|inner_suffix|>",),
        models="Apertus",
        signs=(("<|inner_prefix|>",),),
    ),
    "granite": ReasoningParser(
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        models="Granite 3.2",
        signs=(("Here is my thought process:",),),
    ),
    "kimi_k2": ReasoningParser(
        ("<think>", "◁think▷"),
        ("</think>", "◁/think▷"),
        inside=True,
        until=("<|tool_calls_section_begin|>",),
        models="Kimi-K2-Thinking, Kimi-VL-Thinking",
        signs=(("<|tool_calls_section_begin|>", "<think>"), ("◁think▷",)),
    ),
    "ernie45": ReasoningParser(
        ("<think>",),
        ("</think>",),
        inside=True,
        drops=("<response>", "</response>"),
        leads=("<response>",),
        models="ERNIE-4.5-Thinking, ERNIE-4.5-VL",
        signs=(("<think>", "<response>"),),
    ),
    "hunyuan_a13b": ReasoningParser(
        ("<think>",),
        ("</think>",),
        drops=("<answer>", "</answer>"),
        leads=("<answer>",),
        models="Hunyuan-A13B",
        signs=(("<think>", "<answer>"), ("<think>", "<|extra_0|>")),
    ),
    "deepseek_r1": ReasoningParser(
        ("<think>",),
        ("</think>",),
        inside=True,
        aliases=("minimax_m2", "step3", "step3p5", "olmo3", "nemotron_v3"),
        models="DeepSeek-R1, QwQ, MiniMax-M2, Step3, Olmo 3 Think, Nemotron 3",
        signs=(("assistant\n<think>",), ("assistant\\n<think>",), ("<｜Assistant｜>", "</think>")),
    ),
    "qwen3": ReasoningParser(
        ("<think>",),
        ("</think>",),
        aliases=("think", "glm45", "glm47", "deepseek_v3", "deepseek_v31", "deepseek_v4", "holo2", "mimo"),
        models="Qwen3, GLM-4.5, DeepSeek-V3.1, SmolLM3, any that writes <think> itself",
        signs=(("<think>", "</think>"),),
    ),
}
