"""Hunyuan 0.5B to 7B (Tencent 2025): Llama with each head's q and k normalised once they are turned."""

from typing import Any

from torch import Tensor, nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, PreNormBlock
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary, head_dim

RENAMED = {".query_layernorm.": ".q_norm.", ".key_layernorm.": ".k_norm."}


class Turned(SelfAttention):
    """Norms behind the rotation."""

    def _apply_rotary(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        assert self.rotary is not None and self.q_norm is not None and self.k_norm is not None
        q, k = self.rotary(q, k, positions)
        return self.q_norm(q), self.k_norm(k)


class HunYuanDenseV1ForCausalLM(CausalLM):
    """Pre-norm blocks, a gated feed-forward."""

    renamed_tensors = RENAMED

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        size, biased = head_dim(config), config.attention_bias
        rotary = Rotary(build, size, _rope(config.rope_parameters, size), config.max_position_embeddings)

        def block(config: Any, build: BuildContext, index: int) -> PreNormBlock:
            attention = Turned(build, AttentionSizes.from_config(config, bias=biased, output_bias=biased), rotary)
            attention.q_norm = RMSNorm(build, size, config.rms_norm_eps)
            attention.k_norm = RMSNorm(build, size, config.rms_norm_eps)
            return PreNormBlock(config, build, attention, self._feed(config, build, index))

        self.model = DecoderTrunk(config, build, block)
        self.lm_head = LMHead.from_config(build, config)

    def _feed(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        return GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act)


def _rope(parameters: Any, size: int) -> dict[str, Any]:
    """ "dynamic" with an alpha is another base, whatever the length."""
    if parameters["rope_type"] != "dynamic" or not parameters.get("alpha"):
        return dict(parameters)
    return {"rope_type": "default", "rope_theta": parameters["rope_theta"] * parameters["alpha"] ** (size / (size - 2))}
