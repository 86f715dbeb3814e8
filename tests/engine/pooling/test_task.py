"""Which models are run for numbers, by the names that checkpoints give themselves."""

from pathlib import Path

import pytest
from transformers.models.auto import modeling_auto

from quintet.config import EngineConfig
from quintet.hub.pooling_task import is_pooling_model
from quintet.models import families
from quintet_tools.checkpoints.custom_families import PUBLISHED

CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def numbers(*architectures: str, **settings: str) -> bool:
    return is_pooling_model(EngineConfig(**settings), {"architectures": [*architectures]}, Path("nowhere"))  # type: ignore[arg-type]


def test_every_family_that_generates_does_so() -> None:
    """Also those whose class is called a model and no more, as ChatGLM's is."""
    theirs = [CAUSAL[kind] for kind in families() if kind in CAUSAL]
    generating = [each for each in theirs if isinstance(each, str) and not each.startswith(("Bert", "Electra", "Rob"))]
    published = [each.architecture for each in PUBLISHED.values()]
    assert "ChatGLMModel" in published and len(generating) > 50
    assert [name for name in (*generating, *published) if numbers(name)] == []


@pytest.mark.parametrize(
    "name",
    [
        "BertModel", "BertForMaskedLM", "LlamaModel", "Qwen3ForSequenceClassification", "BertForTokenClassification",
        "Qwen2ForRewardModel", "Qwen2ForProcessRewardModel", "ModernBertModel", "HF_ColBERT",
    ],
)  # fmt: skip
def test_models_of_numbers_are_known_by_their_class(name: str) -> None:
    assert numbers(name) and not numbers(name, runner="generate") and numbers("LlamaForCausalLM", runner="pooling")
