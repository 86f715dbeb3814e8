"""LoRA of stacks of experts (PEFT's target_parameters): the experts' own parts."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace

from quintet.lora.adapter import LoRAWeights

logger = logging.getLogger(__name__)

GATE_UP, DOWN = "gate_up_proj", "down_proj"


def is_transposed(name: str, modules: Mapping[str, LoRAWeights], sizes: tuple[int, int]) -> bool:
    """True if A of a stack has the outputs, and B the inputs: of a parameter [E, in, out] that PEFT takes for [E, out,
    in], or the other way around. Of a square one the stack beside it tells. `sizes`: an expert's inputs, and the
    features inside it. Where nothing tells, a warning names what is assumed."""
    hidden, width = sizes
    for each in with_sibling(name):
        if each in modules:
            inputs, outputs = (width, hidden) if each.endswith(DOWN) else (hidden, 2 * width)
            if inputs != outputs:
                return shape_of(modules[each]) == (inputs, outputs)
    if hidden:
        warn_of_square(name, modules, "A has their inputs, and B their outputs")
    return False


def warn_of_square(name: str, modules: Mapping[str, LoRAWeights], assumed: str) -> None:
    """Logs which form a stack of square matrices is taken for; of an adapter's layers, the first speaks for all."""
    last = name.rpartition(".")[2]
    if name == next(each for each in modules if each.endswith(last)):
        logger.warning(
            "the adapter changes %s, whose matrices are square, and no other stack of the experts: its form cannot be "
            "known by shapes, and it is assumed that %s. If an older PEFT saved it with inputs and outputs exchanged, "
            "save it again with a newer one",
            name, assumed,
        )  # fmt: skip


def with_sibling(name: str) -> tuple[str, str]:
    """Names of a stack, and of the other one of its experts."""
    parent, _, last = name.rpartition(".")
    return name, f"{parent}.{GATE_UP if last == DOWN else DOWN}"


def shape_of(weights: LoRAWeights) -> tuple[int, int]:
    """Outputs and inputs of each matrix, as A and B have them."""
    return weights.lora_b.shape[-2], weights.lora_a.shape[-1]


def transposed(weights: LoRAWeights) -> LoRAWeights:
    """The change of the transposed weights."""
    return replace(weights, lora_a=weights.lora_b.mT, lora_b=weights.lora_a.mT)


def experts_of(weights: LoRAWeights, parts: int) -> Iterator[LoRAWeights]:
    """Yields the change of each expert's outputs, cut into so many equal parts: gate and up are two."""
    rows = weights.lora_b.shape[1] // parts
    for lora_a, lora_b in zip(weights.lora_a, weights.lora_b, strict=True):
        for first in range(0, parts * rows, rows):
            yield replace(weights, lora_a=lora_a, lora_b=lora_b[first : first + rows])
