"""Any exception of transformers' code at load is one sentence (claim 3; attack A11)."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.core_model_loading import WeightConverter

import quintet
from quintet.config import EngineConfig
from quintet.engine.startup import prepare
from quintet.models.transformers import weight_names
from quintet.models.transformers.weight_names import Made, Outline
from quintet_tools.checkpoints.tiny import variant
from tests.helpers.platforms.engines import answers, engine

BUNDLED_FOLDER = Path(quintet.__file__).parent / "bundled"
BACKEND = {"model_impl": "transformers"}


class AmbiguousError(RuntimeError):
    """As transformers raises for an entry that differs between layers."""


def failing(*args: Any, **kwargs: Any) -> Any:
    raise AmbiguousError("'head_dim' is a per-layer attribute\nand may vary")


@pytest.mark.parametrize("what", ["from_config", "modules", "names", "config"])
def test_the_backend_says_what_failed(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = variant("llama", "plain")
    if what == "from_config":
        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", failing)
    elif what == "modules":
        monkeypatch.setattr(transformers.LlamaForCausalLM, "get_output_embeddings", failing)
    elif what == "names":
        monkeypatch.setattr(weight_names.WeightNames, "_renamed", failing)
    else:
        monkeypatch.setattr(transformers.LlamaConfig, "__init__", failing)
    with pytest.raises(ValueError, match=r"'head_dim' is a per-layer attribute and may vary"):
        engine(tiny, **BACKEND)


def test_a_converter_gets_a_model_that_has_parameters() -> None:
    """Sarvam's converter looks up the shape of what it makes."""
    seen = []

    class Looking:
        def convert(self, tensors: Any, source_patterns: Any, target_patterns: Any, **more: Any) -> Any:
            seen.append(more["model"].get_parameter("model.norm.weight").shape)
            return {target_patterns[0]: next(iter(tensors.values()))[0]}

    model = transformers.LlamaForCausalLM(variant("llama", "plain").config)
    converter = WeightConverter("a.weight", "b.weight", operations=[Looking()])
    entry = type("Entry", (), {"shape": (3,), "dtype": torch.float32, "tensor": lambda self: torch.ones(3)})()
    made = Made("b.weight", converter, (("a.weight", (entry,)),), "b.weight", Outline(model))
    assert made.shape == (3,) and seen == [model.model.norm.weight.shape]


@pytest.mark.parametrize("settings", [{}, BACKEND, {"runner": "pooling"}], ids=str)
@pytest.mark.parametrize(
    "entries",
    [
        {"model_type": {"a": 1}},  # attack A11
        {"model_type": ["llama"]},
        {"text_config": {"model_type": {"a": 1}}},
        {"model_type": "llava", "text_config": {"model_type": {"a": 1}}},
        {"model_type": "zz", "text_config": {"model_type": {"a": 1}}},
        {"model_type": "zz", "llm_config": {"model_type": "llama", "hidden_size": "x"}},
    ],
    ids=str,
)
def test_an_odd_config_is_refused_in_a_sentence(
    entries: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = shutil.copytree(BUNDLED_FOLDER, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **entries}))
    with pytest.raises(ValueError, match=r"\w+"):
        prepare(EngineConfig.from_kwargs(model=str(folder), device="cpu", **settings), met=False)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_interfaces_of_transformers_5_0_serve(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names modules in float32 by no method, and converters give their record of errors beside the tensors."""
    tiny, convert = variant(family, "plain"), WeightConverter.convert
    monkeypatch.setattr(WeightConverter, "convert", lambda self, *args, **more: (convert(self, *args, **more), {}))
    monkeypatch.delattr(transformers.PreTrainedModel, "_get_dtype_plan", raising=False)
    tokens = []
    for how in ("quintet", "transformers"):
        with engine(tiny, model_impl=how, dtype="float32") as llm:
            tokens += [answers(llm, 8)]
    assert tokens[0] == tokens[1]
