"""MiMo 7B (Xiaomi 2025): Qwen2, and a layer that guesses further tokens, which none here asks for."""

from quintet.models.qwen2 import Qwen2ForCausalLM


class MiMoForCausalLM(Qwen2ForCausalLM):
    """The same blocks."""

    ignored_tensors = (*Qwen2ForCausalLM.ignored_tensors, r"model\.mtp_layers\..*")
