"""The indexer of DeepSeek sparse attention: it chooses the tokens that each token sees (DeepSeek-V3.2 2025, GLM-5)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quintet.interface.types import TokenChoiceSpec
from quintet.interface.weights import CheckpointSlice, Weight
from quintet.layers.build import BuildContext, Layer, replicated
from quintet.layers.layer_state import StepState
from quintet.layers.linear import column_parallel
from quintet.layers.moe.moe import router
from quintet.layers.norm import LayerNorm
from quintet.layers.rope import Rotary


@dataclass(frozen=True)
class IndexerSizes:
    """Sizes under the names of the configs, without "index_"."""

    hidden: int
    q_lora_rank: int
    n_heads: int
    head_dim: int
    topk: int
    eps: float = 1e-6  # of the keys' norm
    turns_last: bool = False  # the last features of q and of the key are turned, not the first
    fp32_weights: bool = False  # the weights of heads are a product in float32
    pool: int = 0  # tokens in a row that are chosen together; 0: each by itself

    @classmethod
    def from_config(cls, config: Any) -> "IndexerSizes":
        return cls(
            config.hidden_size, config.q_lora_rank, config.index_n_heads, config.index_head_dim, config.index_topk
        )


class TokenIndexer(nn.Module):
    """x [T, hidden] and the queries' latents [T, q_lora_rank] -> places [T, C] (see the op choose_tokens).

    The scale of scores is part of the weights of heads, which max(0, ...) does not change. `rotary` turns the first
    features of q and of the key. Every rank has all of it.
    """

    def __init__(self, build: BuildContext, sizes: IndexerSizes, rotary: Rotary | None) -> None:
        super().__init__()
        self._sizes, self.rotary = sizes, rotary

        def product(inputs: int, name: str, outputs: int) -> nn.Module:
            return column_parallel(build, inputs, {name: replicated(outputs, build.size)})

        self.queries = product(sizes.q_lora_rank, "wq_b", sizes.n_heads * sizes.head_dim)
        self.keys = product(sizes.hidden, "wk", sizes.head_dim)
        self.head_weights = (
            router(build, sizes.hidden, "weights_proj", sizes.n_heads, fp32=True)
            if sizes.fp32_weights
            else product(sizes.hidden, "weights_proj", sizes.n_heads)
        )
        self.k_norm = LayerNorm(build, sizes.head_dim, sizes.eps)
        self._ops = build.ops.take("beside")
        width = sizes.head_dim * (2 if sizes.pool else 1)
        self.mixing = build.make_mixer(TokenChoiceSpec(width, sizes.topk, build.dtype, build.page_size, sizes.pool))
        self.mixing.kv_heads = 1

    def forward(self, x: Tensor, latents: Tensor, cache: StepState) -> Tensor:
        sizes, tokens = self._sizes, x.shape[0]
        q = self.queries(latents).reshape(tokens, sizes.n_heads, sizes.head_dim)
        q, k = self.turned(q, self.k_norm(self.keys(x))[:, None], cache)
        weights = self.head_weights(x).float() * (sizes.n_heads * sizes.head_dim) ** -0.5
        return self.choose(x, (q, weights, k), cache)

    def choose(self, x: Tensor, given: tuple[Tensor, Tensor, Tensor], cache: StepState) -> Tensor:
        """Writes the keys of the step's tokens, and chooses; given: q, weights of heads, and k."""
        return self.mixing.run_state_op(cache, *given)

    def turned(self, q: Tensor, k: Tensor, cache: StepState) -> tuple[Tensor, Tensor]:
        """q [T, H, D] and k [T, 1, D] with their positions. Where the last features are turned, they come to stand
        before the others, in both: scores do not depend on the order of features."""
        if self.rotary is None:
            return q, k
        if not self._sizes.turns_last:
            turned: tuple[Tensor, Tensor] = self.rotary(q, k, cache.batch.positions)
            return turned
        plain = self._sizes.head_dim - self.rotary.dim
        last = self.rotary(q[..., plain:], k[..., plain:], cache.batch.positions)
        q, k = (
            self._ops.beside(rotated.flatten(0, 1), x[..., :plain].flatten(0, 1)).reshape(x.shape)
            for rotated, x in zip(last, (q, k), strict=True)
        )
        return q, k


class PoolOffsets(Layer):
    """A number for each token of a pool and each feature of its key (see the op choose_pools)."""

    def __init__(self, build: BuildContext, pool: int, width: int) -> None:
        super().__init__(build)
        self._build, self._shape = build, (pool, width)
        self.offsets: Tensor

    def weights(self, path: str) -> list[Weight]:
        part = CheckpointSlice(path, self._shape, replicated(self._shape[0], self._build.size).ranges)
        return [Weight("offsets", (part,), 0, self._build.rank, torch.float32, "vector")]


class PoolIndexer(TokenIndexer):
    """An indexer that chooses whole pools of tokens, by a key of each that gates make of those of its tokens."""

    def __init__(self, build: BuildContext, sizes: IndexerSizes, rotary: Rotary | None) -> None:
        super().__init__(build, sizes, rotary)
        outputs = {"index_kpool_compress_gate": replicated(sizes.head_dim, build.size)}
        self.gates = column_parallel(build, sizes.hidden, outputs)
        self.index_kpool_compress_ape = PoolOffsets(build, sizes.pool, sizes.head_dim)

    def choose(self, x: Tensor, given: tuple[Tensor, Tensor, Tensor], cache: StepState) -> Tensor:
        q, weights, k = given
        both = self._ops.beside(k[:, 0], self.gates(x))[:, None]
        return self.mixing.run_state_op(cache, q, weights, both, self.index_kpool_compress_ape.offsets)
