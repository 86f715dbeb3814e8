"""What a checkpoint's answers are, by the names of its classes."""

from pathlib import Path

import pytest

from quintet.config import EngineConfig
from quintet.engine.config_checks import HEADED
from quintet.engine.pooling.plan import wants_numbers


@pytest.mark.parametrize("name", [*HEADED, "LlamaForCausalLM", "GPT2LMHeadModel"])
def test_a_class_with_a_head_for_text_generates_whatever_it_is_called(name: str, tmp_path: Path) -> None:
    assert not wants_numbers(EngineConfig("x"), {"architectures": [name]}, tmp_path)
    assert wants_numbers(EngineConfig("x", runner="pooling"), {"architectures": [name]}, tmp_path)


@pytest.mark.parametrize(
    "name", ["BertModel", "LlamaForSequenceClassification", "Qwen3Model", "InternLM2ForRewardModel"]
)
def test_a_class_without_one_gives_numbers(name: str, tmp_path: Path) -> None:
    assert wants_numbers(EngineConfig("x"), {"architectures": [name]}, tmp_path)
    assert not wants_numbers(EngineConfig("x", runner="generate"), {"architectures": [name]}, tmp_path)
