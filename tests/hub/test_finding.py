"""Arguments that say how a model is found, by vLLM's names: another config, functions over it, files left out."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from quintet import LLM, EngineConfig
from quintet.config import Environment, read_environment
from quintet.engine.startup import prepare
from quintet.hub import modelscope
from quintet.hub.resolve import load_model_config, resolve_config, resolve_model
from tests.helpers.platforms.null_engine import expected, folder, greedy

SETTINGS: dict[str, Any] = {"device": "null", "load_format": "dummy", "skip_tokenizer_init": True}


def told(path: Path, **entries: Any) -> Path:
    """A folder with nothing but a config.json."""
    path.mkdir(exist_ok=True)
    said = json.loads((folder() / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**said, **entries}))
    return path


def test_a_config_of_another_folder_counts(tmp_path: Path) -> None:
    weights, other = tmp_path / "weights", told(tmp_path / "other", vocab_size=61)
    weights.mkdir()
    (other / "generation_config.json").write_text('{"top_k": 7, "eos_token_id": 5}')
    prepared = prepare(EngineConfig(model=str(weights), hf_config_path=other, **SETTINGS))
    assert prepared.vocab_size == 61 and prepared.generation == {"top_k": 7, "eos_token_id": [5]}
    with pytest.raises(FileNotFoundError, match=r"hf_config_path: '.*weights' has no config.json"):
        resolve_config(EngineConfig(model=str(other), hf_config_path=weights), other)


def test_a_function_changes_the_config(tmp_path: Path) -> None:
    def halved(config: Any) -> Any:
        assert type(config).__name__ == "LlamaConfig"
        config.num_hidden_layers //= 2
        config.update({"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 77})
        return config

    llm = LLM(str(folder()), hf_overrides=halved, use_tqdm=False, **SETTINGS)
    config = llm._client.engine_plan.hf_config
    assert (config.num_hidden_layers, config.max_position_embeddings) == (1, 77)
    assert llm.generate([[1]], greedy(), use_tqdm=False)[0].outputs[0].token_ids == expected([1], 8)
    assert load_model_config(folder()).num_hidden_layers == 2, "nothing of it is kept"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda config: None, "hf_overrides is a function, and must return the config; it gave NoneType"),
        (lambda config: config.__class__(num_hidden_layers=10**9), "hf_overrides: num_hidden_layers is 1000000000"),
    ],
)
def test_what_a_function_gives_is_checked(change: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        load_model_config(folder(), change)


def test_patterns_are_left_out_of_a_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = told(tmp_path / "made"), []
    (made / "model.safetensors").touch()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **how: asked.append(how) or str(made))
    config = EngineConfig(model="owner/name", ignore_patterns="original/**/*")
    assert resolve_model(config, Environment()) == made
    assert asked[0]["ignore_patterns"][-1] == "original/**/*" and "*.safetensors" in asked[0]["allow_patterns"]
    assert EngineConfig(ignore_patterns=["a", "b"]).ignore_patterns == ("a", "b")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"tokenizer_mode": "slow"}, "tokenizer_mode is 'slow', and tokenizers are fast here"),
        ({"tokenizer_mode": "fast"}, "tokenizer_mode must be one of auto"),
        ({"config_format": "yaml"}, "config_format must be one of auto, hf"),
        ({"code_revision": "main"}, "code that comes with a model is that of its revision here; give revision"),
        ({"model_loader_extra_config": {"x": 1}}, "model_loader_extra_config has x, .* has no options"),
        ({"ignore_patterns": 3}, "ignore_patterns must be a list"),
    ],
)
def test_what_means_nothing_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        EngineConfig(**settings)
    assert EngineConfig(revision="v1", code_revision="v1").code_revision == "v1"
    assert EngineConfig(tokenizer_mode="hf", config_format="hf", model_loader_extra_config={}).tokenizer_mode == "auto"


# ------------------------------------------------------------------------------------------------------- ModelScope

MODELSCOPE = Environment(use_modelscope=True)


class Scope:
    """ModelScope's package, as far as we ask it."""

    def __init__(self, folder: Path | None) -> None:
        self.folder, self.asked = folder, []  # type: ignore[var-annotated]

    def HubApi(self) -> "Scope":
        return self

    def get_model_files(self, name: str, **how: Any) -> list[dict[str, str]]:
        return [{"Path": "config.json", "Type": "blob"}, {"Path": "more", "Type": "tree"}]

    def snapshot_download(self, name: str, **how: Any) -> str:
        self.asked.append((name, how))
        if self.folder is None:
            raise RuntimeError("no such model")
        return str(self.folder)


def test_modelscope_stands_in_for_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = told(tmp_path / "made")
    (made / "model.safetensors").touch()
    scope = Scope(made)
    monkeypatch.setattr(modelscope, "_import_package", lambda module: scope)
    config = EngineConfig(model="owner/name", revision="v1", ignore_patterns="*.onnx", download_dir=str(tmp_path))
    assert resolve_model(config, MODELSCOPE) == made
    ((name, how),) = scope.asked
    assert (name, how["revision"], how["cache_dir"], how["local_files_only"]) == (
        "owner/name",
        "v1",
        str(tmp_path),
        False,
    )
    assert "*.onnx" in how["ignore_patterns"] and "*.safetensors" in how["allow_patterns"]
    assert modelscope.list_files(modelscope.ModelScopeRequest("a/b", None)) == ["config.json"]
    scope.folder = None
    with pytest.raises(ConnectionError, match="'owner/name' at revision 'v1' from ModelScope: no such model"):
        resolve_model(config, MODELSCOPE)


def test_modelscope_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"package modelscope is missing: pip install '.*\[modelscope\]'"):
        resolve_model(EngineConfig(model="owner/name"), MODELSCOPE)
    assert read_environment({"QUINTET_USE_MODELSCOPE": "1"}).use_modelscope


def test_modelscopes_own_functions_take_what_we_give(tmp_path: Path) -> None:
    pytest.importorskip("modelscope")
    config = EngineConfig(model="owner/name", download_dir=str(tmp_path))
    with pytest.raises(ConnectionError, match="from ModelScope"):
        modelscope.download(modelscope.ModelScopeRequest("owner/name", None), config, (["*.json"], []), offline=True)
