"""Experts that a token's id chooses, as DeepSeek-V4's first layers have them (hash routing; 2026, section 2.1)."""

import torch
from torch import Tensor

from quintet.interface.weights import CheckpointSlice, Weight
from quintet.layers.build import BuildContext
from quintet.layers.moe.moe import ExpertRouter, MoE, MoESizes


class HashRouter(ExpertRouter):
    """Logits [T, E] and ids [T] of tokens -> weights and ids of experts; a table has those of each token."""

    def __init__(self, build: BuildContext, moe_sizes: MoESizes, vocab: int) -> None:
        super().__init__(build, moe_sizes)
        self.ops.take("route_hashed")
        self._vocab = vocab
        self.table: Tensor

    def weights(self, path: str) -> list[Weight]:
        build, every = self._build, ((0, self._vocab),) * self._build.size
        source = f"{path.rpartition('.')[0]}.gate.tid2eid"
        part = CheckpointSlice(source, (self._vocab, self._moe_sizes.top_k), every)
        return [Weight("table", (part,), 0, build.rank, torch.int32, "vector")]

    def choose_by_token(self, logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The same as choose(), by the tokens."""
        weights, ids = self.ops.route_hashed(logits, token_ids, self.table)
        self.record(ids)
        return (weights if self._moe_sizes.scale == 1 else self.ops.scale(weights, self._moe_sizes.scale)), ids


class HashedMoE(MoE):
    """A mixture with such a router: called with the ids of tokens, too."""

    choice: HashRouter

    def __init__(self, build: BuildContext, moe_sizes: MoESizes, vocab: int) -> None:
        super().__init__(build, moe_sizes, HashRouter(build, moe_sizes, vocab))

    def forward(self, x: Tensor, token_ids: Tensor) -> Tensor:  # type: ignore[override]  # and the tokens
        weights, ids = self.choice.choose_by_token(self.gate(x), token_ids)
        out = self._comm.all_reduce(self.experts(x, weights, ids))
        return out if self.shared_experts is None else self._added.add(out, self.shared_experts(x))
