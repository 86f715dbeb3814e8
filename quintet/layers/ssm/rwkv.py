"""RWKV-7's two branches (Peng et al. 2025): a rule that replaces what a state holds, and a feed-forward.

Each reads the token before as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.interface.types import StateSpec
from quintet.interface.weights import CheckpointSlice, Weight
from quintet.layers.build import BuildContext, Layer, Shards, replicated, split_heads
from quintet.layers.layer_state import StepState
from quintet.layers.linear import column_parallel, row_parallel
from quintet.layers.mlp import MLP
from quintet.ops.states import ConvWeights, WKV7Inputs, WKV7OutputWeights, WKV7Weights


@dataclass(frozen=True)
class RWKV7Sizes:
    """The sizes of a layer, before it is shared out over ranks."""

    hidden: int
    heads: int
    head_dim: int
    eps: float  # of the norm of each head
    ranks: dict[str, int]  # of what w, a, v and g are made by


class TokenShift(Layer):
    """x [T, hidden] -> [M, T, hidden]: between each token and the one before it, by M learned factors of each feature.

    A convolution of two taps with the weights 1 and 0 gives the token before.
    """

    def __init__(self, build: BuildContext, hidden: int, names: Sequence[str], shape: tuple[int, ...]) -> None:
        """`names`: of the factors, relative to the parent, a tensor of this shape each."""
        super().__init__(build, "between")
        self._build, self._names, self._shape, self._hidden = build, tuple(names), shape, hidden
        self.mixing = build.make_mixer(StateSpec("short_conv", (hidden, 1), build.dtype))
        self.factors: Tensor
        self.taps: Tensor  # [hidden, 2]

    def weights(self, path: str) -> list[Weight]:
        parent, build = path.rpartition(".")[0], self._build
        every = replicated(self._shape[0], build.size).ranges
        parts = tuple(CheckpointSlice(f"{parent}.{name}", self._shape, every) for name in self._names)
        return [Weight("factors", parts, 0, build.rank, build.dtype, "vector")]

    def constants(self) -> dict[str, Tensor]:
        return {"taps": torch.tensor([1.0, 0.0], dtype=self._build.dtype).repeat(self._hidden, 1)}

    def forward(self, x: Tensor, cache: StepState) -> Tensor:
        before = self.mixing.run_state_op(cache, x, None, ConvWeights(self.taps), settings=(False,))
        out: Tensor = self.ops.between(x, before, self.factors.reshape(len(self._names), -1))
        return out


class LowRank(Layer):
    """up(act(down(x))); the activation is a sigmoid, a tanh or none."""

    def __init__(
        self, build: BuildContext, sizes: tuple[int, int], outputs: Shards, kind: str = "", bias: bool = True
    ) -> None:
        super().__init__(build, *["squash"] * bool(kind))
        hidden, rank = sizes
        self.down = column_parallel(build, hidden, {"lora.0": replicated(rank, build.size)})
        self.up = column_parallel(build, rank, {"lora.2": outputs}, bias)
        self._kind = kind

    def forward(self, x: Tensor) -> Tensor:
        low = self.down(x)
        return self.up(self.ops.squash(low, self._kind) if self._kind else low)


class RWKV7TimeMix(Layer):
    """x [T, hidden] -> [T, hidden]. Ranks share the heads. Values of later layers are blended with the first one's."""

    def __init__(self, build: BuildContext, shape: RWKV7Sizes, first: bool) -> None:
        super().__init__(build, "wkv7_out", *["blend"] * (not first))
        self._build, self._shape = build, shape
        heads, _ = split_heads(shape.heads, shape.heads, build.size)
        inner, hidden = heads.times(shape.head_dim), shape.hidden
        self._heads, self._inner = heads, inner
        self.shift = TokenShift(build, hidden, [f"x_{name}" for name in "rwkvag"], (1, 1, hidden))
        self.r, self.k, self.v = (column_parallel(build, hidden, {f"{name}_proj": inner}) for name in "rkv")
        self.o = row_parallel(build, inner, ("o_proj", hidden))
        self.w_lora = LowRank(build, (hidden, shape.ranks["w"]), inner, "tanh")
        self.a_lora = LowRank(build, (hidden, shape.ranks["a"]), inner)
        self.g_lora = LowRank(build, (hidden, shape.ranks["g"]), inner, "sigmoid", bias=False)
        self.v_lora = None if first else LowRank(build, (hidden, shape.ranks["v"]), inner)
        size = (heads.local(build.rank), shape.head_dim, shape.head_dim)
        self.mixing = build.make_mixer(StateSpec("wkv7", size))
        self.k_k: Tensor  # [H D] float32, as the others
        self.k_a: Tensor
        self.r_k: Tensor  # [H, D]
        self.norm: Tensor
        self.norm_bias: Tensor

    def weights(self, path: str) -> list[Weight]:
        flat, rank = (self._inner.total,), self._build.rank
        names = {"k_k": "k_k", "k_a": "k_a", "norm": "g_norm.weight", "norm_bias": "g_norm.bias"}
        parts = {name: CheckpointSlice(f"{path}.{source}", flat, self._inner.ranges) for name, source in names.items()}
        parts["r_k"] = CheckpointSlice(f"{path}.r_k", (self._heads.total, self._shape.head_dim), self._heads.ranges)
        return [Weight(name, (part,), 0, rank, torch.float32, "vector") for name, part in parts.items()]

    def forward(self, x: Tensor, cache: StepState, values: list[Tensor]) -> Tensor:
        """`values`: the first layer's of this step, which it puts there."""
        r, w, k, v, a, g = self.shift(x, cache).unbind(0)
        value = self.v(v)
        if self.v_lora is None:
            values.append(value)
        else:
            value = self.ops.blend(value, values[0], self.v_lora(v))
        given = (self.r(r), self.w_lora(w), self.k(k), value, self.a_lora(a))
        moves = WKV7Inputs(*(self._by_head(each) for each in given))
        rule = WKV7Weights(self._of_heads(self.k_k), self._of_heads(self.k_a))
        o = self.mixing.run_state_op(cache, moves, rule)
        finish = WKV7OutputWeights(self.r_k, self._of_heads(self.norm), self._of_heads(self.norm_bias))
        return self.o(self.ops.wkv7_out(o, moves, rule, finish, self.g_lora(g), self._shape.eps))

    def _by_head(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], -1, self._shape.head_dim)

    def _of_heads(self, weight: Tensor) -> Tensor:
        return weight.reshape(-1, self._shape.head_dim)


class RWKV7ChannelMix(MLP):
    """x [T, hidden] -> [T, hidden]: a feed-forward of what stands between a token and the one before."""

    def __init__(self, build: BuildContext, hidden: int, width: int, kind: str) -> None:
        super().__init__(build, (hidden, width), kind, ("key", "value"), bias=False)
        self.shift = TokenShift(build, hidden, ["x_k"], (hidden,))

    def forward(self, x: Tensor, cache: StepState) -> Tensor:  # type: ignore[override]  # it keeps a state
        return super().forward(self.shift(x, cache)[0])
