"""openPangu Ultra MoE (Huawei 2025): DeepSeek-V3 with norms before and after each branch."""

from dataclasses import replace
from typing import Any

from torch import nn

from quintet.layers.blocks import BetweenNormsBlock
from quintet.layers.build import BuildContext
from quintet.layers.moe.moe import MoESizes
from quintet.layers.norm import RMSNorm
from quintet.models.deepseek_v3 import DeepseekV3ForCausalLM, grouped

NORMS = ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")


class PanguUltraMoEForCausalLM(DeepseekV3ForCausalLM):
    """Experts are chosen by sigmoid, with a bias where the checkpoint has one."""

    def _block(self, config: Any, build: BuildContext, attention: nn.Module, mlp: nn.Module) -> nn.Module:
        if not config.sandwich_norm:
            return super()._block(config, build, attention, mlp)
        before, after, between, last = (RMSNorm(build, config.hidden_size, config.rms_norm_eps) for _ in NORMS)
        first = {NORMS[0]: before, "self_attn": attention, NORMS[1]: after}
        return BetweenNormsBlock(build, {**first, NORMS[2]: between, "mlp": mlp, NORMS[3]: last})

    @staticmethod
    def mixture(config: Any) -> MoESizes:
        mixture = grouped(config)
        return mixture if config.router_enable_expert_bias else replace(mixture, bias=None)
