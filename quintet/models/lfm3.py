"""LFM3 (Liquid AI 2026): short convolutions, and attention with gates and norms around branches in some layers."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from quintet.layers.attention.attention import AttentionSizes, HeadGate, SelfAttention
from quintet.layers.blocks import BetweenNormsBlock
from quintet.layers.build import BuildContext, split_heads
from quintet.layers.decoder import layer_window
from quintet.layers.layer_state import StepState
from quintet.layers.mlp import GatedMLP
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary
from quintet.layers.ssm.short_conv import GatedConv
from quintet.models import lfm2

RENAMED = {
    **lfm2.RENAMED,
    ".post_operator_norm.": ".post_attention_norm.",
    ".post_ffn_norm.": ".post_feedforward_norm.",
    ".self_attn.gate_proj.": ".self_attn.g_proj.",
}


class HeadGatedAttention(SelfAttention):
    """Attention whose heads are multiplied by gates."""

    def __init__(self, build: BuildContext, shape: AttentionSizes, rotary: Rotary | None) -> None:
        super().__init__(build, shape, rotary)
        queries, _ = split_heads(shape.heads, shape.kv_heads, build.size)
        self.gate = HeadGate(build, shape.hidden, queries)

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        out: Tensor = self.out(self.gate(x, self._project_and_mix(x, cache)))
        return out


class Lfm3ForCausalLM(lfm2.Lfm2ForCausalLM):
    """LFM2 with windows, rotary positions of each kind of layer, and the parts that the config asks for."""

    renamed_tensors = RENAMED

    def _rotary(self, config: Any, build: BuildContext) -> None:
        kinds = sorted({*config.layer_types} - {"conv"})
        trained = config.max_position_embeddings
        self._rotaries = {k: Rotary(build, config.head_dim, config.rope_parameters[k], trained) for k in kinds}

    def _attention(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        kind = config.layer_types[index]
        if kind == "conv":
            return GatedConv(build, config)
        bias, made = config.attention_bias, HeadGatedAttention if config.use_attention_gate else SelfAttention
        sizes = AttentionSizes.from_config(config, window=layer_window(config, index), bias=bias, output_bias=bias)
        attention = made(build, sizes, self._rotaries[kind])
        attention.q_norm = RMSNorm(build, config.head_dim, config.norm_eps)
        attention.k_norm = RMSNorm(build, config.head_dim, config.norm_eps)
        return attention

    def _mlp(self, config: Any, build: BuildContext, index: int) -> nn.Module:
        return GatedMLP(build, config.hidden_size, config.intermediate_size, "silu")

    def _block(self, config: Any, build: BuildContext, attention: nn.Module, mlp: nn.Module) -> nn.Module:
        if not config.use_sandwich_norm:
            return super()._block(config, build, attention, mlp)
        norm = partial(RMSNorm, build, config.hidden_size, config.norm_eps)
        parts = {
            "input_layernorm": norm(),
            "self_attn": attention,
            "post_attention_norm": norm(),
            "post_attention_layernorm": norm(),
            "mlp": mlp,
            "post_feedforward_norm": norm(),
        }
        return BetweenNormsBlock(build, parts)
