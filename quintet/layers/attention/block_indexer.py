"""Indexers of block-sparse attention: they choose the blocks of keys that each token sees (MiniMax-M3, Qwen4-Exp)."""

from dataclasses import dataclass

from torch import Tensor, nn

from quintet.interface.types import BlockChoiceSpec, HeadNorms, RotaryArgs
from quintet.layers.build import BuildContext, replicated, split_heads
from quintet.layers.layer_state import StepState
from quintet.layers.linear import column_parallel
from quintet.layers.norm import RMSNorm
from quintet.layers.rope import Rotary


@dataclass(frozen=True)
class BlockIndexerSizes:
    """Sizes of an indexer, before its heads are shared out over ranks."""

    hidden: int
    heads: int
    head_dim: int
    block: int  # tokens
    count: int  # blocks that a token sees
    eps: float  # of the norms of q and k, kept around 0
    local: int = 0  # of the last blocks, which are always seen


class BlockIndexer(nn.Module):
    """x [T, hidden] -> blocks [T, G, C] (see the op choose_blocks), each KV head's own, or one head's for all.

    A rank has the heads that choose for its KV heads. `rotary` turns the first features of q and of the key.
    """

    def __init__(
        self, build: BuildContext, sizes: BlockIndexerSizes, attention: tuple[int, int], rotary: Rotary
    ) -> None:
        """`attention`: heads and KV heads of the layer; ValueError where the indexer has another number."""
        super().__init__()
        if sizes.heads not in (1, attention[1]):
            raise ValueError(
                f"an indexer of {sizes.heads} heads chooses blocks for {attention[1]} KV heads, which is not computed; "
                "it has one head, or one for each KV head"
            )
        if not 1 <= sizes.local <= sizes.count:
            raise ValueError(
                f"{sizes.local} of {sizes.count} chosen blocks are the last ones (index_local_blocks); at least a "
                "token's own is, and at most all are"
            )
        _, keys = split_heads(*attention, build.size)
        heads = keys if sizes.heads > 1 else replicated(1, build.size)
        self._head_dim, self.rotary = sizes.head_dim, rotary
        self.queries = column_parallel(build, sizes.hidden, {"q_proj": heads.times(sizes.head_dim)})
        self.keys = column_parallel(build, sizes.hidden, {"k_proj": replicated(sizes.head_dim, build.size)})
        self.q_norm = RMSNorm(build, sizes.head_dim, sizes.eps, 1.0)
        self.k_norm = RMSNorm(build, sizes.head_dim, sizes.eps, 1.0)
        self.mixing = build.make_mixer(_choice("choose_blocks", build, sizes))
        self.mixing.kv_heads = 1

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        q, k = (product(x).reshape(len(x), -1, self._head_dim) for product in (self.queries, self.keys))
        q, k = self.rotary.norm_and_rotate(q, k, (self.q_norm, self.k_norm), cache.batch.positions)
        return self.mixing.run_state_op(cache, q, k)


class MeanBlockIndexer(nn.Module):
    """x [T, hidden] -> blocks [T, 1, C] (see the op choose_mean_blocks), the same for all heads. Every rank has all of
    it. `rotary` turns the first features of q, and of the key of a block."""

    def __init__(self, build: BuildContext, sizes: BlockIndexerSizes, rotary: Rotary) -> None:
        super().__init__()
        self._heads, self._head_dim, self.rotary = sizes.heads, sizes.head_dim, rotary
        width = (sizes.heads + 1) * sizes.head_dim
        self.both = column_parallel(build, sizes.hidden, {"index_qk_proj": replicated(width, build.size)})
        self.q_layernorm = RMSNorm(build, sizes.head_dim, sizes.eps, 1.0)
        self.k_layernorm = RMSNorm(build, sizes.head_dim, sizes.eps, 1.0)
        self.mixing = build.make_mixer(_choice("choose_mean_blocks", build, sizes))
        self.mixing.kv_heads = 1

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        q, k = self.both(x).reshape(len(x), -1, self._head_dim).split([self._heads, 1], dim=1)
        q = self.q_layernorm(q.contiguous())
        q, _ = self.rotary(q, q[:, :1], cache.batch.positions)
        norm = self.k_layernorm
        turn = RotaryArgs(self.rotary.table, HeadNorms(norm.weight, norm.weight, norm.eps, norm.offset))
        return self.mixing.run_state_op(cache, q, k.contiguous(), settings=(turn,))


def _choice(op: str, build: BuildContext, sizes: BlockIndexerSizes) -> BlockChoiceSpec:
    return BlockChoiceSpec(op, sizes.head_dim, sizes.block, sizes.count, build.dtype, build.page_size, sizes.local)
