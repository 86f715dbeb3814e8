"""Feed-forward layers."""

from torch import Tensor

from quintet.layers.build import Build, Layer, even
from quintet.layers.linear import Stored, columns, rows
from quintet.ops.activation import KINDS, UnknownActivation


def known(kind: str) -> str:
    """The activation's name, or UnknownActivation with those that there are."""
    if kind not in KINDS:
        raise UnknownActivation(kind, KINDS)
    return kind


class GatedMLP(Layer):
    """down(act(gate(x)) * up(x))."""

    def __init__(
        self, build: Build, hidden: int, width: int, kind: str, bias: bool = False, stored: Stored | None = None
    ) -> None:
        super().__init__(build, "gated")
        split = even(width, build.size)
        self.gate_up = columns(build, hidden, {"gate_proj": split, "up_proj": split}, bias, stored)
        self.down = rows(build, split, ("down_proj", hidden), bias)
        self.kind = known(kind)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.ops.gated(self.gate_up(x), self.kind))


class MLP(Layer):
    """down(act(up(x))), with biases; `names` are the checkpoint's for (up, down), relative to the parent."""

    def __init__(
        self, build: Build, hidden: int, width: int, kind: str, names: tuple[str, str], stored: Stored | None = None
    ) -> None:
        super().__init__(build, "activate")
        split = even(width, build.size)
        self.up = columns(build, hidden, {names[0]: split}, True, stored)
        self.down = rows(build, split, (names[1], hidden), True, stored)
        self.kind = known(kind)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.ops.activate(self.up(x), self.kind))
