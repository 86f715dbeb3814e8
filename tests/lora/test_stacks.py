"""Stacks of experts whose adapters have inputs and outputs exchanged, or may have."""

import logging
from pathlib import Path

import pytest
import torch

from quintet.lora import stacks
from quintet.lora.adapter import LoRAAdapter, LoRAWeights
from quintet.lora.peft_config import parse_peft_config
from quintet.quantize.lora.plan import BaseTensor, plan_merge

HIDDEN, WIDTH = 8, 4  # gate and up of an expert are square
PLAIN = {"gate_up_proj": (2 * WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}


def modules(*names: str, exchanged: bool) -> dict[str, LoRAWeights]:
    found = {}
    for layer in range(2):
        for name in names:
            outputs, inputs = PLAIN[name][::-1] if exchanged else PLAIN[name]
            lora_a, lora_b = torch.ones(2, 1, inputs), torch.ones(2, outputs, 1)
            found[f"layers.{layer}.mlp.experts.{name}"] = LoRAWeights(lora_a, lora_b, 1.0)
    return found


@pytest.mark.parametrize("exchanged", [False, True])
def test_the_other_stack_tells_of_square_ones(exchanged: bool, caplog: pytest.LogCaptureFixture) -> None:
    adapter = modules("gate_up_proj", "down_proj", exchanged=exchanged)
    assert all(stacks.is_transposed(name, adapter, (HIDDEN, WIDTH)) is exchanged for name in adapter)
    assert not caplog.records


def test_square_ones_alone_are_taken_for_plain_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    adapter = modules("gate_up_proj", exchanged=False)
    with caplog.at_level(logging.WARNING):
        assert not any(stacks.is_transposed(name, adapter, (HIDDEN, WIDTH)) for name in adapter)
    (record,) = caplog.records
    assert "layers.0.mlp.experts.gate_up_proj" in record.getMessage()
    assert "A has their inputs, and B their outputs" in record.getMessage()


def test_a_merge_warns_of_square_ones_alone(caplog: pytest.LogCaptureFixture) -> None:
    adapter = modules("gate_up_proj", exchanged=False)
    base = {name: BaseTensor((2, 2 * WIDTH, HIDDEN), torch.float32) for name in adapter}
    settings = parse_peft_config({"peft_type": "LORA", "r": 1, "lora_alpha": 1}, Path())
    with caplog.at_level(logging.WARNING):
        plan = plan_merge(Path(), (LoRAAdapter(b"", adapter, {}, 1, "", 0), settings), base, ("qwen3_moe", False))
    assert not any(change.transposed for change in plan.changes.values())
    (record,) = caplog.records
    assert "B and A are in the order of the base's dimensions" in record.getMessage()
