"""Experts without gates: of Nemotron 3 (NVIDIA 2025), some in a narrower space than the model's, and Nomic Embed v2."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from quintet.interface.weights import CheckpointSlice, Weight
from quintet.layers.build import BuildContext, replicated, vector_weight
from quintet.layers.linear import column_parallel
from quintet.layers.mlp import MLP
from quintet.layers.moe.moe import DOWN, UP, Experts, MoE, MoESizes


class UngatedExperts(Experts):
    """Stacks [E, I, D] and [E, D, I], held in floats: those of quantized files become floats while they are loaded."""

    takes_lora = False  # lora_experts() has gates

    def __init__(self, build: BuildContext, sizes: tuple[int, int], kind: str, names: Sequence[str]) -> None:
        super().__init__(
            replace(build, quantization=replace(build.quantization, supported_kinds=None)), sizes, kind, names
        )
        self.ops.take("ungated_experts")
        self.up: Tensor

    def weights(self, path: str) -> list[Weight]:
        parent = path[: path.rfind(".") + 1]

        def stacked(name: str, projection: str, shape: tuple[int, int], axis: int) -> Weight:
            def parts(expert: str) -> list[CheckpointSlice]:
                return [CheckpointSlice(f"{parent}{expert}.{projection}.weight", shape, self._inner.ranges)]

            return self._stacked_weight(name, parts, axis)

        return [
            stacked("up", UP, (self._width, self._hidden), 0),
            stacked("down", DOWN, (self._hidden, self._width), 1),
        ]

    def _share(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        share: Tensor = self.ops.ungated_experts(x, self.up, self.down, weights, ids, self.kind)
        return share


class UngatedMoE(MoE):
    """A mixture of such experts, beside a plain feed-forward of `shared` features that serves every token.

    With `latent`, the experts' inputs and outputs have so many numbers, by products on the way in and out.
    """

    def __init__(self, build: BuildContext, moe_sizes: MoESizes, latent: int | None, bias: bool) -> None:
        super().__init__(build, replace(moe_sizes, shared=0))
        names = [f"experts.{expert}" for expert in range(moe_sizes.experts)]
        self.experts = UngatedExperts(build, (latent or moe_sizes.hidden, moe_sizes.width), moe_sizes.activation, names)
        sizes = moe_sizes.hidden, moe_sizes.shared
        self.shared_experts = MLP(build, sizes, moe_sizes.activation, ("up_proj", "down_proj"), bias)
        self.into: nn.Module | None = None
        self.out: nn.Module | None = None
        if latent:
            self.into = column_parallel(
                build, moe_sizes.hidden, {"fc1_latent_proj": replicated(latent, build.size)}, bias
            )
            self.out = column_parallel(
                build, latent, {"fc2_latent_proj": replicated(moe_sizes.hidden, build.size)}, bias
            )
        self._own = build.ops.take("add")

    def forward(self, x: Tensor) -> Tensor:
        assert self.shared_experts is not None
        weights, ids = self.choice(self.gate(x))
        mixed = self._comm.all_reduce(self.experts(x if self.into is None else self.into(x), weights, ids))
        out: Tensor = self._own.add(mixed if self.out is None else self.out(mixed), self.shared_experts(x))
        return out


class BiasedUngatedMoE(MoE):
    """A mixture of such experts with one bias, added to what they add up to (Nussbaum and Duderstadt 2025)."""

    def __init__(self, build: BuildContext, moe_sizes: MoESizes, has_bias: bool) -> None:
        super().__init__(build, moe_sizes)
        names = [f"experts.{expert}" for expert in range(moe_sizes.experts)]
        self.experts = UngatedExperts(build, (moe_sizes.hidden, moe_sizes.width), moe_sizes.activation, names)
        self._build, self._has_bias = build, has_bias
        self._own = build.ops.take("add", "take_rows")
        self.bias: Tensor

    def weights(self, path: str) -> list[Weight]:
        bias = vector_weight(self._build, f"{path}.experts.bias", self._moe_sizes.hidden, name="bias")
        return [bias] if self._has_bias else []

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.choice(self.gate(x))
        mixed = self._comm.all_reduce(self.experts(x, weights, ids))
        if not self._has_bias:
            return mixed
        out: Tensor = self._own.add(mixed, self._own.take_rows(self.bias[None], ids[:, 0] * 0))
        return out
