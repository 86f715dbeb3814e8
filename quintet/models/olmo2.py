"""OLMo 2 (Walsh et al. 2024): norms after the branches, and q and k normalised over all heads together."""

from functools import partial
from typing import Any

from torch import nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.blocks import PostNormBlock
from quintet.layers.build import BuildContext, split_heads
from quintet.layers.decoder import CausalLM, DecoderTrunk
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.norm import RMSNorm, ShardedRMSNorm
from quintet.layers.rope import Rotary, head_dim


class Olmo2ForCausalLM(CausalLM):
    """Post-norm blocks, QK-norm over the whole projection, rotary positions, a gated feed-forward."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        self._attend = self._attending(config, build)
        self.model = DecoderTrunk(config, build, self._block)
        self.lm_head = LMHead.from_config(build, config)

    def _block(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        norm = partial(RMSNorm, build, config.hidden_size, config.rms_norm_eps)
        queries, keys = split_heads(config.num_attention_heads, config.num_key_value_heads, build.size)
        biased, (window, rotary) = config.attention_bias, self._attend(index)
        shape = AttentionSizes.from_config(config, bias=biased, output_bias=biased, window=window)
        attention = SelfAttention(build, shape, rotary)
        attention.q_norm = ShardedRMSNorm(build, queries.times(head_dim(config)), config.rms_norm_eps)
        attention.k_norm = ShardedRMSNorm(build, keys.times(head_dim(config)), config.rms_norm_eps)
        parts = {
            "self_attn": attention,
            "post_attention_layernorm": norm(),
            "mlp": self._feed(config, build),
            "post_feedforward_layernorm": norm(),
        }
        return PostNormBlock(build, parts)

    def _feed(self, config: Any, build: BuildContext) -> nn.Module:
        return GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act)

    def _attending(self, config: Any, build: BuildContext) -> Any:
        """A layer's number -> its window, and what turns its heads."""
        rotary = Rotary.from_config(build, config)
        return lambda index: (None, rotary)
