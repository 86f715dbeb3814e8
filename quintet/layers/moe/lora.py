"""Room on the device for several adapters (LoRA) of a mixture's experts."""

from collections.abc import Mapping

import torch
from torch import Tensor

from quintet.layers.build import BuildContext
from quintet.layers.lora_pool import (
    LoRAMatrices,
    LoRAPool,
    LoRARanks,
    PoolTensor,
    ReadWeight,
    Tensors,
    local_share,
    module_of,
    width_of,
)
from quintet.layers.lora_step import LoRASizes
from quintet.layers.moe.moe import Experts, slices_of
from quintet.ops.moe import ExpertsLoRA

STACKS = ("gate_up", "down")  # weights of Experts


class ExpertsPool(LoRAPool):
    """Room beside both products of the experts that this rank has. Each expert of an adapter has ranks of its own."""

    gate_up_a: Tensor  # [S E, P, R, D]
    gate_up_b: Tensor  # [S E, R, 2 I]
    down_a: Tensor  # [S E, 1, R, I]
    down_b: Tensor  # [S E, R, D]
    ranks: Tensor  # [S E, P + 1] int32

    def __init__(self, build: BuildContext, experts: Experts, path: str, ranks: LoRARanks) -> None:
        super().__init__(build, path, ranks, "lora_experts")
        stacks = {each.name: each for each in experts.weights(path)}
        self._gate_up, self._down = (stacks[name] for name in STACKS)
        self._hidden = self._gate_up.slices[0].shape[1]
        self._parts = len(self._gate_up.slices) // self._gate_up.stack
        first = self._gate_up.slices[: self._parts]
        self.columns = tuple((part, width_of(each, build.rank)) for part, each in enumerate(first))
        both = self._gate_up, self._down
        self._shapes = {module_of(each): each.shape for stack in both for each in slices_of(stack)}
        self.modules_here = tuple(self._shapes)

    @property
    def num_columns(self) -> int:
        """No columns of the step: an expert's ranks stand in the pool."""
        return 0

    def forward(self, x: Tensor, experts: Experts, weights: Tensor, ids: Tensor) -> Tensor:
        """x [T, D] through the experts in their places `ids` [T, k], each with what the row's adapter changes."""
        slots = self._step.slots
        assert slots is not None, "the step has adapters"
        lora = ExpertsLoRA(self.gate_up_a, self.gate_up_b, self.down_a, self.down_b, self.ranks, slots, self.columns)
        out: Tensor = self.ops.lora_experts(x, experts.stacks, experts.gate, weights, ids, lora)
        return out

    def tensors(self, sizes: LoRASizes) -> dict[str, PoolTensor]:
        count, parts, rank = self._gate_up.stack, self._parts, sizes.max_rank
        outputs, inner = sum(width for _, width in self.columns), width_of(self._down.slices[0], self._rank)
        return {
            "gate_up_a": PoolTensor((count, parts, rank, self._hidden), self._dtype),
            "gate_up_b": PoolTensor((count, rank, outputs), self._dtype),
            "down_a": PoolTensor((count, 1, rank, inner), self._dtype),
            "down_b": PoolTensor((count, rank, self._hidden), self._dtype),
            "ranks": PoolTensor((count, parts + 1), torch.int32),
        }

    def pack(
        self,
        adapter: Mapping[str, LoRAMatrices],
        sizes: LoRASizes,
        ranks: Tensor,
        read: ReadWeight | None,
        has_extras: bool,
    ) -> Tensors:
        shapes = self.tensors(sizes)
        given = {name: adapter[name] for name in self.modules_here if name in adapter}
        for name, matrices in given.items():
            self._check(name, matrices, sizes)
        wanted = shapes if given else {"ranks": shapes["ranks"]}
        own = {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in wanted.items()}
        for number, piece in enumerate(self._gate_up.slices):
            if module_of(piece) in given:
                (expert, part), matrices = divmod(number, self._parts), given[module_of(piece)]
                rank, start = len(matrices.lora_a), sum(width for _, width in self.columns[:part])
                b = local_share(piece, matrices.lora_b, 0, self._rank).t()
                own["gate_up_a"][expert, part, :rank] = matrices.lora_a
                own["gate_up_b"][expert, :rank, start : start + b.shape[1]] = b
                own["ranks"][expert, part] = rank
        for expert, piece in enumerate(self._down.slices):
            if module_of(piece) in given:
                matrices = given[module_of(piece)]
                rank = len(matrices.lora_a)
                own["down_a"][expert, 0, :rank] = local_share(piece, matrices.lora_a, 1, self._rank)
                own["down_b"][expert, :rank] = matrices.lora_b.t()
                own["ranks"][expert, self._parts] = rank
        return own

    def _check(self, module: str, matrices: LoRAMatrices, sizes: LoRASizes) -> None:
        if matrices.has_extras:
            raise ValueError(
                f"{module}: DoRA and biases of experts are not served; write the adapter into the model with `quintet "
                "merge-lora`, and serve that"
            )
        a, b, (outputs, inputs) = matrices.lora_a, matrices.lora_b, self._shapes[module]
        if (b.shape[0], a.shape[1]) != (outputs, inputs):
            raise ValueError(
                f"{module}: the adapter's A is {list(a.shape)} and B {list(b.shape)}, and an expert has {inputs} "
                f"inputs and {outputs} outputs; it was made for another model"
            )
        self._check_rank(module, matrices, sizes)
