"""Mistral Large 4's text model (Mistral AI 2026): sparse latent attention, queries that grow with the length."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quintet.interface.weights import CheckpointSlice, Weight
from quintet.layers.attention.indexer import IndexerSizes, TokenIndexer
from quintet.layers.attention.mla import LatentAttention, MLASizes
from quintet.layers.build import BuildContext, Layer, Shards, even_shards, replicated, vector_weight
from quintet.layers.layer_state import StepState
from quintet.layers.moe.moe import MoESizes
from quintet.layers.norm import LayerNorm
from quintet.layers.rope import RopeLengths, Rotary, frequencies
from quintet.layers.weight_transform import TransformedTensor
from quintet.models.deepseek_v32 import DeepseekV32ForCausalLM

ALPHA, TABLE = "model.rotary_emb.alpha", "model.rotary_emb.table"
ROOTS = {
    "tok_embeddings": "model.embed_tokens", "output": "lm_head", "lerope": "model.rotary_emb", "norm": "model.norm",
}  # fmt: skip
RENAMED = {  # within layers: of Mistral's files -> of transformers' modules
    ".attention.": ".self_attn.", ".wq.": ".q_proj.", ".wkv_a_with_mqa.": ".kv_a_proj_with_mqa.",
    ".wkv_b.": ".kv_b_proj.", ".wo.": ".o_proj.", ".attention_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.", ".kv_a_norm.": ".kv_a_layernorm.", ".feed_forward.": ".mlp.",
    ".gate.": ".mlp.gate.", ".experts.": ".mlp.experts.", ".shared_experts.": ".mlp.shared_experts.",
    ".ssmax_scaling.s": ".softmax_scaling.scale", ".ssmax_scaling.b": ".softmax_scaling.bias",
    ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj.",
}  # fmt: skip


class LearnedRotary(Rotary):
    """Neighbours turned, at frequencies times the exponential of a learned number each (LeRoPE)."""

    def constants(self) -> dict[str, Tensor]:
        return {}

    def weights(self, path: str) -> list[Weight]:
        shape, build = (self._lengths.served, self.dim), self._build
        part = CheckpointSlice(TABLE, shape, replicated(shape[0], build.size).ranges)
        return [Weight("table", (part,), 0, build.rank, torch.float32, "vector")]

    def __init__(self, build: BuildContext, config: Any) -> None:
        dim, trained = config.qk_rope_head_dim, config.max_position_embeddings
        super().__init__(build, dim, config.rope_parameters, trained, interleaved=True)
        self._build = build

    def table_of(self, alpha: Tensor) -> Tensor:
        """alpha [dim / 2] -> the table [served, dim] float32: cosines, then sines."""
        waves, scale = frequencies(self.dim, self._scaling, self._lengths)
        angles = torch.arange(self._lengths.served, dtype=torch.float32)[:, None] * (waves * alpha.float().exp())
        return torch.cat([angles.cos() * scale, angles.sin() * scale], dim=-1)

    @property
    def lengths(self) -> RopeLengths:
        """Lengths of the table, in tokens."""
        return self._lengths


class LengthScaling(Layer):
    """q [T, H, D], each head times a learned linear function of the logarithm of the tokens that it sees."""

    def __init__(self, build: BuildContext, heads: Shards) -> None:
        super().__init__(build, "scale_by_length")
        self._build, self._heads = build, heads
        self.scale: Tensor
        self.bias: Tensor

    def weights(self, path: str) -> list[Weight]:
        return [vector_weight(self._build, f"{path}.{name}", self._heads, torch.float32) for name in ("scale", "bias")]

    def forward(self, q: Tensor, cache: StepState) -> Tensor:
        grown: Tensor = self.ops.scale_by_length(q, cache.batch.positions, self.scale, self.bias)
        return grown


class MistralIndexer(TokenIndexer):
    """Its queries are made of the layer's input, normalised, and grow with the length."""

    def __init__(self, build: BuildContext, sizes: IndexerSizes, rotary: Rotary | None) -> None:
        super().__init__(build, sizes, rotary)
        self.q_input_norm = LayerNorm(build, sizes.hidden, sizes.eps)
        self.softmax_scaling = LengthScaling(build, replicated(sizes.n_heads, build.size))

    def forward(self, x: Tensor, latents: Tensor, cache: StepState) -> Tensor:
        return super().forward(x, self.q_input_norm(x), cache)

    def turned(self, q: Tensor, k: Tensor, cache: StepState) -> tuple[Tensor, Tensor]:
        return super().turned(self.softmax_scaling(q, cache), k, cache)


class MistralLarge4Attention(LatentAttention):
    """Latent attention whose queries grow with the length; where `source` is a layer before, over what that keeps."""

    def __init__(
        self,
        build: BuildContext,
        shape: MLASizes,
        rotary: Rotary | None,
        chosen: int = 0,
        indexer: TokenIndexer | None = None,
    ) -> None:
        super().__init__(build, shape, rotary, chosen, indexer)
        self.softmax_scaling = LengthScaling(build, even_shards(shape.heads, build.size))

    def queries(self, x: Tensor, first: Tensor, cache: StepState) -> tuple[Tensor, Tensor | None]:
        if self.indexer is not None:
            cache.chosen = self.indexer(x, x, cache)
        by_head = first.reshape(len(x), self._heads, -1)
        return self.softmax_scaling(by_head, cache).reshape(first.shape), None


class MistralLarge4ForCausalLM(DeepseekV32ForCausalLM):
    """Pre-norm blocks with DeepSeek-V3.2's attention; some layers have no positions, and logits are capped."""

    latent_attention = MistralLarge4Attention
    computed: ClassVar[Mapping[str, Any]] = {}
    gathered_from = (ALPHA,)
    recordable = False  # torch scales queries by length

    def __init__(self, config: Any, build: BuildContext) -> None:
        if list(config.kv_source_layers) != list(range(config.num_hidden_layers)):
            raise ValueError(
                f"{config.model_type} with layers that read another's KV cache (kv_source_layers "
                f"{config.kv_source_layers}) is not supported"
            )
        if config.n_group > 1:
            raise ValueError(f"{config.model_type} with n_group={config.n_group} is not supported; it has 1")
        super().__init__(config, build)
        self.ignored_tensors = (*self.ignored_tensors, r"mtp_dspark\..*")
        self._ops, self._cap = build.ops.take("softcap"), config.final_logit_softcapping

    def head(self, x: Tensor) -> Tensor:
        """With logits within the cap."""
        capped: Tensor = self._ops.softcap(super().head(x), self._cap)
        return capped

    def _rotary(self, config: Any, build: BuildContext) -> Rotary:
        self._learned = LearnedRotary(build, config)
        return self._learned

    def _attention(self, config: Any, build: BuildContext, index: int, rotary: Rotary | None) -> nn.Module:
        chosen, indexer, shape = config.index_topk if self._sparse else 0, None, MLASizes.from_config(config)
        shape = replace(shape, eps=config.rms_norm_eps)
        if not config.no_rope_layers[index]:
            whole = shape.qk_nope_head_dim + shape.qk_rope_head_dim
            rotary, shape = None, replace(shape, qk_nope_head_dim=whole, qk_rope_head_dim=0)
        if self._sparse and self._indexers(config)[index] == "full":
            hidden, heads, dim = config.hidden_size, config.index_n_heads, config.index_head_dim
            indexer = MistralIndexer(build, IndexerSizes(hidden, hidden, heads, dim, chosen), rotary)
        return self.latent_attention(build, shape, rotary, chosen, indexer)

    @staticmethod
    def mixture(config: Any) -> MoESizes:
        return MoESizes(
            hidden=config.hidden_size,
            width=config.moe_intermediate_size,
            experts=config.n_routed_experts,
            top_k=config.num_experts_per_tok,
            activation=config.hidden_act,
            renormalize=True,
            scale=config.routed_scaling_factor,
            fp32_router=True,
            shared=config.moe_intermediate_size * (config.n_shared_experts or 0),
        )

    @classmethod
    def canonical(cls, name: str) -> str:
        """Published files have Mistral's own names."""
        root, _, rest = name.partition(".")
        if root in ROOTS:
            return f"{ROOTS[root]}.{rest}"
        if root != "layers":
            return name
        for theirs, ours in RENAMED.items():
            name = name.replace(theirs, ours, 1)
        return f"model.{name}"

    def gathered(self, entries: Mapping[str, Any]) -> Mapping[str, Any]:
        """The table of angles in the place of what the model has learned of them."""
        if ALPHA not in entries:
            return entries
        shape = self._learned.lengths.served, self._learned.dim
        made = TransformedTensor(entries[ALPHA], self._learned.table_of, new_shape=shape)
        return {**{name: entry for name, entry in entries.items() if name != ALPHA}, TABLE: made}
