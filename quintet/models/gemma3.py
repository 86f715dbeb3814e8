"""Gemma 3 (Kamath et al. 2025), the text model: QK-norm, and other rotary positions in windowed layers."""

from typing import Any

from torch import Tensor

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext
from quintet.layers.decoder import CausalLM, DecoderTrunk, SandwichBlock, layer_window, refuse, rounded
from quintet.layers.linear import LMHead
from quintet.layers.mlp import GatedMLP
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary


def _window(config: Any, index: int, build: BuildContext) -> int | None:
    """Returns a layer's window. If bidirectional, the config's is for both sides: half for each, plus the token."""
    window = layer_window(config, index)
    both = getattr(config, "use_bidirectional_attention", False)
    return window // 2 + 1 if window is not None and both and not build.causal else window


def _check_rnj1(config: Any) -> None:
    """ValueError for layers of Rnj-1 that see chunks: those of its class that see all tokens are Gemma 3's."""
    kinds = {*config.layer_types} - {"full_attention"}
    if "Rnj1ForCausalLM" in (getattr(config, "architectures", None) or ()) and kinds:
        raise ValueError(f"Rnj1ForCausalLM with layer_types {sorted(kinds)} is not supported; full_attention is")


class Gemma3ForCausalLM(CausalLM):
    """Gemma 2's blocks with QK-norm."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(build)
        if build.causal:
            refuse(config, "use_bidirectional_attention")
        _check_rnj1(config)
        rotaries = {
            kind: Rotary(build, config.head_dim, config.rope_parameters[kind], config.max_position_embeddings)
            for kind in sorted(set(config.layer_types))
        }

        def block(config: Any, build: BuildContext, index: int) -> SandwichBlock:
            shape = AttentionSizes(
                hidden=config.hidden_size,
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                scale=config.query_pre_attn_scalar**-0.5,
                window=_window(config, index, build),
                bias=config.attention_bias,
                output_bias=config.attention_bias,
            )
            attention = SelfAttention(build, shape, rotaries[config.layer_types[index]])
            attention.q_norm = RMSNorm(build, config.head_dim, config.rms_norm_eps, offset=1.0)
            attention.k_norm = RMSNorm(build, config.head_dim, config.rms_norm_eps, offset=1.0)
            mlp = GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_activation)
            return SandwichBlock(config, build, attention, mlp)

        scale = rounded(config.hidden_size**0.5, build.dtype)
        norm = RMSNorm(build, config.hidden_size, config.rms_norm_eps, offset=1.0)
        self.model = DecoderTrunk(config, build, block, scale, norm)
        self.lm_head = LMHead.from_config(build, config)
        self._ops, self._softcap = build.ops.take("softcap"), config.final_logit_softcapping

    def head(self, x: Tensor) -> Tensor:
        logits = super().head(x)
        return logits if self._softcap is None else self._ops.softcap(logits, self._softcap)
