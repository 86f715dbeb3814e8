"""Gemma 2 (Riviere et al. 2024): norms around each branch, soft-capped scores and logits, alternating windows."""

from typing import Any

from torch import Tensor, nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, SandwichBlock, layer_window, refuse, rounded
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary


class Gemma2ForCausalLM(CausalLM):
    """Embedding scaled by sqrt(hidden), norms that are kept around 0, every second layer with a window."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        if build.causal and not build.whole_prompts:
            refuse(config, "use_bidirectional_attention")
        rotary = Rotary(build, config.head_dim, config.rope_parameters, config.max_position_embeddings)

        def layer(config: Any, build: BuildContext, index: int) -> nn.Module:
            shape = AttentionSizes(
                hidden=config.hidden_size,
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                scale=config.query_pre_attn_scalar**-0.5,
                window=layer_window(config, index),
                softcap=config.attn_logit_softcapping,
                bias=config.attention_bias,
                output_bias=config.attention_bias,
            )
            mlp = GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_activation)
            return self.block(config, build, SelfAttention(build, shape, rotary), mlp)

        scale = rounded(config.hidden_size**0.5, build.dtype)
        norm = RMSNorm(build, config.hidden_size, config.rms_norm_eps, offset=1.0)
        self.model = DecoderTrunk(config, build, layer, scale, norm)
        self.lm_head = LMHead.from_config(build, config)
        self._ops, self._softcap = build.ops.take("softcap"), config.final_logit_softcapping

    @staticmethod
    def block(config: Any, build: BuildContext, attention: nn.Module, mlp: nn.Module) -> nn.Module:
        """Builds a block of these parts."""
        return SandwichBlock(config, build, attention, mlp)

    def head(self, x: Tensor) -> Tensor:
        logits = super().head(x)
        return logits if self._softcap is None else self._ops.softcap(logits, self._softcap)
