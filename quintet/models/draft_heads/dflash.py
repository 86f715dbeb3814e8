"""DFlash heads (Chen et al. 2026): layers of Qwen3 that draft a block at once from another model's hidden states.

DSpark heads (DeepSeek-AI 2026) have them, too, and a table that makes each draft depend on the one before it.
"""

from typing import Any

from torch import Tensor, nn

from quintet.layers.attention.attention import AttentionSizes, SelfAttention
from quintet.layers.build import BuildContext, replicated
from quintet.layers.decoder import norm_eps
from quintet.layers.embedding import VocabParallelEmbedding
from quintet.layers.layer_state import StepState
from quintet.layers.linear import column_parallel
from quintet.layers.mlp import GatedMLP
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary
from quintet.models.draft_heads.base import DraftHead, fusion, norm_heads


class DFlashHead(DraftHead):
    """The last token and a mask for each draft see one another and the tokens before them, of which each layer has keys
    and values made of the model's hidden states."""

    drafts_block = starts_at_last_token = True

    def __init__(self, config: Any, build: BuildContext) -> None:
        super().__init__(config, build)
        width, eps, rotary = config.hidden_size, norm_eps(config), Rotary.from_config(build, config)
        self.fc = fusion(build, "fc", config.num_taps * width, width, config.fusion_bias)
        self.hidden_norm, self.norm = RMSNorm(build, width, eps), RMSNorm(build, width, eps)
        self.layers = nn.ModuleList(DFlashLayer(config, build, rotary) for _ in range(config.num_hidden_layers))

    def combine(self, states: Tensor, places: Tensor | None) -> Tensor:
        out: Tensor = self.hidden_norm(self.fc(states))
        return out

    def hidden_states(self, embeds: Tensor, hidden: Tensor, cache: StepState) -> tuple[Tensor, Tensor | None]:
        x, residual = embeds, None
        for layer in self.layers:
            x, residual = layer(x, residual, hidden, cache)
        assert residual is not None, "a head has layers"
        normalized, _ = self.norm(self.rows(x, cache), self.rows(residual, cache))
        return normalized, None


class DSparkHead(DFlashHead):
    """Each token adds a product of low rank to the logits of the one after it. Estimates of acceptance are ignored."""

    draws_in_turn = True
    ignored_tensors: tuple[str, ...] = (*DFlashHead.ignored_tensors, r"confidence_head\..*", r"mask_embedding")

    def __init__(self, config: Any, build: BuildContext) -> None:
        """`config`: with `markov_rank`."""
        super().__init__(config, build)
        rank, drawn = config.markov_rank, replicated(config.draft_vocab_size, build.size)
        self.markov_head = nn.Module()
        self.markov_head.markov_w1 = VocabParallelEmbedding(build, config.vocab_size, rank, is_replicated=True)
        self.markov_head.product = column_parallel(build, rank, {"markov_w2": drawn})

    def following(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        """logits [L, D] of the block, and the model's token before each [L] -> those to draw from."""
        return logits + self.markov_head.product(self.markov_head.markov_w1(token_ids))  # type: ignore[operator]


class DFlashLayer(nn.Module):
    """Qwen3's layer. Of the tokens before the block only the keys and values are read, by those of the block."""

    def __init__(self, config: Any, build: BuildContext, rotary: Rotary | None) -> None:
        super().__init__()
        width, eps, bias = config.hidden_size, norm_eps(config), getattr(config, "attention_bias", False)
        self._ops = build.ops.take("choose_rows")
        self.input_layernorm = RMSNorm(build, width, eps)
        sizes = AttentionSizes.from_config(config, bias=bias, output_bias=bias, causal=False)
        self.self_attn = SelfAttention(build, sizes, rotary)
        norm_heads(self.self_attn, config, build)
        self.post_attention_layernorm = RMSNorm(build, width, eps)
        self.mlp = GatedMLP(build, width, config.intermediate_size, config.hidden_act)

    def forward(self, x: Tensor, residual: Tensor | None, hidden: Tensor, cache: StepState) -> tuple[Tensor, Tensor]:
        """[T, H] each -> the last branch, and the residual."""
        x, residual = self.input_layernorm(x, residual)
        places = cache.batch.inputs.embed_indices
        assert places is not None, "a block's step says which rows are of tokens before it"
        x, residual = self.post_attention_layernorm(
            self.self_attn(self._ops.choose_rows(x, hidden, places), cache), residual
        )
        return self.mlp(x), residual
