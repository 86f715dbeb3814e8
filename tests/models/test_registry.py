"""Families are found by their files, and their classes have the names that config.json's `architectures` have."""

import pytest
from transformers.models.auto import modeling_auto

from quintet.layers.decoder import CausalLM
from quintet.models import built_in, built_in_class, families

FILES = sorted({str(built_in(kind)) for kind in families()})
# text models of checkpoints that also see; transformers lists the whole
TEXT_MODELS = {"gemma3": "Gemma3ForCausalLM", "gemma3n": "Gemma3nForCausalLM", "gemma4": "Gemma4ForCausalLM"}


@pytest.mark.parametrize("file", FILES)
def test_a_family_is_named_as_its_architecture(file: str) -> None:
    model = built_in_class(file)
    generates = issubclass(model, CausalLM)
    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if generates else modeling_auto.MODEL_MAPPING_NAMES
    if model.encoder_class is not None:
        names = modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
    assert model.__name__ == TEXT_MODELS.get(file, names.get(file, model.__name__))
    endings = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    assert model.__name__.endswith(endings if generates else "Model")
    assert model.__module__ == f"quintet.models.{file}"


def test_model_types_of_one_file_share_its_class() -> None:
    assert built_in_class("internlm3") is built_in_class("llama")
