"""Gemma 4 (Google 2026), the text models: wider heads in layers that see all, embeddings of each layer's own, experts.

`gemma4_unified` is the same without embeddings of layers and experts.
"""

from typing import Any

import torch
from torch import Tensor, nn

from quintet.interface.weights import Weight
from quintet.layers.altup import Streams
from quintet.layers.attention.attention import AttentionSizes, SelfAttention, SharedKVAttention
from quintet.layers.build import BuildContext, Layer, replicated, vector_weight
from quintet.layers.decoder import layer_window, refuse, require
from quintet.layers.layer_state import StepState
from quintet.layers.linear import column_parallel
from quintet.layers.mlp import GatedMLP
from quintet.layers.moe.moe import MoE, MoESizes, unstacked
from quintet.layers.norm import RMSNorm
from quintet.layers.per_layer_inputs import PerLayerCausalLM, PerLayerTrunk, ValueNormAttention, attention_layers
from quintet.layers.rope import Rotary

RENAMED = {
    ".router.scale": ".moe.router_norm.weight",
    ".router.proj.": ".moe.gate.",
    ".router.": ".moe.",
    ".experts.": ".moe.experts.",
    ".pre_feedforward_layernorm_2.": ".moe.input_norm.",
}


class Gemma4Attention(ValueNormAttention):
    """Attention whose values are its keys before their norm, where a layer has no projection for them."""

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.keys_are_values:
            return super().project(x)
        sizes = [self._head_dim * count for count in (self._heads, self._kv_heads)]
        q, k = (each.reshape(x.shape[0], -1, self._head_dim) for each in self.qkv(x).split(sizes, dim=-1))
        return q, k, self.v_norm(k)

    keys_are_values = False


class LayerScalar(Layer):
    """Multiplies hidden states by a number that the checkpoint has for a layer."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__(build, "scale_heads")
        self._build = build
        self.factor: Tensor

    def weights(self, path: str) -> list[Weight]:
        return [vector_weight(self._build, path, 1, torch.float32, name="factor")]

    def forward(self, x: Tensor) -> Tensor:  # [T, H] -> [T, H]
        scaled: Tensor = self.ops.scale_heads(x[:, None], self.factor[:, None])
        return scaled.reshape(x.shape)


class Gemma4MoE(MoE):
    """Experts with a norm of their own; the router has another, and a factor for each expert's weight."""

    def __init__(self, build: BuildContext, sizes: MoESizes, eps: float) -> None:
        super().__init__(build, sizes)
        self._build, self._shrink = build, sizes.hidden**-0.5
        self.router_norm, self.input_norm = RMSNorm(build, sizes.hidden, eps), RMSNorm(build, sizes.hidden, eps)
        self.ops.take("scale", "scale_rows", "take_rows")
        self.per_expert_scale: Tensor

    def weights(self, path: str) -> list[Weight]:
        source = f"{path}.per_expert_scale"
        return [vector_weight(self._build, source, self._moe_sizes.experts, torch.float32)]

    def share(self, x: Tensor) -> Tensor:
        weights, ids = self.choice(self.gate(self.ops.scale(self.router_norm(x), self._shrink)))
        factors = self.ops.take_rows(self.per_expert_scale[:, None], ids.flatten())
        scaled = self.ops.scale_rows(weights.reshape(-1, 1), factors).reshape(weights.shape)
        share: Tensor = self.experts(self.input_norm(x), scaled, ids)
        return share


class Gemma4DecoderLayer(nn.Module):
    """Norms before and after each branch: attention, the feed-forward with experts beside it, the layer's embeddings."""

    def __init__(self, config: Any, build: BuildContext, attention: nn.Module) -> None:
        super().__init__()
        hidden, eps, kind = config.hidden_size, config.rms_norm_eps, config.hidden_activation
        inner = getattr(config, "hidden_size_per_layer_input", 0)
        self._ops, self._kind = build.ops.take("add", *["beside", "gated"] * bool(inner)), kind
        self.self_attn, self.layer_scalar = attention, LayerScalar(build)
        shares = isinstance(attention, SharedKVAttention) and config.use_double_wide_mlp
        self.mlp = GatedMLP(build, hidden, config.intermediate_size * (1 + shares), kind)
        self.input_layernorm = RMSNorm(build, hidden, eps)
        self.post_attention_layernorm = RMSNorm(build, hidden, eps)
        self.pre_feedforward_layernorm = RMSNorm(build, hidden, eps)
        self.post_feedforward_layernorm = RMSNorm(build, hidden, eps)
        self.moe: MoE | None = None
        if getattr(config, "enable_moe_block", False):
            sizes = MoESizes(
                hidden, config.moe_intermediate_size, config.num_experts, config.top_k_experts, kind, renormalize=True
            )
            self.moe = Gemma4MoE(build, sizes, eps)
            self.post_feedforward_layernorm_1 = RMSNorm(build, hidden, eps)
            self.post_feedforward_layernorm_2 = RMSNorm(build, hidden, eps)
        self._has_embeddings = bool(inner)
        if inner:
            self.into = column_parallel(build, hidden, {"per_layer_input_gate": replicated(inner, build.size)})
            self.back = column_parallel(build, inner, {"per_layer_projection": replicated(hidden, build.size)})
            self.post_per_layer_input_norm = RMSNorm(build, hidden, eps)

    def forward(self, streams: Streams, own: Tensor | None, cache: StepState) -> Streams:
        (x,), ops = streams, self._ops
        attended = self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), cache))
        normed, x = self.pre_feedforward_layernorm(attended, x)
        fed = self.mlp(normed)
        if self.moe is not None:
            fed = self.post_feedforward_layernorm_1(fed)
            fed = ops.add(fed, self.post_feedforward_layernorm_2(self.moe(x)))
        x = ops.add(self.post_feedforward_layernorm(fed), x)
        if own is not None:
            gated = ops.gated(ops.beside(self.into(x), own), self._kind)
            x = ops.add(self.post_per_layer_input_norm(self.back(gated)), x)
        return (self.layer_scalar(x),)


class Gemma4Model(PerLayerTrunk):
    """Gemma 4's layers; rows of media have the layer embeddings of the padding token."""

    pads_rows = True

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build, [Gemma4DecoderLayer(config, build, each) for each in _attentions(config, build)])


def _attentions(config: Any, build: BuildContext) -> list[nn.Module]:
    kinds, eps, bias = config.layer_types, config.rms_norm_eps, config.attention_bias
    trained = config.max_position_embeddings
    heads = {kind: config.per_layer_config[kinds.index(kind)].head_dim for kind in sorted(set(kinds))}
    rotaries = {kind: Rotary(build, dim, config.rope_parameters[kind], trained) for kind, dim in heads.items()}

    def sizes(index: int) -> AttentionSizes:
        own = config.per_layer_config[index]
        keys_are_values = config.attention_k_eq_v and kinds[index] == "full_attention"
        return AttentionSizes(
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=own.num_key_value_heads,
            head_dim=own.head_dim,
            scale=1.0,
            window=layer_window(config, index),
            bias=bias,
            output_bias=bias,
            names=("q_proj", "k_proj", "k_proj" if keys_are_values else "v_proj"),
        )

    def make(index: int) -> Gemma4Attention:
        shape = sizes(index)
        made = Gemma4Attention(build, shape, rotaries[kinds[index]])
        made.keys_are_values = "v_proj" not in shape.names
        made.q_norm, made.k_norm = RMSNorm(build, shape.head_dim, eps), RMSNorm(build, shape.head_dim, eps)
        made.v_norm = RMSNorm(build, shape.head_dim, eps, has_weight=False)
        return made

    def share(index: int, source: SelfAttention) -> SharedKVAttention:
        shape = sizes(index)
        norm = RMSNorm(build, shape.head_dim, eps)
        return SharedKVAttention(build, shape, rotaries[kinds[index]], source, norm)

    return attention_layers(config, make, share)


class Gemma4ForCausalLM(PerLayerCausalLM):
    """Gemma 4's text model."""

    renamed_tensors = RENAMED
    unstacked = staticmethod(unstacked)

    def __init__(self, config: Any, build: BuildContext) -> None:
        if build.causal and getattr(config, "use_bidirectional_attention", None) == "all":
            refuse(config, "use_bidirectional_attention")
        require(config, {"pad_token_id": 0})
        super().__init__(config, build, Gemma4Model(config, build))
