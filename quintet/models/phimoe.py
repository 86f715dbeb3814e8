"""Phi-3.5-MoE (Abdin et al. 2024): LayerNorm, and two experts that are chosen one after the other (SparseMixer)."""

from collections.abc import Mapping
from typing import Any

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.blocks import SerialBlock
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk
from quintet.layers.linear import LMHead
from quintet.layers.moe.moe import MoE, MoESizes, unstacked
from quintet.layers.norm import LayerNorm
from quintet.layers.rope import Rotary
from quintet.models.mixtral import MixtralForCausalLM


class PhimoeForCausalLM(CausalLM):
    """Mixtral's checkpoints; positions may be scaled by longrope, with a factor for short requests and one for long."""

    unstacked = staticmethod(unstacked)

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        if config.num_experts_per_tok != 2:
            raise ValueError(f"phimoe chooses two experts, and config.json says {config.num_experts_per_tok}")
        hidden = config.hidden_size
        trained, parameters = config.max_position_embeddings, _scaled(config.rope_parameters, build.max_model_len)
        rotary = Rotary(build, hidden // config.num_attention_heads, parameters, trained)
        mixture = MoESizes(
            hidden=hidden,
            width=config.intermediate_size,
            experts=config.num_local_experts,
            top_k=2,
            activation=config.hidden_act,
            renormalize=False,
            margin=2 * config.router_jitter_noise,
        )
        bias = config.attention_bias

        def norm() -> LayerNorm:
            return LayerNorm(build, hidden, config.rms_norm_eps)

        def block(config: Any, build: BuildContext, index: int) -> SerialBlock:
            shape = AttentionSizes.from_config(config, bias=bias, output_bias=bias, window=config.sliding_window)
            parts = {
                "input_layernorm": norm(),
                "self_attn": SelfAttention(build, shape, rotary),
                "post_attention_layernorm": norm(),
                "mlp": MoE(build, mixture),
            }
            return SerialBlock(build, parts)

        self.model = DecoderTrunk(config, build, block, norm=norm())
        self.lm_head = LMHead.from_config(build, config, bias=config.lm_head_bias)

    @staticmethod
    def canonical(name: str) -> str:
        """Some call the router router, and not gate."""
        return MixtralForCausalLM.canonical(name).replace(".mlp.router.", ".mlp.gate.")


def _scaled(rope: Mapping[str, Any], served: int) -> Mapping[str, Any]:
    """With what cosines and sines are multiplied by (mscale), which the config says apart for short requests and long.
    As the divisors of longrope it is settled by max_model_len."""
    if rope.get("rope_type", "default") == "default":
        return rope
    length = "long" if served > rope["original_max_position_embeddings"] else "short"
    return {**rope, "attention_factor": rope[f"{length}_mscale"]}
