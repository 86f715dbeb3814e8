"""Ministral 3 (Mistral 2025): Mistral with queries that grow with their position, beyond its first training length."""

from typing import Any

from torch import Tensor

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, PreNormBlock
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.rope import PositionScaling, Rotary


class Growing(SelfAttention):
    """Queries times their position's factor, once they are turned."""

    growth: PositionScaling | None  # None: no position that is served has another than 1

    def _apply_rotary(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        q, k = super()._apply_rotary(q, k, positions)
        return (q if self.growth is None else self.growth(q, positions)), k


class Ministral3ForCausalLM(CausalLM):
    """Pre-norm blocks, rotary positions, windows where the checkpoint has them, a gated feed-forward."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        rotary, growth = Rotary.from_config(build, config), _growth(config, build)

        def block(config: Any, build: BuildContext, index: int) -> PreNormBlock:
            attention = Growing(build, AttentionSizes.from_config(config, window=config.sliding_window), rotary)
            attention.growth = growth
            mlp = GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act)
            return PreNormBlock(config, build, attention, mlp)

        self.model = DecoderTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)


def _growth(config: Any, build: BuildContext) -> PositionScaling | None:
    """One for all layers."""
    parameters = config.rope_parameters
    beta, first = parameters.get("llama_4_scaling_beta"), parameters.get("original_max_position_embeddings")
    if not beta or not first or build.max_model_len <= first:
        return None
    return PositionScaling(build, float(beta), int(first))
