"""Pools of adapters beside products in every form that weights are held in."""

from typing import Any

import pytest
import torch
from torch import Tensor

from quintet.config import EngineConfig
from quintet.engine.client import EngineClient
from quintet.layers.linear import ColumnParallelLinear, SubLinear
from quintet.layers.lora import LoRAMatrices, LoRAPools
from quintet_tools.checkpoints.tiny import FAMILIES, make

FORMS = (None, "int8", "int4", "w8a8", "w4a8", "fp8")


def pools_of(settings: dict[str, Any]) -> tuple[EngineClient, LoRAPools]:
    tiny = make("llama", {**FAMILIES["llama"]["plain"], "hidden_size": 96, "head_dim": 16, "intermediate_size": 64})
    client = EngineClient(
        EngineConfig(
            str(tiny.folder), device="cpu", dtype="float32", skip_tokenizer_init=True, max_model_len=64,
            enable_lora=True, max_loras=2, max_lora_rank=6, weights_cache="none", kv_cache_memory_bytes=1 << 24,
            **settings,
        )
    )  # fmt: skip
    pools = client.engine_plan.ranks.workers[0].lora
    assert pools is not None
    return client, pools


def random_matrices(pools: LoRAPools, product: ColumnParallelLinear, path: str, rank: int) -> dict[str, LoRAMatrices]:
    rows: dict[str, int] = {}
    for part in product.output_slices(path):
        rows[part.source.removesuffix(".weight")] = part.total or part.shape[0]
    return {
        name: LoRAMatrices(torch.randn(rank, product.inputs.total), torch.randn(count, rank))
        for name, count in rows.items()
    }


@pytest.mark.parametrize("form", FORMS)
def test_a_product_and_its_adapter_are_the_product_and_what_the_adapter_adds(form: str | None) -> None:
    torch.manual_seed(0)
    client, pools = pools_of({"quantization": form} if form else {})
    worker = client.engine_plan.ranks.workers[0]
    tried = 0
    for path, layer in worker.model.named_modules():
        if not isinstance(layer, ColumnParallelLinear) or isinstance(layer, SubLinear):
            continue
        matrices = [random_matrices(pools, layer, path, rank) for rank in (4, 6)]
        for slot, each in enumerate(matrices):
            pools.write(worker.platform, slot, pools.pack(each))
        x = torch.randn(5, layer.inputs.total)
        slots = torch.tensor([1, 0, 2, 2, 0], dtype=torch.int32)
        step = layer._lora
        assert step is not None
        with torch.inference_mode():
            step.slots = None
            plain = layer(x).clone()
            step.slots = slots
            got = layer(x).clone()
        assert torch.equal(got[[1, 4]], plain[[1, 4]])
        want = plain.double().clone()
        for token, slot in enumerate(slots.tolist()):
            if slot:
                want[token] += _added(matrices[slot - 1], layer, path, x[token])
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-4 * float(want.abs().max()))
        assert not torch.allclose(got, plain)
        step.slots = None
        tried += 1
    assert tried == 4 * 3 + 1
    client.close()


def _added(matrices: dict[str, LoRAMatrices], layer: ColumnParallelLinear, path: str, x: Tensor) -> Tensor:
    parts = list(dict.fromkeys(part.source.removesuffix(".weight") for part in layer.output_slices(path)))
    return torch.cat([matrices[each].lora_b.double() @ (matrices[each].lora_a.double() @ x.double()) for each in parts])
