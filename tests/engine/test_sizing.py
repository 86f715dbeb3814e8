"""The default of a step's tokens: few where a step's results lie in the host's memory, beside the weights."""

from typing import Any

import pytest

from quintet.config import EngineConfig
from quintet.config.scheduler import HOST_STEP_TOKENS, STEP_TOKENS
from quintet.engine.sizing import scheduler_limits, with_step_tokens
from quintet.engine.startup import prepare
from quintet.platforms import choose

HOST = choose("cpu").capabilities
GUESS = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    "settings, tokens",
    [
        ({}, HOST_STEP_TOKENS),
        ({"max_num_seqs": 400}, 800),
        ({"max_num_seqs": 5000}, STEP_TOKENS),
        ({"max_num_seqs": 256, "speculative_config": GUESS}, 256 * 6),
        ({"runner": "pooling"}, STEP_TOKENS),
        ({"enable_chunked_prefill": False}, STEP_TOKENS),
        ({"max_num_batched_tokens": 2048}, 2048),
        ({"max_num_batched_tokens": 7}, 7),
    ],
)
def test_default_step_tokens(settings: dict[str, Any], tokens: int) -> None:
    reasons: list[str] = []
    config = with_step_tokens(EngineConfig(**settings), HOST, False, reasons)
    assert config.max_num_batched_tokens == tokens
    assert [f"max_num_batched_tokens={tokens}: " in each for each in reasons] == [True] * (
        not settings.keys() & {"runner", "enable_chunked_prefill", "max_num_batched_tokens"}
    )


def test_the_engine_plans_such_steps() -> None:
    plan = prepare(EngineConfig(model="bundled", device="cpu"), met=False)
    assert plan.config.max_num_batched_tokens == HOST_STEP_TOKENS
    assert scheduler_limits(plan.config, plan.memory_plan).max_num_batched_tokens == HOST_STEP_TOKENS
    assert any(each.startswith(f"max_num_batched_tokens={HOST_STEP_TOKENS}: ") for each in plan.reasons)


def test_steps_hold_2048_tokens_where_pictures_come_whole_or_weights_lie_on_a_device() -> None:
    assert with_step_tokens(EngineConfig(), HOST, True, []).max_num_batched_tokens == STEP_TOKENS
    assert (
        with_step_tokens(EngineConfig(), choose("null").capabilities, False, []).max_num_batched_tokens == STEP_TOKENS
    )
