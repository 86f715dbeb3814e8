"""An adapter that fails costs the requests that name it, and no others."""

import pytest
import torch

from quintet import LLM, LoRARequest
from quintet.engine.engine import Engine
from quintet.engine.lora.manager import LoRAManager
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
    pools[last] = (pools[last][0], torch.zeros(1, 1, 1, 1))


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
