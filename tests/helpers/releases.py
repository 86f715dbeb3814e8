"""Skips tests of model types that an older release of transformers lacks. The release of these tests lacks none."""

from typing import NoReturn

import pytest
import transformers
from packaging.version import Version
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from quintet_tools.checkpoints.tiny import Tiny

RELEASE = Version("5.23.0")  # all model types of the tests are in it


def need_model_type(model_type: str) -> None:
    """Skips the test if this release has no such causal model or encoder, or one that computes its attention itself."""
    if model_type not in transformers.CONFIG_MAPPING:
        _skip(model_type)
    model = getattr(transformers, {**MODEL_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}[model_type])
    if not model._supports_attention_backend:
        _skip(f"_supports_attention_backend of {model.__name__}")


def need_logits(tiny: Tiny) -> None:
    """Skips the test if this release cannot run its own model, such as PhiMoE with rotary scaling in 5.0."""
    try:
        tiny.logits([0])
    except AttributeError as error:
        _skip(f"logits of {tiny.config.model_type}: {error}")


def _skip(missing: str) -> NoReturn:
    assert Version(transformers.__version__) < RELEASE, f"transformers {transformers.__version__} has no {missing}"
    pytest.skip(f"transformers {transformers.__version__} has no {missing}")
