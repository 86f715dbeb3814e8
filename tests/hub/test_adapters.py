"""Where an adapter (LoRA) is found, and what is missing where it is not; the hub is never asked."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from quintet.cli.main import main
from quintet.config import EngineConfig
from quintet.hub.adapters import resolve_adapter
from tests.helpers.lora_adapters import BUNDLED, bundled_adapter

COMMIT = "0" * 40


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, which holds org/adapter, and no network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--org--adapter"
    bundled_adapter(repository / "snapshots" / COMMIT, 3)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return tmp_path / "hub"


def test_a_folder_is_itself_and_a_hub_id_the_caches_snapshot(cache: Path, tmp_path: Path) -> None:
    snapshot = cache / "models--org--adapter" / "snapshots" / COMMIT
    assert resolve_adapter("org/adapter", EngineConfig("bundled")) == snapshot
    assert resolve_adapter(str(snapshot), EngineConfig("bundled")) == snapshot
    assert resolve_adapter("org/adapter", EngineConfig("bundled", download_dir=str(cache))) == snapshot


@pytest.mark.parametrize(
    ("path", "kind", "words"),
    [
        ("org/other", ConnectionError, ["org/other is not in", "HF_HUB_OFFLINE is set", "give the adapter's folder"]),
        ("./adapter", FileNotFoundError, ["no folder './adapter' here", "check the adapter's path"]),
        ("a/b/c", FileNotFoundError, ["check the adapter's path"]),
        (__file__, ValueError, ["is a file", "adapter_config.json"]),
    ],
)
def test_what_is_not_there_is_an_error_about_an_adapter(path: str, kind: type[Exception], words: list[str]) -> None:
    with pytest.raises(kind) as caught:
        resolve_adapter(path, EngineConfig("bundled"))
    assert [word for word in words if word not in str(caught.value)] == []
    assert ".gguf" not in str(caught.value)


def test_merge_lora_takes_a_hub_id_and_works_offline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["merge-lora", str(BUNDLED), "org/adapter", str(tmp_path / "out")]) == 0
    assert "42 modules merged" in capsys.readouterr().out
    assert main(["merge-lora", "bundled", "org/other", str(tmp_path / "more")]) == 1
    error = capsys.readouterr().err
    assert "org/other is not in" in error and "give the adapter's folder" in error and "Traceback" not in error
    assert not (tmp_path / "more").exists()
