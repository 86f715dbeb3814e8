"""EAGLE heads (Li et al. 2024; EAGLE-3, 2025; P-EAGLE, 2026): Llama's layers on another model's hidden states."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from quintet.interface.weights import Weight
from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext, Layer, split_heads, vector_weight
from quintet.layers.decoder import norm_eps
from quintet.layers.layer_state import StepState
from quintet.layers.linear import row_parallel
from quintet.layers.mlp import GatedMLP
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary
from quintet.models.draft_heads.base import DraftHead, fusion, norm_heads


class EagleHead(DraftHead):
    """EAGLE-1 and 2: the embedding of a token and the normalised hidden state of the token before it, joined by a
    product, go through layers of which the first has no norm before its attention. The end is not normalised."""

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        rotary = Rotary.from_config(build, config)
        self.fc = fusion(build, "fc", 2 * config.hidden_size, config.hidden_size, config.fusion_bias)
        self.layers = nn.ModuleList(EagleLayer(config, build, i, rotary) for i in range(config.num_hidden_layers))

    def combine(self, states: Tensor, places: Tensor | None) -> Tensor:
        out: Tensor = self._borrowed[1](states)
        return out

    def hidden_states(self, embeds: Tensor, hidden: Tensor, cache: StepState) -> tuple[Tensor, Tensor]:
        x = self.fc(self._ops.beside(embeds, hidden))
        for layer in self.layers:
            x = layer(x, cache)
        x = self.rows(x, cache)
        return x, x


class EagleLayer(nn.Module):
    """Llama's layer; the first has no norm before its attention."""

    def __init__(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> None:
        super().__init__()
        eps, bias = norm_eps(config), getattr(config, "attention_bias", False)
        self._ops = build.ops.take("add")
        self.input_layernorm = RMSNorm(build, config.hidden_size, eps) if index else None
        self.self_attn = SelfAttention(build, AttentionSizes.from_config(config, bias=bias, output_bias=bias), rotary)
        norm_heads(self.self_attn, config, build)
        self.post_attention_layernorm = RMSNorm(build, config.hidden_size, eps)
        self.mlp = GatedMLP(build, config.hidden_size, config.intermediate_size, config.hidden_act)

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        y = self.self_attn(x if self.input_layernorm is None else self.input_layernorm(x), cache)
        y, x = self.post_attention_layernorm(y, x)
        out: Tensor = self._ops.add(self.mlp(y), x)
        return out


class Eagle3Head(DraftHead):
    """EAGLE-3: hidden states of three layers, joined by a product, go beside the token's embedding through one layer,
    and those of P-EAGLE through more; logits are over a part of the vocabulary."""

    renamed_tensors = {"layers.0.": "midlayer."}

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        self.fc = fusion(build, "fc", config.num_taps * config.hidden_size, config.hidden_size, config.fusion_bias)
        rotary = Rotary.from_config(build, config)
        self.midlayer = Eagle3Layer(config, build, rotary)
        later = range(1, config.num_hidden_layers)
        self.layers = nn.ModuleDict({str(index): EagleLayer(config, build, index, rotary) for index in later})
        self.norm = RMSNorm(build, config.hidden_size, norm_eps(config))

    def combine(self, states: Tensor, places: Tensor | None) -> Tensor:
        out: Tensor = self.fc(states)
        return out

    def hidden_states(self, embeds: Tensor, hidden: Tensor, cache: StepState) -> tuple[Tensor, Tensor | None]:
        x, residual = self.midlayer(embeds, hidden, cache)
        if self.layers:
            x = self._ops.add(x, residual)
            for layer in self.layers.values():
                x = layer(x, cache)
            x = self.rows(x, cache)
            return self.norm(x), x
        normalized, following = self.norm(self.rows(x, cache), self.rows(residual, cache))
        return normalized, following


class PEagleHead(Eagle3Head):
    """P-EAGLE: drafts after the first are drawn at mask tokens, all in one step; a learned row stands for the hidden
    states that there are none of yet."""

    drafts_block = True

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        self._ops = build.ops.take("take_rows", "beside", "add", "place_rows")
        self.mask_hidden = LearnedRow(build, config.num_taps * config.hidden_size)

    @staticmethod
    def unstacked(name: str, shape: Sequence[int]) -> Mapping[str, tuple[Any, ...]]:
        """The row is of three axes there."""
        return {name: (0,) * (len(shape) - 1)} if name == "mask_hidden" and len(shape) > 1 else {}

    def combine(self, states: Tensor, places: Tensor | None) -> Tensor:
        assert places is not None, "a block's step says which rows are masks"
        return super().combine(self._ops.place_rows(states, self.mask_hidden.row[None], places), places)

    def hidden_states(self, embeds: Tensor, hidden: Tensor, cache: StepState) -> tuple[Tensor, Tensor | None]:
        return super().hidden_states(embeds, hidden, cache)[0], None


class LearnedRow(Layer):
    """A row that stands for the hidden states of a mask token."""

    def __init__(self, build: BuildContext, width: int) -> None:
        super().__init__(build)
        self._build, self._width = build, width
        self.row: Tensor

    def weights(self, path: str) -> list[Weight]:
        return [vector_weight(self._build, path, self._width, name="row")]


class Eagle3Layer(nn.Module):
    """Llama's layer with queries, keys and values of the embedding and the hidden state side by side."""

    def __init__(self, config: Any, build: BuildContext, rotary: Rotary | None) -> None:
        super().__init__()
        width, eps, bias = config.hidden_size, norm_eps(config), getattr(config, "attention_bias", False)
        self._ops, self._norm_before_residual = build.ops.take("beside"), config.norm_before_residual
        self.input_layernorm, self.hidden_norm = RMSNorm(build, width, eps), RMSNorm(build, width, eps)
        sizes = AttentionSizes.from_config(config, bias=bias, output_bias=bias)
        self.self_attn = SelfAttention(build, replace(sizes, hidden=2 * width), rotary)
        norm_heads(self.self_attn, config, build)
        queries, _ = split_heads(sizes.heads, sizes.kv_heads, build.size)
        self.self_attn.out = row_parallel(build, queries.times(sizes.head_dim), (sizes.output, width), bias)
        self.post_attention_layernorm = RMSNorm(build, width, eps)
        self.mlp = GatedMLP(build, width, config.intermediate_size, config.hidden_act)

    def forward(self, embeds: Tensor, hidden: Tensor, cache: StepState) -> tuple[Tensor, Tensor]:
        """[T, H] each -> its last branch, and the residual."""
        normalized = self.hidden_norm(hidden)
        residual = normalized if self._norm_before_residual else hidden
        x = self.self_attn(self._ops.beside(self.input_layernorm(embeds), normalized), cache)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual
