"""MiMo 7B (Xiaomi 2025): Qwen2, and a layer that guesses further tokens, which none here asks for."""

from quintet.models import qwen2


class Model(qwen2.Model):
    """The same blocks."""

    ignored = (*qwen2.Model.ignored, r"model\.mtp_layers\..*")
