"""The files count, not config.json: a head that differs from the token embedding is used though the config has
tie_word_embeddings=true, as transformers 5 and vLLM do (report 8)."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quintet_tools.checkpoints.tiny import EVERY, Tiny, hushed, make
from tests.helpers.platforms.engines import answers, continued, engine

# families with heads of other names or makes, and some with llama's
FAMILIES = (
    "llama", "qwen2", "gemma2", "granite", "gpt_neox", "opt", "mpt", "gpt_neo", "mamba", "mamba2", "gpt_bigcode",
    "gpt2", "bloom", "gptj", "falcon", "xglm", "phi", "cohere2", "zamba2",
)  # fmt: skip
WARNING = "config.json has tie_word_embeddings=true, and the files hold an lm_head that differs"


def with_head(family: str, folder: Path, head: str = "random") -> Tiny:
    """A checkpoint with tie_word_embeddings in its config.json and a head in its files."""
    settings = next(iter(EVERY[family].values()))
    tiny = make(family, {**settings, "tie_word_embeddings": family == "zamba2"})
    tensors = load_file(tiny.folder / "model.safetensors")
    table = max((t for t in tensors.values() if t.dim() == 2 and t.shape[0] == tiny.config.vocab_size), key=len)
    if head == "random":
        made = torch.randn(table.shape, generator=torch.Generator().manual_seed(3)) * table.std()
        tensors["embed_out.weight" if "embed_out.weight" in tensors else "lm_head.weight"] = made.to(table.dtype)
    else:
        tensors["lm_head.weight"] = table.clone()
        tensors = {name: table.clone() if t.shape == table.shape else t for name, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((tiny.folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with hushed():
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return Tiny(folder, tiny.config, reference.eval())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_files_head_is_used(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny = with_head(family, tmp_path)
    with caplog.at_level(logging.WARNING, "quintet"):
        assert answers(engine(tiny), 6) == continued(tiny, 6)
    assert WARNING in caplog.text


@pytest.mark.parametrize("settings", [{"tensor_parallel_size": 2}, {"model_impl": "transformers"}], ids=str)
def test_the_files_head_is_used_by(settings: dict[str, Any], tmp_path: Path) -> None:
    tiny = with_head("llama", tmp_path)
    assert answers(engine(tiny, **settings), 6) == continued(tiny, 6)


def test_a_head_that_equals_the_embedding_is_tied_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny = with_head("llama", tmp_path, "equal")
    with caplog.at_level(logging.WARNING, "quintet"):
        assert answers(engine(tiny), 6) == continued(tiny, 6)
    assert WARNING not in caplog.text


def test_layers_before_the_product_of_a_head_are_no_head() -> None:
    """ModernBERT's decoder has them under the name of a head, and its product is tied."""
    tiny = make("modernbert-decoder", EVERY["modernbert-decoder"]["plain"])
    assert answers(engine(tiny), 6) == continued(tiny, 6)


def test_weights_with_a_head_of_their_own_are_not_read_into_a_tied_model(tmp_path: Path) -> None:
    tied = make("llama", {**next(iter(EVERY["llama"].values())), "tie_word_embeddings": True})
    (tmp_path / "own").mkdir()
    own = with_head("llama", tmp_path / "own")
    llm = engine(tied)
    with pytest.raises(ValueError, match=r"an lm_head\.weight that differs from the token embedding"):
        llm.reload_weights(str(own.folder))
