"""Encoders in GGUF files that llama.cpp's converter wrote, against transformers' hidden states."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from quintet import LLM, PoolingParams
from quintet.gguf.config import config
from quintet.gguf.file import read
from quintet.gguf.model import GGUFModel

FOLDER = Path(__file__).parents[2] / "data" / "quantized" / "gguf"
STORED = load_file(FOLDER / "logits.safetensors")
IDS = STORED["ids"].tolist()


@pytest.mark.parametrize(
    "name", ["bert", "jina-bert-v2", "jina-bert-v2-normed", "modern-bert", "nomic-bert", "roberta"]
)
def test_hidden_states_are_transformers_and_pooled_as_the_file_says(name: str) -> None:
    wanted = STORED[f"{name}.transformers"].numpy()
    file = FOLDER / f"{name}.gguf"
    settings = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True}
    if any(each.kind.name == "Q8_0" for each in read(file).tensors.values()):
        settings["activation_bits"] = 16
    with LLM(file, use_tqdm=False, **settings) as llm:
        params = PoolingParams(task="token_embed", normalize=False)
        (states,) = llm.encode([IDS], params, use_tqdm=False)
        (pooled,) = llm.embed([IDS], use_tqdm=False)
    np.testing.assert_allclose(states.outputs.data, wanted, atol=2e-3 * float(wanted.std()))
    mean = wanted.mean(0) / np.linalg.norm(wanted.mean(0))
    np.testing.assert_allclose(pooled.outputs.embedding, mean, atol=1e-4)


def test_a_classifier_is_refused() -> None:
    file = read(FOLDER / "bert.gguf")
    heads = {**file.tensors, "cls.weight": file.tensors["token_embd.weight"]}
    with pytest.raises(ValueError, match="has a classifier behind the encoder, which quintet does not read"):
        config(GGUFModel([dataclasses.replace(file, tensors=heads)]))
