"""DeepSeek-V2 and its Lite and Coder models (DeepSeek-AI 2024): latent attention, experts chosen by softmax."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from quintet.layers.build import BuildContext
from quintet.layers.moe.moe import MoESizes
from quintet.layers.rope import Rotary
from quintet.models.deepseek_v3 import DeepseekV3ForCausalLM
from quintet.models.llama import LlamaForCausalLM


class DeepseekV2ForCausalLM(DeepseekV3ForCausalLM):
    """V3's blocks. Weights are the softmax's own: neither scaled to 1, nor moved by a bias. DeepSeek-OCR's text models
    have no latent attention, but Llama's."""

    computed: ClassVar[Mapping[str, Any]] = {"scoring_func": "softmax", "norm_topk_prob": False, "moe_layer_freq": 1}

    def _rotary(self, config: Any, build: BuildContext) -> Rotary | None:
        return super()._rotary(config, build) if _latent(config) else Rotary.from_config(build, config)

    def _attention(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        if _latent(config):
            return super()._attention(config, build, index, rotary)
        return LlamaForCausalLM._attention(self, config, build, index, rotary)

    @staticmethod
    def neighbours(config: Any) -> bool:
        return True

    @staticmethod
    def mixture(config: Any) -> MoESizes:
        if config.topk_method not in ("greedy", "group_limited_greedy"):
            raise ValueError(
                f"topk_method {config.topk_method!r} is not known; deepseek_v2 here has greedy and group_limited_greedy"
            )
        limited = config.topk_method == "group_limited_greedy"
        return MoESizes(
            hidden=config.hidden_size,
            width=config.moe_intermediate_size,
            experts=config.n_routed_experts,
            top_k=config.num_experts_per_tok,
            activation=config.hidden_act,
            renormalize=False,
            groups=config.n_group if limited else 1,
            top_k_groups=config.topk_group if limited else 1,
            scale=config.routed_scaling_factor,
            fp32_router=True,
            shared=config.moe_intermediate_size * (config.n_shared_experts or 0),
        )


def _latent(config: Any) -> bool:
    """Returns whether keys and values of attention are one latent vector."""
    return getattr(config, "kv_lora_rank", None) is not None
