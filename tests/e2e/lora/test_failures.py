"""An adapter that fails costs the requests that name it, and no others."""

from pathlib import Path

import pytest
import torch

from quintet import LLM, LoRARequest
from quintet.config import EngineConfig
from quintet.engine.engine import Engine
from quintet.engine.lora.manager import LoRAManager
from quintet.engine.processes.engine_process import check_lora_modules
from quintet.engine.processes.messages import LoadLoRA
from quintet.engine.startup import prepare
from quintet_tools.checkpoints.tiny import FAMILIES, Tiny, make
from tests.e2e.lora.adapters import PROMPTS, adapted, ask, products, request_of, served, tokens_of


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return make("llama", FAMILIES["llama"]["plain"])


@pytest.fixture(scope="module")
def two(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    folders = [tmp_path_factory.mktemp(f"adapter{seed}") for seed in (1, 2)]
    for seed, folder in enumerate(folders):
        adapted(tiny.reference, products(tiny.reference), folder, seed=seed)
    return [request_of(folder) for folder in folders]


def manager_of(llm: LLM) -> LoRAManager:
    engine = llm._client.engine
    assert isinstance(engine, Engine) and engine.lora is not None
    return engine.lora


def break_adapter(llm: LLM, request: LoRARequest) -> None:
    """Gives a tensor of an adapter in host memory a shape that no slot has."""
    reference = llm._client.adapters.reference(request)
    pools = manager_of(llm).load(reference).packed.ranks[0].pools
    assert isinstance(pools, dict)
    last = list(pools)[-1]  # the others were written by then
    pools[last] = {**pools[last], "lora_b": torch.zeros(1, 1, 1, 1)}


def test_an_adapter_that_cannot_be_written_ends_its_own_requests(tiny: Tiny, two: list[LoRARequest]) -> None:
    mixed = [None, two[0], two[1], two[0]]
    with served(tiny, max_loras=2, enable_prefix_caching=True) as llm:
        want = tokens_of(ask(llm, [PROMPTS[0]] * 4, mixed))
    with served(tiny, max_loras=2, enable_prefix_caching=True) as llm:
        break_adapter(llm, two[0])
        outputs = ask(llm, [PROMPTS[0]] * 4, mixed)
        errors = [each.outputs[0].error or "" for each in outputs]
        assert [bool(error) for error in errors] == [False, True, False, True]
        assert f"the adapter {two[0].lora_name!r} cannot be written to the device: " in errors[1]
        assert tokens_of([outputs[0], outputs[2]]) == [want[0], want[2]]
        assert tokens_of(ask(llm, [PROMPTS[0]] * 4, mixed)) == want  # it was read again


def test_an_adapter_of_another_model_is_found_before_weights_are_read(
    tiny: Tiny, two: list[LoRARequest], tmp_path: Path
) -> None:
    other = make("llama", {**FAMILIES["llama"]["plain"], "hidden_size": 96, "num_attention_heads": 6})
    adapted(other.reference, {"q_proj"}, tmp_path)
    config = EngineConfig(str(tiny.folder), device="cpu", enable_lora=True, skip_tokenizer_init=True, max_model_len=64)
    prepared = prepare(config)  # and never launched
    check_lora_modules(prepared, [LoadLoRA("fine", two[0].lora_path)])
    with pytest.raises(ValueError, match=f"^lora_modules: wrong={tmp_path}: .* it was made for another model"):
        check_lora_modules(prepared, [LoadLoRA("fine", two[0].lora_path), LoadLoRA("wrong", str(tmp_path))])
