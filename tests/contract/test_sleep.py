"""A platform that can run here sleeps and wakes as it was, if it says that it can; else it says so when asked."""

import pytest

from quintet.config import EngineConfig
from quintet.conformance.harness.worker_runner import random_prompts
from quintet.interface.platform import ASIDE, DROPPED
from quintet.platforms import choose, discover
from quintet_tools.checkpoints.tiny import VOCAB, variant
from tests.helpers.platforms.run_model import Runner
from tests.helpers.platforms.tpu import programs

HERE = [found.name for found in discover() if found.available and found.name != "null"]
PROMPTS = random_prompts(3, (9, 20), VOCAB)


@pytest.mark.parametrize("name", HERE)
def test_awake_again_it_computes_the_same(name: str) -> None:
    chosen = choose(name)
    settled, _ = chosen.platform.configure(EngineConfig(device=name, compilation_cache_dir=programs().name))
    made = Runner(variant("llama", "plain"), platform=chosen.platform(settled), sizes=(64,))
    if not chosen.capabilities.sleep:
        with pytest.raises(NotImplementedError, match="cannot sleep"):
            made.worker.sleep(ASIDE)
        return
    before = made.greedy(PROMPTS, 4)
    for level in (ASIDE, DROPPED, ASIDE):
        assert made.worker.sleep(level) > 0
        with pytest.raises(RuntimeError, match="asleep"):
            made.worker.main.step((), ())  # type: ignore[arg-type]
        made.worker.wake()
        assert made.greedy(PROMPTS, 4) == before
