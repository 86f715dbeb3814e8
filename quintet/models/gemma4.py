"""Gemma 4 (Google 2026), the text models: wider heads in layers that see all, embeddings of each layer's own, experts.

`gemma4_unified` is the same without embeddings of layers and experts.
"""

from typing import Any

import torch
from torch import Tensor, nn

from quintet.interface.weights import Weight
from quintet.layers.attention.attention import AttentionSizes, SelfAttention, SharedKVAttention
from quintet.layers.build import BuildContext, Layer, replicated, vector_weight
from quintet.layers.decoder import layer_window, refuse, require
from quintet.layers.gemma.altup import Streams
from quintet.layers.gemma.per_layer_inputs import PerLayerCausalLM, PerLayerTrunk, ValueNormAttention, attention_layers
from quintet.layers.layer_state import StepState
from quintet.layers.linear import column_parallel
from quintet.layers.mlp import GatedMLP
from quintet.layers.moe.moe import ExpertRouter, Experts, MoESizes, router, unstacked
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary


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


class Gemma4Router(Layer):
    """Chooses each token's experts by what a norm of its own returns, and weighs them by factors of the experts."""

    def __init__(self, build: BuildContext, sizes: MoESizes, eps: float) -> None:
        super().__init__(build, "rms_norm", "scale", "scale_rows", "take_rows")
        self._build, self._sizes, self._eps, self._shrink = build, sizes, eps, sizes.hidden**-0.5
        self.gate = router(build, sizes.hidden, "proj", sizes.experts)
        self.choice = ExpertRouter(build, sizes)
        self.scale: Tensor
        self.per_expert_scale: Tensor

    def weights(self, path: str) -> list[Weight]:
        build = self._build
        factors = vector_weight(build, f"{path}.per_expert_scale", self._sizes.experts, torch.float32)
        return [vector_weight(build, f"{path}.scale", self._sizes.hidden), factors]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> weights [T, k] float32 and ids [T, k] int32 of each token's experts."""
        normed = self.ops.scale(self.ops.rms_norm(x, self.scale, self._eps, 0.0), self._shrink)
        weights, ids = self.choice(self.gate(normed))
        factors = self.ops.take_rows(self.per_expert_scale[:, None], ids.flatten())
        return self.ops.scale_rows(weights.reshape(-1, 1), factors).reshape(weights.shape), ids


class Gemma4DecoderLayer(nn.Module):
    """Norms before and after each branch: attention, a feed-forward (perhaps with experts), the layer's embeddings."""

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
        self._comm, self.sums_over_ranks = build.comm, getattr(config, "enable_moe_block", False)  # experts' shares
        if self.sums_over_ranks:
            count, width = config.num_experts, config.moe_intermediate_size
            sizes = MoESizes(hidden, width, count, config.top_k_experts, kind, renormalize=True)
            self.router = Gemma4Router(build, sizes, eps)
            self.experts = Experts(build, (hidden, width), kind, [f"experts.{expert}" for expert in range(count)])
            self.pre_feedforward_layernorm_2 = RMSNorm(build, hidden, eps)
            self.post_feedforward_layernorm_1 = RMSNorm(build, hidden, eps)
            self.post_feedforward_layernorm_2 = RMSNorm(build, hidden, eps)
        if inner:
            self.into = column_parallel(build, hidden, {"per_layer_input_gate": replicated(inner, build.size)})
            self.back = column_parallel(build, inner, {"per_layer_projection": replicated(hidden, build.size)})
            self.post_per_layer_input_norm = RMSNorm(build, hidden, eps)

    def forward(self, streams: Streams, own: Tensor | None, cache: StepState) -> Streams:
        (x,), ops = streams, self._ops
        attended = self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), cache))
        normed, x = self.pre_feedforward_layernorm(attended, x)
        fed = self.mlp(normed)
        if self.sums_over_ranks:
            share = self.experts(self.pre_feedforward_layernorm_2(x), *self.router(x))
            chosen = self.post_feedforward_layernorm_2(self._comm.all_reduce(share))
            fed = ops.add(self.post_feedforward_layernorm_1(fed), chosen)
        x = ops.add(self.post_feedforward_layernorm(fed), x)
        if own is not None:
            gated = ops.gated(ops.beside(self.into(x), own), self._kind)
            x = ops.add(self.post_per_layer_input_norm(self.back(gated)), x)
        return (self.layer_scalar(x),)


class Gemma4Model(PerLayerTrunk):
    """Gemma 4's layers; rows of media have the layer embeddings of the padding token."""

    pads_rows = True

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(
            config, build, [Gemma4DecoderLayer(config, build, each) for each in _attentions(config, build)]
        )


def layer_entries(config: Any) -> list[dict[str, Any]]:
    """Returns the entries of each layer, of which some have others than the model."""
    entries = config.to_dict()  # transformers' own object has an entry that differs between layers in no attribute
    overrides = entries.get("per_layer_config") or {}
    return [{**entries, **overrides.get(str(index), {})} for index in range(len(config.layer_types))]


def make_rotaries(config: Any, build: BuildContext) -> dict[str, Rotary]:
    """Makes the rotary positions of each kind of layer."""
    kinds, own, trained = config.layer_types, layer_entries(config), config.max_position_embeddings
    dims = {kind: own[kinds.index(kind)]["head_dim"] for kind in sorted(set(kinds))}
    return {kind: Rotary(build, dim, config.rope_parameters[kind], trained) for kind, dim in dims.items()}


def _attentions(config: Any, build: BuildContext) -> list[nn.Module]:
    kinds, eps, bias = config.layer_types, config.rms_norm_eps, config.attention_bias
    own, rotaries = layer_entries(config), make_rotaries(config, build)

    def sizes(index: int) -> AttentionSizes:
        keys_are_values = config.attention_k_eq_v and kinds[index] == "full_attention"
        return AttentionSizes(
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=own[index]["num_key_value_heads"],
            head_dim=own[index]["head_dim"],
            scale=1.0,
            window=layer_window(config, index),
            ahead=kinds[index] == "sliding_attention",
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

    unstacked = staticmethod(unstacked)

    def __init__(self, config: Any, build: BuildContext) -> None:
        if build.causal and getattr(config, "use_bidirectional_attention", None) == "all":
            refuse(config, "use_bidirectional_attention")
        if build.row_store is not None and getattr(config, "hidden_size_per_layer_input", None):
            require(config, {"pad_token_id": 0})  # Gemma4Model.pads_rows
        super().__init__(config, build, Gemma4Model(config, build))
