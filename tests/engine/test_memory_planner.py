"""The memory plan: what fits, and what is said when it does not."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from quintet.config import EngineConfig
from quintet.engine.kv_cache.groups import KVCacheGroup, KVCacheLayout
from quintet.engine.memory_planner import ModelMemory, plan_memory
from quintet.interface.types import Estimate, Layout, Memory

MIB = 2**20
PAGE = Layout(torch.int8, (MIB,))
TAKES = Estimate(weights=600 * MIB, workspace=100 * MIB)
SIZES = ModelMemory(
    TAKES, KVCacheLayout((KVCacheGroup(),), (PAGE,)), max_model_len=1600, max_step_tokens=64
)  # 100 pages of 16 tokens
HOST = Memory(free=2000 * MIB, total=4000 * MIB, peak=0)


def plan(sizes: ModelMemory = SIZES, memory: Memory = HOST, **settings: Any) -> Any:
    return plan_memory(EngineConfig(**{"max_num_seqs": 4, **settings}), sizes, memory)


def test_the_cache_gets_what_weights_and_activations_leave() -> None:
    made = plan(gpu_memory_utilization=0.4, max_num_seqs=256)  # 1600 MiB in all
    assert made.num_pages == 900 and made.max_model_len == 1600
    assert "9.0 requests of that length fit at once" in str(made)  # 899 pages, of which each takes 100
    assert made.kv_cache_tokens == 899 * 16


def test_captured_steps_have_their_place_and_are_told() -> None:
    made = plan(
        replace(SIZES, estimate=TAKES._replace(captured=100 * MIB)), gpu_memory_utilization=0.4, max_num_seqs=256
    )
    assert made.num_pages == 800 and "captured steps 0.10 GiB" in str(made) and "captured" not in str(plan())
    with pytest.raises(ValueError, match=r"0\.59 GiB of 0\.78 GiB hold weights and 0\.20 GiB activations"):
        plan(replace(SIZES, estimate=TAKES._replace(captured=100 * MIB)), gpu_memory_utilization=0.2)


def test_the_budget_is_never_more_than_what_is_free() -> None:
    assert plan(gpu_memory_utilization=0.9, max_num_seqs=256).num_pages == 1300


def test_more_pages_than_could_be_used_are_not_taken() -> None:
    assert plan(enable_prefix_caching=False).num_pages == 4 * 100 + 1


def test_sizes_by_hand() -> None:
    assert plan(num_pages=150).num_pages == 150
    assert plan(kv_cache_memory_bytes=120 * MIB).num_pages == 120


def test_auto_takes_the_longest_that_fits() -> None:
    assert plan(num_pages=51, max_model_len="auto").max_model_len == 800
    assert plan(num_pages=500, max_model_len="auto").max_model_len == 1600


@pytest.mark.parametrize(
    ("settings", "sizes", "says"),
    [
        ({"num_pages": 51}, SIZES, ["needs 101 pages", "51 fit", "num_pages=51", "lower max_model_len to 800"]),
        ({"kv_cache_memory_bytes": 10 * MIB}, SIZES, ["10 fit", "kv_cache_memory_bytes=10485760", "to 144"]),
        ({"gpu_memory_utilization": 0.2}, SIZES, ["100 fit", "0.59 GiB of 0.78 GiB hold weights", "raise gpu_memory"]),
        ({}, replace(SIZES, estimate=Estimate(3000 * MIB, 0)), ["0 fit", "choose a smaller model"]),
    ],
)
def test_what_does_not_fit_says_the_numbers_and_the_knob(
    settings: dict[str, Any], sizes: ModelMemory, says: list[str]
) -> None:
    with pytest.raises(ValueError) as error:
        plan(sizes, **settings)
    for words in says:
        assert words in str(error.value)


def test_behind_windows_a_request_takes_what_they_need() -> None:
    """Half of the layers see 128 tokens: with 100 pages for one request of all layers' whole length, half were lost."""
    groups = (KVCacheGroup(), KVCacheGroup(window=128))
    sizes = replace(SIZES, kv_cache_layout=KVCacheLayout(groups, (PAGE,)))
    made = plan(sizes, num_pages=200)
    assert sizes.pages_for(1600, 16) == 100 + 13 and made.max_model_len == 1600
    assert plan(sizes, num_pages=60, max_model_len="auto").max_model_len == 46 * 16
    assert "60 fit" in str(pytest.raises(ValueError, plan, sizes, num_pages=60).value)


def test_a_model_that_keeps_nothing_has_no_pages_to_plan() -> None:
    made = plan(replace(SIZES, kv_cache_layout=KVCacheLayout((), ())))
    assert made.max_model_len == 1600 and made.kv_bytes == 0
