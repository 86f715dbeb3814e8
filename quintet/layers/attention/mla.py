"""Latent attention (MLA; DeepSeek-V2 2024, section 2.1): what is kept of a token is one latent, for all heads.

Its products are absorbed: q goes through the keys' weights and what attention gives through the values', so that steps
read the latents as they are kept, as K of one head that begins with V. Prompts take the same way as single
tokens, because the plain form (K and V of each head, made of the latents) rounds otherwise, and no rule says which
tokens may take it. A token that is decoded cannot: K and V of all before it would be made anew for it alone. And what
was decoded stands in prompts later, where a request is preempted or the next turn of a talk finds its pages cached: a
token's bits would depend on what brought it. docs/performance.md says what that leaves unused.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from quintet.interface.types import AttentionSpec
from quintet.interface.weights import CheckpointSlice, Weight
from quintet.layers.attention.attention import Sinks
from quintet.layers.attention.indexer import TokenIndexer
from quintet.layers.build import BuildContext, Layer, Shards, even_shards, replicated
from quintet.layers.layer_state import StepState
from quintet.layers.linear import column_parallel, row_parallel
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary


@dataclass(frozen=True)
class MLASizes:
    """The whole layer's sizes, before its heads are shared out over ranks."""

    hidden: int
    heads: int
    qk_nope_head_dim: int  # features of a head's q and k that are not turned
    qk_rope_head_dim: int  # that are; of k, all heads' are the same
    v_head_dim: int  # features of a head's v
    kv_lora_rank: int  # of the latent that k and v are made of
    q_lora_rank: int | None  # of the latent that q is made of; None: there is none
    scale: float
    bias: bool
    sinks: bool = False  # a logit of each head joins its softmax
    eps: float = 1e-6  # of the norms inside, whatever the config has for the others

    @classmethod
    def from_config(cls, config: Any) -> "MLASizes":
        """Under the names of DeepSeek's configs; ValueError for what is not computed."""
        low = getattr(config, "q_lora_rank", None)
        if config.attention_bias and low is None:
            raise ValueError(f"{config.model_type} with attention_bias and without q_lora_rank is not supported")
        plain, turned = config.qk_nope_head_dim, config.qk_rope_head_dim
        return cls(
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            qk_nope_head_dim=plain,
            qk_rope_head_dim=turned,
            v_head_dim=config.v_head_dim,
            kv_lora_rank=config.kv_lora_rank,
            q_lora_rank=low,
            scale=(plain + turned) ** -0.5 * temperature(getattr(config, "rope_parameters", None) or {}),
            bias=config.attention_bias,
        )


def temperature(rope: Mapping[str, Any]) -> float:
    """Returns the factor of scores where positions are scaled (YaRN's mscale_all_dim, squared: for q and for k)."""
    kind, every = rope.get("rope_type", "default"), rope.get("mscale_all_dim")
    if kind == "default" or not every or rope["factor"] <= 1:
        return 1.0
    return float(0.1 * every * math.log(rope["factor"]) + 1.0) ** 2


class LatentAttention(nn.Module):
    """x [T, hidden] -> [T, hidden]. Each rank keeps the whole latent, and some of the heads."""

    def __init__(
        self,
        build: BuildContext,
        shape: MLASizes,
        rotary: Rotary | None,
        chosen: int = 0,
        indexer: TokenIndexer | None = None,
    ) -> None:
        """`rotary` None: nothing is turned (NoPE). `chosen`: tokens that one sees at most, by the indexer or, without
        one, by that of a layer before; 0: all."""
        super().__init__()
        self._chosen, self.indexer = chosen, indexer
        if shape.heads < build.size:
            raise ValueError(
                f"{build.size} ranks cannot share {shape.heads} attention heads: a rank would have none; "
                f"lower tensor_parallel_size to {shape.heads} or less"
            )
        queries = even_shards(shape.heads, build.size)
        self._shape, self._heads, self.rotary = shape, queries.local(build.rank), rotary
        self._causal = build.causal
        each, latent = (
            shape.qk_nope_head_dim + shape.qk_rope_head_dim,
            replicated(shape.kv_lora_rank + shape.qk_rope_head_dim, build.size),
        )
        low = shape.q_lora_rank is not None
        first = {"q_a_proj": replicated(shape.q_lora_rank or 0, build.size)} if low else {"q_proj": queries.times(each)}
        self.inputs = column_parallel(build, shape.hidden, {**first, "kv_a_proj_with_mqa": latent}, shape.bias)
        self.q_a_layernorm = RMSNorm(build, shape.q_lora_rank, shape.eps) if shape.q_lora_rank is not None else None
        self.q = (
            column_parallel(build, shape.q_lora_rank, {"q_b_proj": queries.times(each)})
            if shape.q_lora_rank is not None
            else None
        )
        self.kv_a_layernorm = RMSNorm(build, shape.kv_lora_rank, shape.eps)
        self.absorbed = AbsorbedProjections(build, shape, queries)
        self.sinks = Sinks(build, queries) if shape.sinks else None
        self.out = row_parallel(build, queries.times(shape.v_head_dim), ("o_proj", shape.hidden), shape.bias)
        self._ops = build.ops.take("beside", "sigmoid_gate")
        self.mixing = build.make_mixer(
            AttentionSpec(
                heads=self._heads,
                kv_heads=1,
                head_dim=shape.kv_lora_rank + shape.qk_rope_head_dim,
                scale=shape.scale,
                dtype=build.dtype,
                page_size=build.page_size,
                kv_dtype=build.kv_dtype,
                sinks=shape.sinks,
                shared=shape.kv_lora_rank if build.causal else 0,
                chosen=chosen,
                causal=build.causal,
                source="self" if build.causal else "none",
            )
        )
        self.mixing.kv_heads = 1

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        out: Tensor = self.out(self.mix(x, cache))
        return out

    def queries(self, x: Tensor, first: Tensor, cache: StepState) -> tuple[Tensor, Tensor | None]:
        """The queries [T, H D] of what the first product gives, and gates of the outputs [T, H v_head_dim], if there
        are any. An indexer chooses by the latent that queries are made of."""
        if self.q is None or self.q_a_layernorm is None:
            return first, None
        latent = self.q_a_layernorm(first)
        if self.indexer is not None:
            cache.chosen = self.indexer(x, latent, cache)
        return self.q(latent), None

    def mix(self, x: Tensor, cache: StepState) -> Tensor:
        """x [T, hidden] -> the heads of what attention gives, [T, H v_head_dim]."""
        shape, tokens = self._shape, x.shape[0]
        both, wide = self.inputs(x), shape.kv_lora_rank + shape.qk_rope_head_dim
        first, latent, key = both.split([both.shape[1] - wide, shape.kv_lora_rank, shape.qk_rope_head_dim], dim=-1)
        made, gate = self.queries(x, first, cache)
        plain, query = made.reshape(tokens, -1, shape.qk_nope_head_dim + shape.qk_rope_head_dim).split(
            [shape.qk_nope_head_dim, shape.qk_rope_head_dim], dim=-1
        )
        if self.rotary is not None:
            query, key = self.rotary(query, key[:, None], cache.batch.positions)
        q, k = self.absorbed.project_queries(plain), self.kv_a_layernorm(latent)
        if shape.qk_rope_head_dim:
            q = self._ops.beside(q.reshape(-1, shape.kv_lora_rank), query.reshape(-1, shape.qk_rope_head_dim))
            k = self._ops.beside(k, key.reshape(tokens, -1))
        q, k = q.reshape(tokens, -1, wide), k[:, None]
        sinks = None if self.sinks is None else self.sinks.logits
        if self._chosen:
            assert cache.chosen is not None, "the first layer has an indexer"
            out = self.mixing.attend_chosen(q, k, cache.chosen, cache, sinks=sinks)
        elif self._causal:
            out = self.mixing(q, k, None, cache, sinks)
        else:  # nothing is cached: values are the latents of the keys
            out = self.mixing(q, k, k, cache, sinks)[..., : self._shape.kv_lora_rank]
        out = self.absorbed.project_values(out).reshape(tokens, -1)
        return out if gate is None else self._ops.sigmoid_gate(out, gate)


class AbsorbedProjections(Layer):
    """The weights that make k and v of a latent (kv_b_proj), head by head: applied to q, and to attention's outputs."""

    def __init__(self, build: BuildContext, shape: MLASizes, queries: Shards) -> None:
        super().__init__(build, "by_heads")
        self._build, self._shape, self._queries = build, shape, queries
        self.keys: Tensor
        self.of_values: Tensor

    def weights(self, path: str) -> list[Weight]:
        build, shape = self._build, self._shape
        module, each = path.rpartition(".")[0] + ".kv_b_proj", shape.qk_nope_head_dim + shape.v_head_dim
        ranges, total = self._queries.ranges[build.rank], shape.heads * each

        def stacked(name: str, use: str, first: int, size: int) -> Weight:
            parts = tuple(
                CheckpointSlice(
                    f"{module}.weight",
                    (size, shape.kv_lora_rank),
                    ((0, size),) * build.size,
                    head * each + first,
                    total=total,
                )
                for head in range(*ranges)
            )
            reader = build.quantization.reader(module)
            return Weight(name, parts, 0, build.rank, build.dtype, use, reader=reader, stack=len(parts))

        return [
            stacked("keys", "transposed heads", 0, shape.qk_nope_head_dim),
            stacked("of_values", "heads", shape.qk_nope_head_dim, shape.v_head_dim),
        ]

    def project_queries(self, q: Tensor) -> Tensor:
        """[T, H, plain] -> [T, H, rank]: a product of that with a latent is one of q with the latent's k."""
        inner: Tensor = self.ops.by_heads(q, self.keys, self._shape.kv_lora_rank, True)
        return inner

    def project_values(self, mixed: Tensor) -> Tensor:
        """Latents that were weighted and added up, [T, H, rank] -> [T, H, value]."""
        out: Tensor = self.ops.by_heads(mixed, self.of_values, self._shape.v_head_dim, False)
        return out
