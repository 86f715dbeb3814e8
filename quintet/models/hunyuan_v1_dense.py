"""Hunyuan 0.5B to 7B (Tencent 2025): Llama with each head's q and k normalised once they are turned."""

from typing import Any

from torch import Tensor, nn

from quintet.layers.attention.attention import SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary, head_dim
from quintet.models.llama import LlamaForCausalLM

RENAMED = {".query_layernorm.": ".q_norm.", ".key_layernorm.": ".k_norm."}


class Turned(SelfAttention):
    """Norms behind the rotation."""

    def _apply_rotary(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        assert self.rotary is not None and self.q_norm is not None and self.k_norm is not None
        q, k = self.rotary(q, k, positions)
        return self.q_norm(q), self.k_norm(k)


class HunYuanDenseV1ForCausalLM(LlamaForCausalLM):
    """Pre-norm blocks, a gated feed-forward."""

    renamed_tensors = RENAMED

    def _rotary(self, config: Any, build: BuildContext) -> Rotary:
        size = head_dim(config)
        return Rotary(build, size, _rope(config.rope_parameters, size), config.max_position_embeddings)

    def _attention(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        attention = Turned(build, self._attention_sizes(config, index), rotary)
        attention.q_norm = RMSNorm(build, head_dim(config), config.rms_norm_eps)
        attention.k_norm = RMSNorm(build, head_dim(config), config.rms_norm_eps)
        return attention


def _rope(parameters: Any, size: int) -> dict[str, Any]:
    """ "dynamic" with an alpha is another base, whatever the length."""
    if parameters["rope_type"] != "dynamic" or not parameters.get("alpha"):
        return dict(parameters)
    return {"rope_type": "default", "rope_theta": parameters["rope_theta"] * parameters["alpha"] ** (size / (size - 2))}
