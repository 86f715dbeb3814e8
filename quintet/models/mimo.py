"""MiMo 7B (Xiaomi 2025): Qwen2, and a layer that guesses further tokens, which none here asks for."""

from quintet.models.qwen2 import Qwen2ForCausalLM


class MiMoForCausalLM(Qwen2ForCausalLM):
    """The same blocks."""

    ignored = (*Qwen2ForCausalLM.ignored, r"model\.mtp_layers\..*")
