"""Where a model is found, what its JSON files say, and the message for everything that can be wrong with them."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import RepositoryNotFoundError

from quintet.config import EngineConfig, Environment
from quintet.hub.resolve import load_generation_config, load_model_config, resolve_model, resolve_tokenizer

OFFLINE = Environment(hf_hub_offline=True)
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 16384,
    "rope_scaling": {**ROPE, "original_max_position_embeddings": 8192},
    "rope_theta": 500000.0,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model, as far as this file looks."""
    _write(tmp_path, "config.json", LLAMA)
    (tmp_path / "model.safetensors").touch()
    return tmp_path


def _write(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(json.dumps(content))


# ------------------------------------------------------------------------------------------------------- the folder


@pytest.mark.parametrize(
    ("model", "kind", "says"),
    [
        ("/no/such/folder", FileNotFoundError, "no folder '/no/such/folder'"),
        ("./nothing", FileNotFoundError, "check the path"),
        ("~/nothing", FileNotFoundError, "check the path"),
        ("a/b/c", FileNotFoundError, "no hub id"),
        ("two words", FileNotFoundError, "no hub id"),
        ("nothere.gguf", FileNotFoundError, "no file 'nothere.gguf' here"),
        ("../x", FileNotFoundError, "no hub id"),
        ("nobody/quintet-test-model", ConnectionError, "HF_HUB_OFFLINE is set"),
        ("nobody/quintet-test-model", ConnectionError, "or use the model 'bundled'"),
        ("bundled-drat", ConnectionError, "or use the model 'bundled-draft'"),
        ("bundled-visoin", ConnectionError, "or use the model 'bundled-vision'"),
        (__file__, ValueError, "is a file, and none of GGUF or whisper.cpp; give the folder"),
    ],
)
def test_a_model_that_is_not_there(model: str, kind: type[Exception], says: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=".") as error:
        resolve_model(EngineConfig(model=model, download_dir=str(tmp_path)), OFFLINE)
    assert says in str(error.value)


def test_a_misspelt_bundled_model_that_the_hub_does_not_know(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unknown(*given: Any, **more: Any) -> None:
        answer = httpx.Response(404, request=httpx.Request("GET", "https://hub.invalid"))
        raise RepositoryNotFoundError("not found", response=answer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unknown)
    for name, hint in (("bundled-visoin", " (did you mean 'bundled-vision'?), or give"), ("nobody/other", ", or give")):
        with pytest.raises(FileNotFoundError, match=re.escape(f"check the spelling{hint}")):
            resolve_model(EngineConfig(model=name, download_dir=str(tmp_path)), Environment())


def test_a_local_folder_is_itself(folder: Path) -> None:
    config = EngineConfig(model=folder)
    assert resolve_model(config, OFFLINE) == folder
    assert resolve_tokenizer(config, folder, OFFLINE) == folder
    assert resolve_tokenizer(config.replace(tokenizer=str(folder.parent)), folder, OFFLINE) == folder.parent


def test_a_cached_model_is_found_offline(tmp_path: Path) -> None:
    """The hub's own cache layout."""
    repo = tmp_path / "models--some--model"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    _write(snapshot, "config.json", LLAMA)
    (snapshot / "model.safetensors").touch()
    assert resolve_model(EngineConfig(model="some/model", download_dir=str(tmp_path)), OFFLINE) == snapshot
    with pytest.raises(ConnectionError, match="'v9'"):
        resolve_model(EngineConfig(model="some/model", revision="v9", download_dir=str(tmp_path)), OFFLINE)


@pytest.mark.parametrize(
    ("remove", "add", "says"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", "adapter_config.json", "is an adapter"),
        ("config.json", "inner/config.json", "there is one in inner"),
        ("model.safetensors", None, "has no *.safetensors weights;"),
    ],
)
def test_a_folder_that_is_no_model(folder: Path, remove: str, add: str | None, says: str) -> None:
    (folder / remove).unlink()
    if add:
        (folder / add).parent.mkdir(exist_ok=True)
        (folder / add).touch()
    with pytest.raises(FileNotFoundError, match=".") as error:
        resolve_model(EngineConfig(model=folder), OFFLINE)
    assert says in str(error.value)


def test_what_torch_saved_is_there_if_it_may_be(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    for load_format in ("auto", "pt", "npcache"):
        assert resolve_model(EngineConfig(model=folder, load_format=load_format), OFFLINE) == folder
    with pytest.raises(FileNotFoundError, match="only what torch.save wrote, which load_format='pt' reads"):
        resolve_model(EngineConfig(model=folder, load_format="safetensors"), OFFLINE)
    (folder / "pytorch_model.bin").rename(folder / "training_args.bin")
    with pytest.raises(FileNotFoundError, match=r"has no \*.bin, \*.pt, \*.pth weights"):
        resolve_model(EngineConfig(model=folder, load_format="pt"), OFFLINE)


def test_dummy_weights_need_none(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert resolve_model(EngineConfig(model=folder, load_format="dummy"), OFFLINE) == folder


# ------------------------------------------------------------------------------------------------------ config.json


def test_overrides_replace_entries(folder: Path) -> None:
    config = load_model_config(folder, {"num_hidden_layers": 3, "tie_word_embeddings": True})
    assert (config.num_hidden_layers, config.tie_word_embeddings, config.hidden_size) == (3, True, 64)


@pytest.mark.parametrize(
    ("overrides", "want"),
    [
        ({}, {"rope_type": "llama3", "factor": 8.0, "rope_theta": 500000.0}),
        ({"rope_theta": 10.0}, {"rope_type": "llama3", "rope_theta": 10.0}),
        ({"rope_scaling": {"factor": 4.0}}, {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0}),
        ({"rope_parameters": {"factor": 4.0}}, {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0}),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, {"rope_type": "yarn", "low_freq_factor": None}),
        ({"rope_scaling": None}, {"rope_type": "default", "rope_theta": 500000.0, "factor": None}),
    ],
)
def test_rope_overrides_merge(folder: Path, overrides: dict[str, Any], want: dict[str, Any]) -> None:
    assert_same_rope(load_model_config(folder, overrides).rope_parameters, want)


@pytest.mark.parametrize(
    ("overrides", "want"),
    [
        ({"rope_theta": 10.0}, {"rope_type": "llama3", "rope_theta": 10.0, "factor": 8.0}),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {"rope_type": "linear", "rope_theta": 3.0}),
        (
            {"rope_scaling": {"factor": 2.0}, "rope_theta": 5.0},
            {"rope_type": "llama3", "factor": 2.0, "rope_theta": 5.0},
        ),
    ],
)
def test_rope_overrides_merge_in_the_newer_layout(folder: Path, overrides: Any, want: Any) -> None:
    newer = {name: value for name, value in LLAMA.items() if name not in ("rope_scaling", "rope_theta")}
    _write(folder, "config.json", {**newer, "rope_parameters": {**LLAMA["rope_scaling"], "rope_theta": 3.0}})
    assert_same_rope(load_model_config(folder, overrides).rope_parameters, want)


def assert_same_rope(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert {name: got.get(name) for name in want} == want


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"hiden_size": 4}, "did you mean 'hidden_size'"),
        ({"rope_scaling": {"facotr": 2.0}}, "did you mean 'factor'"),
        ({"hidden_size": "big"}, "hf_overrides: hidden_size is 'big', not a whole number"),
        ({"model_type": "lama"}, "the nearest is 'llama'"),
        ({"model_type": "xyz"}, "model type 'xyz' is not supported; docs/models.md has a list"),
    ],
)
def test_overrides_that_cannot_be(folder: Path, overrides: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=".") as error:
        load_model_config(folder, overrides)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "must hold a JSON object, not list"),
        ("{}", "names no model_type"),
        (b"\xff\xfe", "is not JSON"),
        ('{"model_type": "mamba9"}', "'mamba9' is not supported"),
    ],
)
def test_a_broken_config_is_named(folder: Path, content: str | bytes, says: str) -> None:
    (folder / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=".") as error:
        load_model_config(folder)
    assert says in str(error.value)


def test_unsupported_models_are_told_what_is_supported(folder: Path) -> None:
    _write(folder, "config.json", {"model_type": "fnet"})
    with pytest.raises(ValueError, match="model type 'fnet' is not supported; docs/models.md has a list"):
        load_model_config(folder)


def test_code_in_the_folder_is_not_run(folder: Path) -> None:
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    _write(folder, "config.json", {**LLAMA, "auto_map": {"AutoConfig": "evil.Config"}})
    assert load_model_config(folder).hidden_size == 64


# --------------------------------------------------------------------------------------------- generation_config.json

GENERATION = {"temperature": 0.6, "top_k": None, "max_new_tokens": 5, "do_sample": True, "eos_token_id": [7, 8]}


@pytest.mark.parametrize(
    ("mode", "overrides", "want"),
    [
        ("auto", None, {"temperature": 0.6, "max_tokens": 5, "eos_token_id": [7, 8]}),
        ("quintet", None, {"eos_token_id": [7, 8]}),
        (
            "auto",
            {"temperature": 0.1, "max_new_tokens": 9},
            {"temperature": 0.1, "max_tokens": 9, "eos_token_id": [7, 8]},
        ),
        ("quintet", {"top_p": 0.5}, {"top_p": 0.5, "eos_token_id": [7, 8]}),
    ],
)
def test_sampling_defaults(folder: Path, mode: str, overrides: Any, want: dict[str, Any]) -> None:
    _write(folder, "generation_config.json", GENERATION)
    assert load_generation_config(folder, mode, overrides) == want


def test_a_model_that_does_not_sample_is_greedy(folder: Path) -> None:
    _write(folder, "generation_config.json", {"do_sample": False, "temperature": 0.6})
    assert load_generation_config(folder)["temperature"] == 0
    assert load_generation_config(folder, "auto", {"temperature": 0.5})["temperature"] == 0.5


def test_sampling_defaults_from_elsewhere(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    _write(other, "generation_config.json", {"top_p": 0.9})
    _write(folder, "generation_config.json", GENERATION)
    assert load_generation_config(folder, str(other)) == {"top_p": 0.9, "eos_token_id": [7, 8]}
    with pytest.raises(FileNotFoundError, match="is not auto, quintet, or a folder"):
        load_generation_config(folder, str(other / "no"))


def test_without_a_generation_config_the_config_ends_texts(folder: Path) -> None:
    assert load_generation_config(folder) == {"eos_token_id": []}
    _write(folder, "config.json", {**LLAMA, "eos_token_id": 3})
    assert load_generation_config(folder) == {"eos_token_id": [3]}


def test_a_gguf_file_is_a_model_and_so_is_a_folder_with_one(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    for model in (file, tmp_path):
        for load_format in ("auto", "gguf"):
            assert resolve_model(EngineConfig(model=model, load_format=load_format), OFFLINE) == file
    (tmp_path / "big-00002-of-00002.gguf").write_bytes(b"GGUF")  # no model by itself
    assert resolve_model(EngineConfig(model=tmp_path), OFFLINE) == file
    (tmp_path / "big-00001-of-00002.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="2 GGUF models .big-00001-of-00002.gguf, model.gguf..*--models /"):
        resolve_model(EngineConfig(model=tmp_path), OFFLINE)
    with pytest.raises(ValueError, match="is a GGUF file"):
        resolve_model(EngineConfig(model=file, load_format="safetensors"), OFFLINE)


def test_weights_of_both_kinds_are_told_apart_by_load_format(folder: Path) -> None:
    (folder / "model.gguf").write_bytes(b"GGUF")
    assert resolve_model(EngineConfig(model=folder), OFFLINE) == folder
    assert resolve_model(EngineConfig(model=folder, load_format="gguf"), OFFLINE) == folder / "model.gguf"
    (folder / "model.gguf").unlink()
    with pytest.raises(FileNotFoundError, match="holds no GGUF file"):
        resolve_model(EngineConfig(model=folder, load_format="gguf"), OFFLINE)
