"""examples/training/grpo.py trains: the reward rises, and the sampler stays with the trainer."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[3] / "examples" / "training" / "grpo.py"


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grpo_example", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rewards_and_advantages() -> None:
    example = loaded()
    assert [example.reward(text, 26) for text in ("13 + 13 = 26", "26 + 1", "none", "")] == [1, 0, 0, 0]
    better = example.advantages([1.0, 0.0, 0.0, 0.0])
    assert better[0] > 1 and better[1] == better[2] < 0 and abs(sum(better)) < 1e-5
    assert example.advantages([1.0, 1.0]) == [0, 0], "a group that is all alike teaches nothing"


@pytest.mark.sweep
@pytest.mark.timeout(1800)
def test_the_reward_rises() -> None:
    history = loaded().train(16)
    first, last = (sum(each["reward"] for each in part) / 4 for part in (history[:4], history[-4:]))
    assert last > first + 0.2
    assert max(each["mismatch"] for each in history) < 1e-3, "the sampler has the trainer's weights in each step"
