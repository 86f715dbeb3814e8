"""Gemma 3n (Google 2025), the text model: four streams (AltUp), and embeddings of each layer's own."""

from typing import Any

from torch import Tensor, nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention, SharedKVAttention
from quintet.layers.build import BuildContext, replicated
from quintet.layers.decoder import layer_window
from quintet.layers.gemma.altup import AltUp, AltUpProjections, AltUpSizes, SparseMLP, Streams
from quintet.layers.gemma.per_layer_inputs import (
    HALF,
    PerLayerCausalLM,
    PerLayerTrunk,
    ValueNormAttention,
    attention_layers,
)
from quintet.layers.layer_state import StepState
from quintet.layers.linear import column_parallel
from quintet.layers.mlp import GatedMLP
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary


class Laurel(nn.Module):
    """x plus a product of low rank, normalised (LAuReL; Menghani et al. 2024)."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__()
        hidden, rank, size = config.hidden_size, config.laurel_rank, build.size
        self.left = column_parallel(build, hidden, {"linear_left": replicated(rank, size)})
        self.right = column_parallel(build, rank, {"linear_right": replicated(hidden, size)})
        self.post_laurel_norm = RMSNorm(build, hidden, config.rms_norm_eps)
        self._ops = build.ops.take("add")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self._ops.add(self.post_laurel_norm(self.right(self.left(x))), x)
        return out


class Gemma3nDecoderLayer(nn.Module):
    """Streams and the layer's own embeddings [T, P] -> streams."""

    def __init__(self, config: Any, build: BuildContext, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        hidden, eps, inner = config.hidden_size, config.rms_norm_eps, config.hidden_size_per_layer_input
        self._active = config.altup_active_idx
        self.altup = AltUp(
            build, AltUpSizes(hidden, config.altup_num_inputs, self._active, eps, config.altup_correct_scale)
        )
        self.laurel = Laurel(config, build)
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm = RMSNorm(build, hidden, eps)
        self.post_attention_layernorm = RMSNorm(build, hidden, eps)
        self.pre_feedforward_layernorm = RMSNorm(build, hidden, eps)
        self.post_feedforward_layernorm = RMSNorm(build, hidden, eps)
        self.into = column_parallel(build, hidden, {"per_layer_input_gate": replicated(inner, build.size)})
        self.back = column_parallel(build, inner, {"per_layer_projection": replicated(hidden, build.size)})
        self.post_per_layer_input_norm = RMSNorm(build, hidden, eps)
        self._ops, self._kind = build.ops.take("add", "scale", "beside", "gated"), config.hidden_activation

    def forward(self, streams: Streams, own: Tensor | None, cache: StepState) -> Streams:
        ops, predicted = self._ops, self.altup.predict(streams)
        normed = self.input_layernorm(predicted[self._active])
        x = ops.add(self.post_attention_layernorm(self.self_attn(normed, cache)), predicted[self._active])
        x = ops.scale(ops.add(x, self.laurel(normed)), HALF)
        x = ops.add(self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x))), x)
        (first, *others), scaled = self.altup.correct(predicted, x)
        gated = ops.gated(ops.beside(self.into(scaled), own), self._kind)
        more = self.post_per_layer_input_norm(self.back(gated))
        return (first, *(ops.add(each, more) for each in others))


class Gemma3nModel(PerLayerTrunk):
    """A step -> normalised hidden states of its rows."""

    first_stage = (*PerLayerTrunk.first_stage, "altup_projections")
    last_stage = ("altup_unembed_projections", *PerLayerTrunk.last_stage)

    def __init__(self, config: Any, build: BuildContext) -> None:
        if build.requested_outputs.aux_hidden_states:
            raise ValueError("gemma3n's layers have several streams: no taps of them are given")
        if config.altup_active_idx >= config.altup_num_inputs:
            raise ValueError(
                f"altup_active_idx is {config.altup_active_idx}, and there are {config.altup_num_inputs} streams "
                "(altup_num_inputs); correct config.json"
            )
        super().__init__(config, build, _layers(config, build))
        self.num_streams = config.altup_num_inputs

        def products() -> nn.ModuleList:
            hidden, outputs = config.hidden_size, replicated(config.hidden_size, build.size)
            return nn.ModuleList(column_parallel(build, hidden, {str(i): outputs}) for i in range(self.num_streams - 1))

        self.altup_projections, self.altup_unembed_projections = products(), products()
        self._apart = AltUpProjections(build, self.altup_projections)
        self._together = AltUpProjections(build, self.altup_unembed_projections)

    def expand(self, x: Tensor) -> Streams:
        return self._apart.expand(x)

    def merge(self, streams: Streams) -> Tensor:
        return self._together.merge(streams)


def _layers(config: Any, build: BuildContext) -> list[nn.Module]:
    kinds, eps, size = config.layer_types, config.rms_norm_eps, config.head_dim
    rotaries = {
        kind: Rotary(build, size, config.rope_parameters[kind], config.max_position_embeddings)
        for kind in sorted(set(kinds))
    }

    def sizes(index: int) -> AttentionSizes:
        window, bias = layer_window(config, index), config.attention_bias
        return AttentionSizes.from_config(config, scale=1.0, window=window, bias=bias, output_bias=bias)

    def own(index: int) -> ValueNormAttention:
        made = ValueNormAttention(build, sizes(index), rotaries[kinds[index]])
        made.q_norm, made.k_norm = RMSNorm(build, size, eps), RMSNorm(build, size, eps)
        made.v_norm = RMSNorm(build, size, eps, has_weight=False)
        return made

    def shared(index: int, source: SelfAttention) -> SharedKVAttention:
        return SharedKVAttention(build, sizes(index), rotaries[kinds[index]], source, RMSNorm(build, size, eps))

    def mlp(index: int) -> nn.Module:
        width, sparsity = config.intermediate_size[index], config.activation_sparsity_pattern[index]
        if sparsity > 0:
            return SparseMLP(build, (config.hidden_size, width), config.hidden_activation, sparsity)
        return GatedMLP(build, config.hidden_size, width, config.hidden_activation)

    attentions = attention_layers(config, own, shared)
    return [Gemma3nDecoderLayer(config, build, each, mlp(index)) for index, each in enumerate(attentions)]


class Gemma3nForCausalLM(PerLayerCausalLM):
    """Gemma 3n's text model."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build, Gemma3nModel(config, build))
        if not config.altup_correct_scale:
            self.ignored_tensors = (*self.ignored_tensors, r"model\.layers\.\d+\.altup\.correct_output_scale")
