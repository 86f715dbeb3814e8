"""dots.llm1 (rednote 2025): Qwen3's attention, DeepSeek-V3's experts."""

from typing import Any

from torch import nn

from quintet.layers.build import BuildContext
from quintet.layers.moe.moe import MoE, unstacked
from quintet.models.deepseek_v3 import dense, grouped
from quintet.models.qwen3 import Qwen3ForCausalLM


class Dots1ForCausalLM(Qwen3ForCausalLM):
    """Pre-norm blocks, QK-norm before the rotation, windows where the checkpoint has them."""

    unstacked = staticmethod(unstacked)

    def _mlp(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        if dense(config, index):
            return super()._mlp(config, build, index)
        return MoE(build, grouped(config))
