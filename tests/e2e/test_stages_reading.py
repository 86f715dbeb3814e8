"""Layers in stages that read more than what the one before them gives: the bits of one process."""

from typing import Any

import pytest

from quintet import SamplingParams
from quintet.conformance.tiny import variant
from tests.e2e.test_stages import DRAWN, PROMPTS, SCORED, SMALL, Threads

pytest.importorskip("quintet._cpu", reason="ranks on the CPU meet by the compiled extension")

# family, its variant, stages, and ranks of each. What is read goes past a stage, or a stage has none who reads it
CASES: list[tuple[str, str, int, int]] = [
    ("rwkv7", "plain", 3, 1),
    ("rwkv7", "plain", 2, 2),
    ("solar", "plain", 3, 1),
    ("zamba2", "plain", 4, 1),  # the second stage keeps states alone, the last has the first's shared block
    ("gemma3n_text", "plain", 3, 1),
]


def told(threads: Threads, params: SamplingParams) -> list[Any]:
    for place, prompt in enumerate(PROMPTS):
        threads.add(f"request {place}", prompt["prompt_token_ids"], params)
    threads.run()
    return [(threads.said[f"request {place}"], threads.scored[f"request {place}"]) for place in range(len(PROMPTS))]


@pytest.mark.parametrize(("family", "kind", "stages", "share"), CASES)
def test_what_is_read_of_earlier_stages_is_handed_on(family: str, kind: str, stages: int, share: int) -> None:
    tiny = variant(family, kind)
    one, several = Threads(tiny, 1, share, **SMALL), Threads(tiny, stages, share, **SMALL)
    for params in (SCORED, DRAWN):
        want = [told(one, params) for _ in range(2)]
        assert [told(several, params) for _ in range(2)] == want  # again from recorded steps, and cached pages


def test_a_shared_block_is_on_the_stages_that_use_it_under_one_name() -> None:
    threads = Threads(variant("zamba2", "plain"), 4, **SMALL)
    named = [dict(each.ranks.workers[0].model.named_parameters()) for each in threads.prepared]
    shared = "model.layers.{}.shared_transformer.self_attn.qkv.weight"
    assert [shared.format(0) in each for each in named] == [True, False, False, True]
    assert [shared.format(2) in each for each in named] == [False, False, True, False]
    assert not any(shared.format(3) in each for each in named)
