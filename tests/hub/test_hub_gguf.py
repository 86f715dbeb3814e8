"""GGUF files by their names on the hub, which a fake stands in for."""

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quintet.config import EngineConfig, Environment
from quintet.hub.downloads import list_files
from quintet.hub.resolve import resolve_model, resolve_tokenizer

ONLINE, OFFLINE = Environment(), Environment(hf_hub_offline=True)
MMPROJ = "mmproj-F16.gguf"
GGUF = ("README.md", "config.json", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-F16.gguf")
SPLIT = ("big/m-F16-00001-of-00002.gguf", "big/m-F16-00002-of-00002.gguf")


class Hub:
    """Repositories by their files; what is asked for is written down, and downloaded files have their names in them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.files, self.downloads = folder, {"a/b": (*GGUF, *SPLIT)}, list[list[str]]()
        monkeypatch.setattr("huggingface_hub.snapshot_download", self.download)
        monkeypatch.setattr("huggingface_hub.HfApi.model_info", self.model_info)

    def model_info(self, name: str, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=each) for each in self.files[name]])

    def download(self, name: str, allow_patterns: Sequence[str], local_files_only: bool, **options: Any) -> str:
        where = self.folder / name
        where.mkdir(parents=True, exist_ok=True)
        if not local_files_only:
            found = [each for each in self.files[name] if any(fnmatch.fnmatch(each, way) for way in allow_patterns)]
            self.downloads.append(found)
            for each in found:
                (where / each).parent.mkdir(parents=True, exist_ok=True)
                (where / each).write_bytes(b"GGUF" if each.endswith(".gguf") else b"{}")
        return str(where)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    return Hub(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("model", "files"),
    [
        ("a/b:q8_0", ["m-Q8_0.gguf", MMPROJ]),
        ("a/b/m-Q8_0.gguf", ["m-Q8_0.gguf", MMPROJ]),
        ("a/b:F16", [*SPLIT, MMPROJ]),
        ("a/b/big/m-F16-00002-of-00002.gguf", [*SPLIT, MMPROJ]),
        ("a/b", ["m-Q4_K_M.gguf", MMPROJ]),
    ],
)
def test_what_a_name_means_is_downloaded_and_nothing_else(hub: Hub, model: str, files: list[str]) -> None:
    config = EngineConfig(model=model)
    found = resolve_model(config, ONLINE)
    assert found == hub.folder / "a/b" / files[0]
    assert found.read_bytes() == b"GGUF"
    assert set(hub.downloads[-1]) == set(files)
    assert resolve_tokenizer(config, found, ONLINE) == found
    assert [each for each in hub.downloads if any("gguf" in file for file in each)] == [hub.downloads[-1]]
    text = config.replace(limit_mm_per_prompt={"image": 0})
    assert resolve_model(text, ONLINE) == found and MMPROJ not in hub.downloads[-1]


def test_what_was_downloaded_is_found_offline(hub: Hub) -> None:
    want = resolve_model(EngineConfig(model="a/b:Q8_0"), ONLINE)
    assert resolve_model(EngineConfig(model="a/b:Q8_0"), OFFLINE) == want
    assert resolve_model(EngineConfig(model="a/b"), OFFLINE) == want
    with pytest.raises(FileNotFoundError, match="'a/b' has no GGUF model of 'Q4_K_M'; it holds Q8_0"):
        resolve_model(EngineConfig(model="a/b:Q4_K_M"), OFFLINE)


def test_a_model_in_our_own_layout_stays_it(hub: Hub) -> None:
    hub.files["a/b"] = (*GGUF, "model.safetensors")
    assert resolve_model(EngineConfig(model="a/b"), ONLINE) == hub.folder / "a/b"
    assert resolve_model(EngineConfig(model="a/b", load_format="gguf"), ONLINE).name == "m-Q4_K_M.gguf"


def test_another_tokenizer_is_taken(hub: Hub) -> None:
    hub.files["c/d"] = ("tokenizer.json", "model.safetensors")
    config = EngineConfig(model="a/b:Q8_0", tokenizer="c/d")
    assert resolve_tokenizer(config, resolve_model(config, ONLINE), ONLINE) == hub.folder / "c/d"
    assert hub.downloads[-1] == ["tokenizer.json"]
    of_file = config.replace(tokenizer="a/b:Q4_K_M")
    assert resolve_tokenizer(of_file, Path("x"), ONLINE) == hub.folder / "a/b/m-Q4_K_M.gguf"


def test_a_repository_says_what_it_holds(hub: Hub) -> None:
    with pytest.raises(FileNotFoundError, match=r"no GGUF model of 'Q2_K'; it holds F16, Q4_K_M, Q8_0$"):
        resolve_model(EngineConfig(model="a/b:Q2_K"), ONLINE)
    hub.files["c/d"] = ("config.json",)
    with pytest.raises(FileNotFoundError, match="'c/d' holds no GGUF files"):
        resolve_model(EngineConfig(model="c/d:Q2_K"), ONLINE)
    with pytest.raises(FileNotFoundError, match=r"has no \*.safetensors weights"):
        resolve_model(EngineConfig(model="c/d"), ONLINE)
    with pytest.raises(FileNotFoundError, match="no folder '../x' here"):
        resolve_model(EngineConfig(model="../x:Q4_0"), ONLINE)


def test_a_folder_here_has_quantizations_too(tmp_path: Path) -> None:
    for name in ("m-Q4_0.gguf", "m-Q8_0.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert resolve_model(EngineConfig(model=f"{tmp_path}:q8_0"), OFFLINE) == tmp_path / "m-Q8_0.gguf"
    with pytest.raises(ValueError, match="holds 2 GGUF models .*; give the path of one"):
        resolve_model(EngineConfig(model=tmp_path), OFFLINE)


def test_a_file_is_found_offline_where_others_were_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's library refuses a snapshot that lacks files of the repository."""

    def refuse(*_: Any, **__: Any) -> str:
        raise ConnectionError("3 files are missing")

    monkeypatch.setattr("quintet.hub.downloads.download", refuse)
    snapshot = tmp_path / "models--a--b" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("a" * 40)
    (snapshot / "m-Q8_0.gguf").write_bytes(b"GGUF")
    config = EngineConfig(model="a/b:Q8_0", download_dir=str(tmp_path))
    assert list_files("a/b", None, config, OFFLINE) == ["m-Q8_0.gguf"]
    assert list_files("a/b", "a" * 40, config, OFFLINE) == ["m-Q8_0.gguf"]
    for revision in ("v9", "../refs", "b" * 40):
        with pytest.raises(ConnectionError):
            list_files("a/b", revision, config, OFFLINE)
