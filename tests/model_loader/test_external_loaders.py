"""Weights through packages of others: the same answers where one is installed, and where not, one line that says so."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from quintet.config import EngineConfig, Environment
from quintet.hub.resolve import resolve_model
from quintet.model_loader import external_loaders as other_readers
from quintet.model_loader.external_loaders import PACKAGES, write_tensorizer
from quintet.model_loader.weight_files import weights_of
from quintet_tools.checkpoints.tiny import variant
from tests.helpers.platforms.engines import answers, engine


@pytest.mark.parametrize("load_format", PACKAGES)
def test_a_package_that_is_missing_is_named(load_format: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"load_format='{load_format}' needs the package .*: pip install '.*\["):
        weights_of(EngineConfig(load_format=load_format), tmp_path)


@pytest.mark.parametrize("load_format", ["runai_streamer", "fastsafetensors"])
def test_safetensors_read_by_a_package_answer_alike(load_format: str) -> None:
    pytest.importorskip(PACKAGES[load_format].module)
    made = variant("llama", "plain")
    assert answers(engine(made, load_format=load_format), 4) == answers(engine(made), 4)


def test_what_tensorizer_wrote_is_read(tmp_path: Path) -> None:
    pytest.importorskip("tensorizer")
    made = variant("llama", "plain")
    write_tensorizer(load_file(made.folder / "model.safetensors"), tmp_path / "m.tensors")
    named = {"load_format": "tensorizer", "model_loader_extra_config": {"tensorizer_uri": str(tmp_path / "m.tensors")}}
    assert answers(engine(made, **named), 4) == answers(engine(made), 4)
    (tmp_path / "m.tensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"m.tensors cannot be read by tensorizer \("):
        engine(made, **named)


@pytest.mark.parametrize("address", ["s3://bucket/model", "gs://bucket/model"])
def test_an_address_of_a_store_is_the_streamers_alone(address: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{address} is in a store, which load_format='runai_streamer' reads"):
        resolve_model(EngineConfig(model=address), Environment())


class Streamer:
    """Run:ai's package, as far as fetching goes."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.asked = error, []  # type: ignore[var-annotated]

    def pull_files(self, address: str, folder: str, allow_pattern: list[str]) -> None:
        self.asked.append((address, allow_pattern))
        if self.error:
            raise self.error
        for name in ("config.json", "model.safetensors"):
            (Path(folder) / name).write_text("{}")


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (ImportError("no module"), OSError, r"pip install 'runai-model-streamer\[s3\]'"),
        (RuntimeError("no credentials"), ConnectionError, r"cannot be fetched \(no credentials\); check the address"),
        (None, None, ""),
    ],
)
def test_files_of_a_store_are_fetched(
    error: Exception | None, kind: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamer = Streamer(error)
    monkeypatch.setattr(other_readers, "_import_package", lambda load_format: streamer)
    config = EngineConfig(model="s3://bucket/model", load_format="runai_streamer", download_dir=str(tmp_path))
    if kind is not None:
        with pytest.raises(kind, match=says):
            resolve_model(config, Environment())
        return
    folder = resolve_model(config, Environment())
    assert folder.parent == tmp_path and (folder / "config.json").is_file()
    assert streamer.asked[0][0] == "s3://bucket/model" and "*.safetensors" in streamer.asked[0][1]
