"""MiniMax-Text-01 and M1 (MiniMax 2025): lightning attention, full attention in some layers, Mixtral's experts."""

from typing import Any

from torch import Tensor, nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, PreNormBlock
from quintet.layers.layer_state import StepState
from quintet.layers.linear import LMHead
from quintet.layers.moe.moe import MoE, unstacked
from quintet.layers.rope import Rotary, head_dim
from quintet.layers.ssm.lightning import LightningAttention, decay_rates
from quintet.layers.ssm.short_conv import check_silu
from quintet.models import mixtral

EPS = 1e-6  # of lightning attention's norm, whatever the others have


class MiniMaxDecoderLayer(PreNormBlock):
    """A block that adds each scaled branch to its scaled, normalised input: the residual is a norm's output."""

    def scaled_by(
        self, build: BuildContext, attention: tuple[float, float], mlp: tuple[float, float]
    ) -> "MiniMaxDecoderLayer":
        """Sets the factors of each branch, (input, output)."""
        self._ops, self._attention, self._mlp = build.ops.take("add", "scale"), attention, mlp
        return self

    def forward(self, x: Tensor, residual: Tensor | None, cache: StepState) -> tuple[Tensor, Tensor]:
        x = self.input_layernorm(x if residual is None else self._ops.add(x, residual))
        branch, x = self._branches(self.self_attn(x, cache), x, self._attention)
        x = self.post_attention_layernorm(self._ops.add(branch, x))
        return self._branches(self.mlp(x), x, self._mlp)

    def _branches(self, branch: Tensor, x: Tensor, factors: tuple[float, float]) -> tuple[Tensor, Tensor]:
        scaled = [each if by == 1 else self._ops.scale(each, by) for each, by in zip((x, branch), factors, strict=True)]
        return scaled[1], scaled[0]


class MiniMaxForCausalLM(CausalLM):
    """Rotary positions in full attention alone."""

    unstacked = staticmethod(unstacked)
    canonical = staticmethod(mixtral.MixtralForCausalLM.canonical)
    # constants that transformers stores
    ignored_tensors = (*CausalLM.ignored_tensors, r".*\.self_attn\.(slope_rate|(query|key|diagonal)_decay)")

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        check_silu(config)
        dim, rope = head_dim(config), config.rope_parameters
        if getattr(config, "rotary_dim", None):  # MiniMax's own code turns so many, and transformers all
            rope = {**rope, "partial_rotary_factor": config.rotary_dim / dim}
        rotary = Rotary(build, dim, rope, config.max_position_embeddings, partial=True)
        mixture = mixtral.mixture_of(config)

        def block(config: Any, build: BuildContext, index: int) -> MiniMaxDecoderLayer:
            attention: nn.Module
            kind = config.layer_types[index]
            if kind == "linear_attention":
                rates = decay_rates(config.num_attention_heads, index, config.num_hidden_layers)
                attention = LightningAttention(build, AttentionSizes.from_config(config), rates, EPS)
                factors = config.linear_attn_alpha_factor, config.linear_attn_beta_factor
            else:
                attention = SelfAttention(
                    build, AttentionSizes.from_config(config, window=config.sliding_window), rotary
                )
                factors = config.full_attn_alpha_factor, config.full_attn_beta_factor
            mlp = config.mlp_alpha_factor, config.mlp_beta_factor
            return MiniMaxDecoderLayer(config, build, attention, MoE(build, mixture)).scaled_by(build, factors, mlp)

        self.model = DecoderTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)
