"""AFM (Arcee 2025): Llama with a plain feed-forward and squared relu as its activation."""

from typing import Any

from torch import nn

from quintet.layers.build import BuildContext
from quintet.layers.mlp import MLP
from quintet.models.llama import LlamaForCausalLM


class ArceeForCausalLM(LlamaForCausalLM):
    """Pre-norm blocks, rotary positions."""

    def _mlp(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        sizes = config.hidden_size, config.intermediate_size
        return MLP(build, sizes, config.hidden_act, ("up_proj", "down_proj"), config.mlp_bias)
