"""Falcon-H1 (TII 2025): Mamba 2 and attention side by side in every layer, with multipliers all along."""

from typing import Any

import torch
from torch import Tensor, nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, PreNormBlock
from quintet.layers.layer_state import StepState
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.rope import Rotary, head_dim
from quintet.layers.ssm.mamba import Mamba2
from quintet.models.bamba import spaces

RENAMED = {
    ".mamba.": ".self_attn.space.",
    ".self_attn.q_proj.": ".self_attn.attention.q_proj.",
    ".self_attn.k_proj.": ".self_attn.attention.k_proj.",
    ".self_attn.v_proj.": ".self_attn.attention.v_proj.",
    ".self_attn.o_proj.": ".self_attn.attention.o_proj.",
    ".pre_ff_layernorm.": ".post_attention_layernorm.",
    ".feed_forward.": ".mlp.",
    ".final_layernorm.": ".norm.",
}


class FalconH1Mixer(nn.Module):
    """x [T, hidden] through the state space and through attention, scaled, and their sum."""

    def __init__(self, config: Any, build: BuildContext, rotary: Rotary) -> None:
        super().__init__()
        self._ops = build.ops.take("add", "scale")
        multipliers = config.ssm_multipliers
        if config.mamba_proj_bias and config.ssm_in_multiplier != 1:
            raise ValueError(
                f"falcon_h1 with mamba_proj_bias and ssm_in_multiplier={config.ssm_in_multiplier} is not supported"
            )
        norm = "before the gate" if config.mamba_norm_before_gate else "after the gate"
        shape = spaces(
            config,
            output_bias=config.projectors_bias,
            norm=norm if config.mamba_rms_norm else "none",
            # x is scaled on its way in, and every product of it is
            factors=tuple(factor * config.ssm_in_multiplier for factor in multipliers),
        )
        self.space = Mamba2(build, shape)
        # the scale of scores takes over that of the keys
        scale = head_dim(config) ** -0.5 * config.key_multiplier
        bias = config.attention_bias
        self.attention = SelfAttention(
            build, AttentionSizes.from_config(config, scale=scale, bias=bias, output_bias=bias), rotary
        )
        self._of_space, self._of_attention = config.ssm_out_multiplier, config.attention_out_multiplier
        self._into = config.attention_in_multiplier

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        scale = self._ops.scale
        space = scale(self.space(x, cache), self._of_space)
        x = x if self._into == 1 else scale(x, self._into)
        out: Tensor = self._ops.add(scale(self.attention(x, cache), self._of_attention), space)
        return out


class FalconH1MLP(GatedMLP):
    """down(act(gate(x) * first) * up(x)) * last."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build, config.hidden_size, config.intermediate_size, config.hidden_act, config.mlp_bias)
        self._own = build.ops.take("scale", "scale_heads")
        self._first, self._last = config.mlp_multipliers
        self.factors: Tensor

    def constants(self) -> dict[str, Tensor]:
        return {"factors": torch.tensor([[self._first], [1.0]])}

    def forward(self, x: Tensor) -> Tensor:
        made = self.gate_up(x).reshape(x.shape[0], 2, -1)
        made = self._own.scale_heads(made, self.factors).reshape(x.shape[0], -1)
        out: Tensor = self._own.scale(self.down(self.ops.gated(made, self.kind)), self._last)
        return out


class FalconH1ForCausalLM(CausalLM):
    """Pre-norm blocks, rotary positions, a gated feed-forward, scaled embeddings and logits."""

    renamed_tensors = RENAMED

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        rotary = Rotary.from_config(build, config)

        def block(config: Any, build: BuildContext, index: int) -> PreNormBlock:
            return PreNormBlock(config, build, FalconH1Mixer(config, build, rotary), FalconH1MLP(config, build))

        self.model = DecoderTrunk(config, build, block, scale=config.embedding_multiplier)
        self.lm_head = LMHead.from_config(build, config)
        self._ops, self._factor = build.ops.take("scale"), config.lm_head_multiplier

    def head(self, x: Tensor) -> Tensor:
        out: Tensor = self._ops.scale(super().head(x), self._factor)
        return out
