"""Experts with biases and a clamped gate, as gpt-oss has them (OpenAI 2025)."""

from torch import Tensor

from quintet.interface.weights import CheckpointSlice, Weight
from quintet.layers.build import BuildContext, Shards, replicated
from quintet.layers.moe.moe import DOWN, Experts, MoE, MoESizes, router
from quintet.ops.moe import ExpertGate

BOTH = "gate_up_proj"  # of each expert: gate's outputs and up's take turns


class BiasedExperts(Experts):
    """Stacks [E, 2 I, D], with the outputs of gate and up in turns, and [E, D, I], each with biases.

    Files that hold floats keep them [in, out].
    """

    def __init__(self, build: BuildContext, moe_sizes: MoESizes, clamp: tuple[float, float]) -> None:
        """clamp: see the op biased_experts."""
        names = [f"experts.{expert}" for expert in range(moe_sizes.experts)]
        super().__init__(build, (moe_sizes.hidden, moe_sizes.width), moe_sizes.activation, names)
        self.ops.take("biased_experts")
        self._clamp = clamp
        self.gate_up_bias: Tensor
        self.down_bias: Tensor

    def weights(self, path: str) -> list[Weight]:
        parent, size = path[: path.rfind(".") + 1], self._build.size
        once = ((0, self._hidden),) + ((self._hidden, 2 * self._hidden),) * (size - 1)
        gate_up, down = self._inner.times(2), Shards(self._hidden, once)  # one rank adds the bias of the sum
        down = down if self.rank_experts is None else replicated(self._hidden, size)
        floats = self._reads_floats(parent)

        def stacked(name: str, own: str, shape: tuple[int, int], axis: int, split: Shards) -> Weight:
            def parts(expert: str) -> list[CheckpointSlice]:
                return [CheckpointSlice(f"{parent}{expert}.{own}.weight", shape, split.ranges, transposed=floats)]

            return self._stacked_weight(name, parts, axis, "biased experts")

        def biases(name: str, own: str, split: Shards) -> Weight:
            def parts(expert: str) -> list[CheckpointSlice]:
                return [CheckpointSlice(f"{parent}{expert}.{own}.bias", (split.total,), split.ranges)]

            return self._stacked_weight(name, parts, 0, "vector")

        found = [
            stacked("gate_up", BOTH, (2 * self._width, self._hidden), 0, gate_up),
            stacked("down", DOWN, (self._hidden, self._width), 1, self._inner),
        ]
        return [*found, biases("gate_up_bias", BOTH, gate_up), biases("down_bias", DOWN, down)]

    def _reads_floats(self, parent: str) -> bool:
        return self._build.quantization.reader(f"{parent}{self._names[0]}.{BOTH}") is None

    @property
    def gate(self) -> ExpertGate:
        return ExpertGate("", (self.gate_up_bias, self.down_bias), self._clamp)

    def _share(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        biases = self.gate_up_bias, self.down_bias
        share: Tensor = self.ops.biased_experts(x, self.stacks, biases, weights, ids, self._clamp)
        return share


class BiasedMoE(MoE):
    """A mixture of such experts; its router has a bias too."""

    def __init__(self, build: BuildContext, moe_sizes: MoESizes, clamp: tuple[float, float]) -> None:
        super().__init__(build, moe_sizes)
        self.gate = router(build, moe_sizes.hidden, "gate", moe_sizes.experts, bias=True)
        self.experts = BiasedExperts(build, moe_sizes, clamp)
