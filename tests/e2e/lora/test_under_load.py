"""Far more adapters than slots, and requests in any order: each adapter makes the model say tokens of its own."""

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet import LLM, LoRARequest, SamplingParams
from quintet.conformance.harness.random_adapters import random_adapter
from quintet.engine.engine import Engine
from quintet.lora.adapter import write_adapter
from quintet_tools.checkpoints.tiny import FAMILIES, Tiny, make
from tests.e2e.lora.adapters import ask, request_of, served, tokens_of

MANY, FIRST = 200, 20  # adapters; the first has tokens 20 and 21, the next 22 and 23, ...
SHORT = SamplingParams(max_tokens=3, temperature=0.0, detokenize=False, ignore_eos=True)
STARTS = (3, 40, 77)
THREADS, ROUNDS = 4, 2  # each thread asks for each adapter so many times


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return make("llama", {**FAMILIES["llama"]["plain"], "vocab_size": FIRST + 2 * MANY})


@pytest.fixture(scope="module")
def adapters(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    """Each adds a large number to the logit of one of its tokens and takes it from the other's: which one is large
    depends on all of the model, whose other products are adapted by random numbers."""
    root, found = tmp_path_factory.mktemp("adapters"), []
    for number in range(MANY):
        tensors = {
            f"base_model.model.{name}.lora_{part}.weight": tensor
            for name, pair in random_adapter(tiny, number, 2, "lm_head").items()
            for part, tensor in zip("AB", (pair.lora_a, pair.lora_b), strict=True)
        }
        direction = torch.randn(2, tiny.text.hidden_size, generator=torch.Generator().manual_seed(number))
        signs = torch.zeros(tiny.text.vocab_size, 2)
        signs[FIRST + 2 * number, 0], signs[FIRST + 2 * number + 1, 0] = 1.0, -1.0
        tensors["base_model.model.lm_head.lora_A.weight"] = 1e6 * direction
        tensors["base_model.model.lm_head.lora_B.weight"] = signs
        write_adapter(root / str(number), {"peft_type": "LORA", "r": 2, "lora_alpha": 2}, tensors)
        found.append(request_of(root / str(number)))
    return found


def is_its_own(number: int, ids: Sequence[int]) -> bool:
    return all((each - FIRST) // 2 == number for each in ids)


def check(llm: LLM, adapters: list[LoRARequest], order: list[int], alone: dict[tuple[int, int], list[int]]) -> None:
    """Asks for adapters in this order, at once."""
    starts = [STARTS[at % 3] for at in range(len(order))]
    outputs = ask(llm, [[start, 4, 5] for start in starts], [adapters[number] for number in order], SHORT)
    for number, start, ids in zip(order, starts, tokens_of(outputs), strict=True):
        assert is_its_own(number, ids), (number, ids)
        assert ids == alone.setdefault((number, start), ids), (number, ids)


@settings(derandomize=True, max_examples=6, deadline=None, database=None)
@given(data=st.data())
def test_no_request_gets_the_tokens_of_another_ones_adapter(
    tiny: Tiny, adapters: list[LoRARequest], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, 4), "max_loras")
    order = data.draw(st.lists(st.integers(0, MANY - 1), min_size=20, max_size=60), "adapters")
    with served(tiny, max_loras=count, max_cpu_loras=count + 1, max_num_seqs=6, max_num_batched_tokens=16) as llm:
        check(llm, adapters, order, {})
        assert isinstance(llm._client.engine, Engine) and llm._client.engine.lora is not None
        assert len(llm._client.engine.lora.loaded) <= count + 1


@pytest.mark.slow
def test_two_hundred_adapters_share_eight_slots(tiny: Tiny, adapters: list[LoRARequest]) -> None:
    """Threads ask for all of them in orders of their own; host memory has room for sixteen."""
    with served(tiny, max_loras=8) as llm:
        alone = {}
        for number, request in enumerate(adapters):
            for start in STARTS:
                alone[number, start] = tokens_of(ask(llm, [[start, 4, 5]], request, SHORT))[0]
    assert all(is_its_own(number, ids) for (number, _), ids in alone.items())
    signs = {tuple((each - FIRST) % 2 for each in ids) for ids in alone.values()}
    assert len(signs) > 4, "the rest of the model changes nothing"

    def run(llm: LLM, seed: int) -> None:
        order = list(range(MANY)) * ROUNDS
        random.Random(seed).shuffle(order)
        for at in range(0, len(order), 60):
            check(llm, adapters, order[at : at + 60], alone)

    with (
        served(tiny, max_loras=8, max_cpu_loras=16, max_num_seqs=24, max_num_batched_tokens=64) as llm,
        ThreadPoolExecutor(THREADS) as threads,
    ):
        for future in [threads.submit(run, llm, seed) for seed in range(THREADS)]:
            future.result()
