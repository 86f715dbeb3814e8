"""Weights with an adapter's change added: computed in blocks of rows, they are those computed at once."""

import pytest
import torch

from quintet.lora import merge
from quintet.lora.adapter import LoRAWeights
from quintet.lora.merge import merged_weight


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(("transposed", "embedding"), [(False, False), (True, False), (False, True)])
def test_blocks_of_rows_are_the_whole(
    dora: bool, transposed: bool, embedding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "_ROWS", 5)  # does not divide the rows
    torch.manual_seed(1)
    outputs, inputs = 12, 17
    lora = LoRAWeights(torch.randn(3, inputs), torch.randn(outputs, 3), 0.7, embedding=embedding)
    if dora:
        lora = LoRAWeights(lora.lora_a, lora.lora_b, 0.7, torch.rand(outputs) + 1, embedding=embedding)
    weight = torch.randn(outputs, inputs)
    turned = transposed or embedding
    wanted = weight + 0.7 * lora.lora_b @ lora.lora_a
    if lora.magnitude is not None:
        wanted *= (lora.magnitude / wanted.norm(dim=1))[:, None]
    merged = merged_weight(weight.T if turned else weight, lora, transposed, torch.float32)
    torch.testing.assert_close(merged.T if turned else merged, wanted)
    half = merged_weight(weight.T if turned else weight, lora, transposed, torch.bfloat16)
    assert torch.equal(half, merged.to(torch.bfloat16))
