"""Adapters (LoRA) on JAX's devices: tokens are the CPU's, devices share products, and no adapter compiles anything."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quintet import LLM, SamplingParams
from quintet.interface.weights import CheckpointSlice, Weight
from quintet_tools.checkpoints.tiny import variant
from tests.helpers.checkpoints.adapter_files import adapter_request
from tests.helpers.platforms import tpu

pytestmark = tpu.needs_jax

GREEDY = SamplingParams(temperature=0, max_tokens=8, detokenize=False, ignore_eos=True)
PROMPTS: Any = [{"prompt_token_ids": list(range(first, first + 5 * first))} for first in (4, 2, 3, 4)]


def engine(device: str, **settings: Any) -> LLM:
    return LLM(
        str(variant("llama", "plain").folder), device=device, dtype="float32", skip_tokenizer_init=True,
        max_model_len=64, num_pages=40, max_num_seqs=4, max_num_batched_tokens=16, enable_lora=True, max_loras=2,
        max_lora_rank=8, max_cpu_loras=4, compilation_cache_dir=tpu.programs().name, use_tqdm=False, **settings,
    )  # fmt: skip


def tokens(llm: LLM, adapters: list[Any]) -> list[list[int]]:
    found = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=adapters)
    return [list(each.outputs[0].token_ids) for each in found]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 4])
def test_tokens_are_the_cpus_and_another_adapter_compiles_nothing(devices: int, tmp_path: Path) -> None:
    tiny = variant("llama", "plain")
    first, second, third = (adapter_request(tiny, tmp_path, seed, rank) for seed, rank in ((1, 8), (2, 3), (3, 5)))
    batches: list[list[Any]] = [[first, second, None, None], [third, second, None, third]]
    reference, served = engine("cpu"), engine("tpu", tensor_parallel_size=devices)
    count = served._client.engine_plan.ranks.workers[0].main.step.compilations  # type: ignore[attr-defined]
    before, want = count(), [tokens(reference, each) for each in batches]
    assert len({str(each) for each in (want[0][0], want[0][3], want[1][0])}) == 3, "adapters give other tokens"
    assert [tokens(served, each) for each in batches] == want
    assert count() == before > 0


def test_rows_are_written_and_what_a_step_may_read_stays() -> None:
    platform = tpu.platform(2)
    platform.open(0)
    from quintet.platforms.tpu.torchax_bridge import jax_view

    def weight(rows: int, written: tuple[int, int] | None = None) -> Weight:
        part = CheckpointSlice("x", (rows, 4), ((0, rows),))
        return Weight("x", (part,), 0, 0, torch.float32, "vector", rows=written)

    there = platform.place(weight(3), {"x": torch.zeros(3, 4)})
    read = jax_view(there["x"])
    platform.place(weight(1, (1, 1)), {"x": torch.ones(1, 4)}, there)
    assert jax_view(there["x"]).tolist() == [[0] * 4, [1] * 4, [0] * 4]
    assert read.tolist() == [[0] * 4] * 3
    compiled = tpu.compilations()
    platform.place(weight(1, (2, 1)), {"x": torch.full((1, 4), 2.0)}, there)
    assert jax_view(there["x"]).tolist() == [[0] * 4, [1] * 4, [2] * 4] and not compiled
    with pytest.raises(AssertionError, match="the rows lie in the tensor"):
        platform.place(weight(1, (3, 1)), {"x": torch.ones(1, 4)}, there)


def test_devices_talk_no_more_for_adapters_than_sums_and_joins() -> None:
    """Products with adapters stay shared out: each device has its outputs, and no weight is gathered."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from quintet.platforms.tpu.kernels.lora import add_lora

    platform = tpu.platform(4)
    mesh = platform.open(0).mesh
    kinds = {"y": (None, "model"), "x": (), "whole": ()}
    at = {name: NamedSharding(mesh, PartitionSpec(*axes)) for name, axes in kinds.items()}
    shapes = {"y": (8, 64), "x": (8, 32), "a": (2, 1, 4, 32), "b": (2, 4, 64)}
    given = [jax.ShapeDtypeStruct(s, "float32", sharding=at[n if n in at else "whole"]) for n, s in shapes.items()]
    given += [jax.ShapeDtypeStruct(s, "int32", sharding=at["whole"]) for s in ((2, 1), (8,))]
    step = jax.jit(lambda *args: add_lora(*args, 0, ((0, 64),)), out_shardings=at["y"])
    text = step.lower(*given).compile().as_text()
    assert not [word for word in ("all-gather", "all-reduce", "all-to-all", "permute") if f" {word}" in text]
