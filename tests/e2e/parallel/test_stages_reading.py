"""Layers in stages that read more than what the one before them gives: the bits of one process."""

from typing import Any

import pytest

from quintet import SamplingParams
from quintet.platforms.cpu.graph import Replay
from quintet_tools.checkpoints.tiny import EVERY, Tiny, variant
from tests.e2e.parallel.test_stages import DRAWN, PROMPTS, SCORED, SMALL, Threads

pytest.importorskip("quintet._cpu", reason="ranks on the CPU meet by the compiled extension")

# family, its variant, stages, and ranks of each. What is read goes past a stage, or a stage has none who reads it
CASES: list[tuple[str, str, int, int]] = [
    ("glm5_next_text", "plain", 3, 1),
    ("rwkv7", "plain", 3, 1),
    ("rwkv7", "plain", 2, 2),
    ("solar", "plain", 3, 1),
    ("zamba2", "plain", 4, 1),  # the second stage keeps states alone, the last has the first's shared block
    ("gemma3n_text", "plain", 3, 1),
    ("gemma4_text", "plain", 3, 1),
    ("gemma4_unified_text", "shared", 2, 2),  # without embeddings of layers
]


def told(threads: Threads, params: SamplingParams) -> list[Any]:
    for place, prompt in enumerate(PROMPTS):
        threads.add(f"request {place}", prompt["prompt_token_ids"], params)
    threads.run()
    return [(threads.said[f"request {place}"], threads.scored[f"request {place}"]) for place in range(len(PROMPTS))]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Replay]:
    """The steps of all ranks."""
    found: list[Replay] = []

    class Watched(Replay):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            found.append(self)

    monkeypatch.setattr("quintet.platforms.cpu.platform.Replay", Watched)
    return found


def both(tiny: Tiny, stages: int, share: int = 1) -> list[list[Any]]:
    """What one stage says, and so many: of prompts whose chunks follow one another, and again from recorded steps and
    cached pages."""
    engines = [Threads(tiny, count, share, **SMALL) for count in (1, stages)]
    return [[told(each, params) for params in (SCORED, SCORED, DRAWN, DRAWN)] for each in engines]


@pytest.mark.grid(cases=2)
@pytest.mark.parametrize(("family", "kind", "stages", "share"), CASES)
def test_what_is_read_of_earlier_stages_is_handed_on(
    family: str, kind: str, stages: int, share: int, made: list[Replay]
) -> None:
    one, several = both(variant(family, kind), stages, share)
    assert several == one
    assert len(made) == (1 + stages) * share
    if not made[0].refused:  # steps of rwkv7 and zamba2 call torch, and one process runs them anew as well
        for steps in made:
            assert not steps.refused and any(graph.replays for graph in steps._graphs.values()), "recorded steps served"


@pytest.mark.sweep
@pytest.mark.parametrize("family", EVERY)
def test_every_decoder_is_shared_out(family: str) -> None:
    one, several = both(variant(family, next(iter(EVERY[family]))), 2)
    assert several == one


def test_a_shared_block_is_on_the_stages_that_use_it_under_one_name() -> None:
    threads = Threads(variant("zamba2", "plain"), 4, **SMALL)
    named = [dict(each.ranks.workers[0].model.named_parameters()) for each in threads.prepared]
    shared = "model.layers.{}.shared_transformer.self_attn.qkv.weight"
    assert [shared.format(0) in each for each in named] == [True, False, False, True]
    assert [shared.format(2) in each for each in named] == [False, False, True, False]
    assert not any(shared.format(3) in each for each in named)
