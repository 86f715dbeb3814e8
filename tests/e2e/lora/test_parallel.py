"""Adapters where a model or its requests are shared out over ranks, and beside other features."""

from pathlib import Path
from typing import Any

import pytest

from quintet import LoRARequest, SamplingParams
from quintet_tools.checkpoints.tiny import FAMILIES, Tiny, make
from tests.e2e.lora.adapters import PROMPTS, adapted, ask, products, request_of, served, tokens_of

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, detokenize=False, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return make("llama", FAMILIES["llama"]["plain"])


@pytest.fixture(scope="module")
def mixed(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest | None]:
    """None, and adapters of all products, of ranks 3, 5 and 8."""
    found: list[LoRARequest | None] = [None]
    for rank in (3, 5, 8):
        folder = tmp_path_factory.mktemp(f"adapter{rank}")
        adapted(tiny.reference, products(tiny.reference), folder, seed=rank, r=rank)
        found.append(request_of(folder))
    return found


@pytest.fixture(scope="module")
def want(tiny: Tiny, mixed: list[LoRARequest | None]) -> list[list[int]]:
    with served(tiny, max_loras=3) as llm:
        return tokens_of(ask(llm, [PROMPTS[0]] * 4, mixed, PARAMS))


@pytest.mark.parametrize(
    "settings",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        pytest.param({"data_parallel_size": 2}, marks=pytest.mark.slow),
        {"model_impl": "transformers"},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"enforce_eager": True},
    ],
    ids=lambda each: next(iter(each)),
)
def test_the_tokens_are_those_of_one_rank(
    settings: dict[str, Any], tiny: Tiny, mixed: list[LoRARequest | None], want: list[list[int]]
) -> None:
    with served(tiny, max_loras=2, **settings) as llm:
        for _ in range(3):  # steps that are recorded, proven and replayed
            assert tokens_of(ask(llm, [PROMPTS[0]] * 4, mixed, PARAMS)) == want


def test_ranks_refuse_an_adapter_together(tiny: Tiny, tmp_path: Path) -> None:
    other = make("llama", {**FAMILIES["llama"]["plain"], "hidden_size": 96, "num_attention_heads": 6})
    adapted(other.reference, {"q_proj"}, tmp_path / "adapter")
    with served(tiny, tensor_parallel_size=2) as llm:
        with pytest.raises(ValueError, match="it was made for another model"):
            ask(llm, PROMPTS, request_of(tmp_path / "adapter"))
        assert len(tokens_of(ask(llm, PROMPTS, None))) == 2


def test_an_engine_that_slept_writes_its_adapters_again(
    tiny: Tiny, mixed: list[LoRARequest | None], want: list[list[int]]
) -> None:
    with served(tiny, max_loras=3) as llm:
        for level in (1, 2):
            assert tokens_of(ask(llm, [PROMPTS[0]] * 4, mixed, PARAMS)) == want
            llm.sleep(level)
            llm.wake_up()
        assert tokens_of(ask(llm, [PROMPTS[0]] * 4, mixed, PARAMS)) == want
        llm.reload_weights()
        assert tokens_of(ask(llm, [PROMPTS[0]] * 4, mixed, PARAMS)) == want
