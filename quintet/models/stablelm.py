"""StableLM 2 and Zephyr (Bellagente et al. 2024): LayerNorm, part of each head turned, a gated feed-forward."""

from functools import partial
from typing import Any

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.blocks import NamedParts, ParallelBlock, SerialBlock
from quintet.layers.build import BuildContext, split_heads
from quintet.layers.decoder import CausalLM, DecoderTrunk
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.norm import HeadLayerNorm, LayerNorm
from quintet.layers.rope import Rotary, head_dim

RENAMED = {".q_layernorm.": ".q_norm.", ".k_layernorm.": ".k_norm."}


class StableLmForCausalLM(CausalLM):
    """Pre-norm blocks, or (12B) parallel ones with a norm of its own for each head of q and k."""

    renamed_tensors = RENAMED

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        hidden, eps = config.hidden_size, config.layer_norm_eps
        norm = partial(LayerNorm, build, hidden, eps)
        rotary = Rotary.from_config(build, config, partial=True)

        def block(config: Any, build: BuildContext, index: int) -> NamedParts:
            attention = SelfAttention(build, AttentionSizes.from_config(config, bias=config.use_qkv_bias), rotary)
            if config.qk_layernorm:
                queries, keys = split_heads(config.num_attention_heads, config.num_key_value_heads, build.size)
                attention.q_norm = HeadLayerNorm(build, queries, head_dim(config), eps, "norms.{}.weight")
                attention.k_norm = HeadLayerNorm(build, keys, head_dim(config), eps, "norms.{}.weight")
            mlp = GatedMLP(build, hidden, config.intermediate_size, config.hidden_act)
            if config.use_parallel_residual:
                return ParallelBlock(build, {"input_layernorm": norm(), "self_attn": attention, "mlp": mlp})
            between = {"post_attention_layernorm": norm()}
            return SerialBlock(build, {"input_layernorm": norm(), "self_attn": attention, **between, "mlp": mlp})

        self.model = DecoderTrunk(config, build, block, norm=norm())
        self.lm_head = LMHead.from_config(build, config)
