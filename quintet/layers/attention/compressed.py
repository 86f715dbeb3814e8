"""Attention to a window and to compressed entries (DeepSeek-V4 2026, section 2.3): one K that is V, for all heads.

What a request keeps is not a row for each token: the rows of a window and what pools the tokens of an entry that is not
whole yet are a state of fixed size, and pages hold entries alone. docs/decisions.md says why.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quintet.interface.types import AttentionSpec, StateSpec, TokenChoiceSpec
from quintet.interface.weights import CheckpointSlice, Weight
from quintet.layers.attention.attention import Sinks
from quintet.layers.build import BuildContext, Layer, Shards, even_shards, replicated
from quintet.layers.layer_state import StepState
from quintet.layers.linear import column_parallel, row_parallel
from quintet.layers.norm import RMSNorm
from quintet.layers.quantization import QuantizationPlan
from quintet.layers.rope import Rotary
from quintet.ops.compressed.attention import WindowRows

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"


@dataclass(frozen=True)
class CompressedSizes:
    """The whole layer's sizes, before its heads are shared out over ranks."""

    hidden: int
    heads: int
    head_dim: int
    q_lora_rank: int  # of the latent that queries are made of
    groups: int  # of heads, in the product of outputs
    o_lora_rank: int  # outputs of each group
    window: int
    rate: int  # tokens of an entry; 0: there are none
    sparse: bool  # an indexer chooses entries, which overlap
    index_heads: int
    index_head_dim: int
    index_topk: int
    eps: float

    @classmethod
    def from_config(cls, config: Any, index: int) -> "CompressedSizes":
        kind = config.layer_types[index]
        if config.num_attention_heads % config.o_groups:
            raise ValueError(
                f"{config.model_type}'s {config.num_attention_heads} attention heads are no {config.o_groups} groups "
                "(o_groups); correct config.json"
            )
        return cls(
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            head_dim=config.head_dim,
            q_lora_rank=config.q_lora_rank,
            groups=config.o_groups,
            o_lora_rank=config.o_lora_rank,
            window=config.sliding_window,
            rate=0 if kind == SLIDING else config.compress_rates[kind],
            sparse=kind == SPARSE,
            index_heads=config.index_n_heads,
            index_head_dim=config.index_head_dim,
            index_topk=config.index_topk,
            eps=config.rms_norm_eps,
        )


class LastRotary(Rotary):
    """Turns the last features of a head, neighbours paired, and leaves them where they are."""

    def __init__(self, build: BuildContext, config: Any, kind: str) -> None:
        """kind: the entry of rope_parameters."""
        trained = config.max_position_embeddings
        super().__init__(build, config.head_dim, config.rope_parameters[kind], trained, partial=True)
        self.ops.take("rotate_last")

    def turn(self, x: Tensor, cache: StepState, shift: int = 0, inverse: bool = False) -> Tensor:
        """x [T, H, D] by each token's position - shift, or back."""
        turned: Tensor = self.ops.rotate_last(x, self.table, cache.batch.positions, shift, inverse)
        return turned


class EntryPooling(Layer):
    """x [T, hidden] -> the entry that each token ends [T, D], turned by its first token's position; other rows are of
    no entry. Its products are floats, as published files of fp8 have them."""

    def __init__(self, build: BuildContext, sizes: CompressedSizes, dim: int, rotary: LastRotary) -> None:
        super().__init__(build)
        self._build, self._rate, self._dim = build, sizes.rate, dim
        self._wide = dim * (2 if sizes.sparse else 1)  # numbers of a token
        each, self._floats = replicated(self._wide, build.size), replace(build, quantization=QuantizationPlan())
        self.inputs = column_parallel(self._floats, sizes.hidden, {"kv_proj": each, "gate_proj": each})
        self.kv_norm = RMSNorm(build, dim, sizes.eps)
        self.rotary = rotary
        self.pooling = build.make_mixer(StateSpec("pool_windows", (9 if sizes.sparse else 3, dim)))
        self.position_bias: Tensor

    def weights(self, path: str) -> list[Weight]:
        build, every = self._build, ((0, self._rate),) * self._build.size
        part = CheckpointSlice(f"{path}.position_bias", (self._rate, self._wide), every)
        return [Weight("position_bias", (part,), 0, build.rank, torch.float32, "vector")]

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        kv, gate = self.inputs(x).chunk(2, dim=-1)
        pooled = self.pooling.run_state_op(cache, kv, gate, self.position_bias).to(x.dtype)
        return self.rotary.turn(self.kv_norm(pooled)[:, None], cache, shift=self._rate - 1)[:, 0]


class EntryIndexer(EntryPooling):
    """x and the queries' latents [T, q_lora_rank] -> numbers of the entries that each token sees [T, C]; it has an
    entry of its own for each window. Every rank has all of it."""

    def __init__(self, build: BuildContext, sizes: CompressedSizes, rotary: LastRotary) -> None:
        super().__init__(build, sizes, sizes.index_head_dim, rotary)
        self._heads, dim = sizes.index_heads, sizes.index_head_dim
        self.queries = column_parallel(
            build, sizes.q_lora_rank, {"q_b_proj": replicated(self._heads * dim, build.size)}
        )
        self.head_weights = column_parallel(
            self._floats, sizes.hidden, {"scorer.weights_proj": replicated(self._heads, build.size)}
        )
        spec = TokenChoiceSpec(dim, sizes.index_topk, build.dtype, build.page_size, rate=sizes.rate)
        self.mixing = build.make_mixer(spec)
        self.mixing.kv_heads = 1

    def choose(self, x: Tensor, latent: Tensor, cache: StepState) -> Tensor:
        """The numbers of entries."""
        q = self.queries(latent).reshape(len(x), self._heads, self._dim)
        weights = self.head_weights(x).float() * (self._heads * self._dim) ** -0.5
        return self.mixing.run_state_op(cache, self.rotary.turn(q, cache), weights, self(x, cache))


class EntryCompressor(EntryPooling):
    """EntryPooling of a layer's K, perhaps with an indexer."""

    def __init__(self, build: BuildContext, sizes: CompressedSizes, rotary: LastRotary) -> None:
        super().__init__(build, sizes, sizes.head_dim, rotary)
        self.indexer = EntryIndexer(build, sizes, rotary) if sizes.sparse else None


class GroupedOutputs(Layer):
    """The heads' outputs [T, H D] -> [T, G o_lora_rank]: each group of heads has a product of its own (o_a_proj)."""

    def __init__(self, build: BuildContext, sizes: CompressedSizes, groups: Shards) -> None:
        super().__init__(build, "by_heads")
        self._build, self._groups, self._rank = build, groups, sizes.o_lora_rank
        self._inputs = sizes.heads * sizes.head_dim // sizes.groups
        self.matrices: Tensor

    def weights(self, path: str) -> list[Weight]:
        build, module = self._build, path.rpartition(".")[0] + ".o_a_proj"
        every, total = ((0, self._rank),) * build.size, self._groups.total * self._rank
        parts = tuple(
            CheckpointSlice(f"{module}.weight", (self._rank, self._inputs), every, group * self._rank, total=total)
            for group in range(*self._groups.ranges[build.rank])
        )
        reader = build.quantization.reader(module)
        return [Weight("matrices", parts, 0, build.rank, build.dtype, "heads", reader=reader, stack=len(parts))]

    def forward(self, x: Tensor) -> Tensor:
        grouped = x.reshape(len(x), -1, self._inputs)
        out: Tensor = self.ops.by_heads(grouped, self.matrices, self._rank, False)
        return out.reshape(len(x), -1)


class CompressedAttention(nn.Module):
    """x [T, hidden] -> [T, hidden]. Each rank has whole groups of heads, and all of K and of the entries."""

    def __init__(self, build: BuildContext, sizes: CompressedSizes, rotary: LastRotary) -> None:
        super().__init__()
        if sizes.groups < build.size:
            raise ValueError(
                f"{build.size} ranks cannot share {sizes.groups} groups of attention heads (o_groups): a rank would "
                f"have none; lower tensor_parallel_size to {sizes.groups} or less"
            )
        if build.kv_dtype not in (None, build.dtype):
            raise ValueError(
                f"kv_cache_dtype {build.kv_dtype}: compressed entries are kept in the model's dtype alone; leave "
                "kv_cache_dtype out"
            )
        groups = even_shards(sizes.groups, build.size)
        heads = groups.times(sizes.heads // sizes.groups)
        self._dim, self.rotary, local = sizes.head_dim, rotary, heads.local(build.rank)
        first = {
            "q_a_proj": replicated(sizes.q_lora_rank, build.size), "kv_proj": replicated(sizes.head_dim, build.size),
        }  # fmt: skip
        self._widths = sizes.q_lora_rank, sizes.head_dim
        self.inputs = column_parallel(build, sizes.hidden, first)
        self.q_a_norm = RMSNorm(build, sizes.q_lora_rank, sizes.eps)
        self.q = column_parallel(build, sizes.q_lora_rank, {"q_b_proj": heads.times(sizes.head_dim)})
        self.q_b_norm = RMSNorm(build, sizes.head_dim, sizes.eps, has_weight=False)
        self.kv_norm = RMSNorm(build, sizes.head_dim, sizes.eps)
        self.sinks = Sinks(build, heads)
        self.compressor = EntryCompressor(build, sizes, rotary) if sizes.rate else None
        self.grouped = GroupedOutputs(build, sizes, groups)
        self.out = row_parallel(build, groups.times(sizes.o_lora_rank), ("o_b_proj", sizes.hidden))
        self.recent = build.make_mixer(StateSpec("recent_rows", (sizes.window - 1, sizes.head_dim), build.dtype))
        spec = AttentionSpec(
            heads=local, kv_heads=1, head_dim=sizes.head_dim, scale=sizes.head_dim**-0.5, dtype=build.dtype,
            page_size=build.page_size, window=sizes.window, sinks=True, shared=sizes.head_dim, rate=sizes.rate,
        )  # fmt: skip
        self.mixing = build.make_mixer(spec)
        self.mixing.kv_heads = 1

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        first, k = self.inputs(x).split(self._widths, dim=-1)
        latent = self.q_a_norm(first)
        q = self.rotary.turn(self.q_b_norm(self.q(latent).reshape(len(x), -1, self._dim)), cache)
        k = self.rotary.turn(self.kv_norm(k)[:, None], cache)[:, 0]
        rows = WindowRows(k, self.recent.run_state_op(cache, k))
        made, chosen = None, None
        if self.compressor is not None:
            made = self.compressor(x, cache)
            if self.compressor.indexer is not None:
                chosen = self.compressor.indexer.choose(x, latent, cache)
        out = self.mixing.run_state_op(cache, q, rows, made, chosen, self.sinks.logits)
        out = self.rotary.turn(out, cache, inverse=True)
        mixed: Tensor = self.out(self.grouped(out.flatten(1)))
        return mixed
