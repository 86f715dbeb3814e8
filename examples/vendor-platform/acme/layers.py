"""A layer of ours in the place of quintet's: the gated feed-forward as one op."""

from typing import Any

from quintet.layers.build import BuildContext
from quintet.layers.mlp import GatedMLP
from torch import Tensor


class FusedMLP(GatedMLP):
    """acme_gated_mlp where all of the layer is on one device, as it was saved and without adapters (LoRA); else what it
    extends."""

    def __init__(self, build: BuildContext, *args: Any, **settings: Any) -> None:
        super().__init__(build, *args, **settings)
        self._fused = build.size == 1 and build.lora is None  # adapters add to each product
        if self._fused:
            self.ops.take("acme_gated_mlp")

    def forward(self, x: Tensor) -> Tensor:
        biased = self.gate_up.bias is not None or self.down.bias is not None
        if not self._fused or biased or not self.gate_up.format.plain:
            return super().forward(x)
        return self.ops.acme_gated_mlp(x, self.gate_up.weight, self.down.weight, self.kind)
