"""Feed-forward layers."""

import torch
from torch import Tensor, nn

from quintet.interface.weights import CheckpointSlice, Weight
from quintet.layers.build import BuildContext, Layer, even_shards
from quintet.layers.linear import CheckpointLayout, column_parallel, row_parallel
from quintet.ops.activation import KINDS, UnknownActivation, split_limit, with_limit

ACTIVATION_ALIASES = {"gelu_fast": "gelu_new", "gelu_python": "gelu", "sqrelu": "relu2", "swish": "silu"}


def activation_name(kind: str) -> str:
    """The activation's name, with its limit if it has one (with_limit()); UnknownActivation for no name."""
    name, limit = split_limit(kind)
    name = ACTIVATION_ALIASES.get(name, name)
    if name not in KINDS:
        raise UnknownActivation(name, KINDS)
    return with_limit(name, limit)


class GatedMLP(Layer):
    """down(act(gate(x)) * up(x))."""

    def __init__(
        self,
        build: BuildContext,
        hidden: int,
        width: int,
        kind: str,
        bias: bool = False,
        stored: CheckpointLayout | None = None,
    ) -> None:
        super().__init__(build, "gated")
        split = even_shards(width, build.size)
        self.gate_up = column_parallel(build, hidden, {"gate_proj": split, "up_proj": split}, bias, stored)
        self.down = row_parallel(build, split, ("down_proj", hidden), bias)
        self.kind = activation_name(kind)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.ops.gated(self.gate_up(x), self.kind))


class MLP(Layer):
    """down(act(up(x))); `names` are the checkpoint's for (up, down), relative to the parent."""

    def __init__(
        self,
        build: BuildContext,
        sizes: tuple[int, int],  # of what comes in and out, and between
        kind: str,
        names: tuple[str, str],
        bias: bool = True,
        stored: CheckpointLayout | None = None,
    ) -> None:
        super().__init__(build, "activate")
        hidden, split = sizes[0], even_shards(sizes[1], build.size)
        self.up = column_parallel(build, hidden, {names[0]: split}, bias, stored)
        self.down = row_parallel(build, split, (names[1], hidden), bias, stored)
        self.kind = activation_name(kind)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.ops.activate(self.up(x), self.kind))


class Xielu(Layer):
    """The activation of that name, with what a layer has learned of it."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__(build, "xielu")
        self._build = build
        self.learned: Tensor

    def weights(self, path: str) -> list[Weight]:
        every = ((0, 1),) * self._build.size
        parts = tuple(CheckpointSlice(f"{path}.{name}", (1,), every) for name in ("alpha_p", "alpha_n"))
        return [Weight("learned", parts, 0, self._build.rank, torch.float32, "vector")]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.ops.xielu(x, self.learned)
        return out


class XieluMLP(nn.Module):
    """down(xielu(up(x))), without biases; `sizes` and `names` as MLP's."""

    def __init__(self, build: BuildContext, sizes: tuple[int, int], names: tuple[str, str]) -> None:
        super().__init__()
        hidden, split = sizes[0], even_shards(sizes[1], build.size)
        self.up = column_parallel(build, hidden, {names[0]: split})
        self.act_fn = Xielu(build)
        self.down = row_parallel(build, split, (names[1], hidden))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act_fn(self.up(x)))
        return out
