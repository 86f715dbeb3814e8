"""Ling 3 (inclusionAI 2026): Kimi Delta Attention with bounded decays; latent attention with gates in some layers."""

from typing import Any

from torch import Tensor, nn

from quintet.layers.attention.attention import HeadGate
from quintet.layers.attention.mla import LatentAttention, MLASizes
from quintet.layers.build import BuildContext, even_shards
from quintet.layers.layer_state import StepState
from quintet.layers.rope import Rotary
from quintet.layers.ssm.kimi_delta import KimiDeltaAttention, KimiDeltaSizes
from quintet.models.deepseek_v3 import beyond
from quintet.models.kimi_linear import KimiLinearForCausalLM

RENAMED = {
    "model.word_embeddings.": "model.embed_tokens.",
    ".attention.dense.": ".self_attn.o_proj.",
    ".attention.": ".self_attn.",
    ".mlp.gate.expert_bias": ".mlp.gate.e_score_correction_bias",
}


class GatedLatentAttention(LatentAttention):
    """Latent attention whose heads are multiplied by gates."""

    def __init__(self, build: BuildContext, shape: MLASizes, rotary: Rotary | None) -> None:
        super().__init__(build, shape, rotary)
        self.gate = HeadGate(build, shape.hidden, even_shards(shape.heads, build.size))

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        out: Tensor = self.out(self.gate(x, self.mix(x, cache)))
        return out


class BailingHybridForCausalLM(KimiLinearForCausalLM):
    """Kimi Linear with rotary positions; layers past the last, which guess further tokens, are not read."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        if config.kda_safe_gate and config.kda_lower_bound >= 0:
            raise ValueError(f"{config.model_type} with kda_lower_bound={config.kda_lower_bound}: it is below 0")
        super().__init__(config, build)
        self.ignored_tensors = (*KimiLinearForCausalLM.ignored_tensors, beyond(config))

    def _rotary(self, config: Any, build: BuildContext) -> Rotary:
        dim, trained = config.qk_rope_head_dim, config.max_position_embeddings
        return Rotary(build, dim, config.rope_parameters, trained, interleaved=True)

    def _attention(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        if config.layer_types[index] == "full_attention":
            return GatedLatentAttention(build, MLASizes.from_config(config), rotary)
        sizes = KimiDeltaSizes(
            hidden=config.hidden_size,
            heads=config.linear_num_heads,
            head_dim=config.linear_head_dim,
            conv_kernel=config.linear_conv_kernel_dim,
            eps=config.rms_norm_eps,
            low_rank=False,
            lower_bound=config.kda_lower_bound if config.kda_safe_gate else 0.0,
        )
        return KimiDeltaAttention(build, sizes)

    @staticmethod
    def canonical(name: str) -> str:
        """Published files have Ling's own names, transformers' modules Kimi Linear's."""
        for theirs, ours in RENAMED.items():
            name = name.replace(theirs, ours, 1)
        return KimiLinearForCausalLM.canonical(name)
