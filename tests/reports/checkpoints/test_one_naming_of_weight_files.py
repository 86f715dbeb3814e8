"""Files of one naming are a model's weights, where a folder without an index holds others too (report 19)."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quintet.model_loader.weight_files import WeightFiles
from quintet_tools.checkpoints.tiny import Tiny, variant
from tests.helpers.platforms.engines import answers, engine

OTHER = {"tok_embeddings.weight": torch.ones(4, 2), "layers.0.attention.wk.weight": torch.ones(2, 2)}


def shards(folder: Path, tensors: dict[str, Tensor], naming: str = "model", suffix: str = "safetensors") -> None:
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = folder / f"{naming}-{number:05}-of-00002.{suffix}"
        held = {name: tensors[name] for name in part}
        save_file(held, file) if suffix == "safetensors" else torch.save(held, file)


def beside(name: str) -> Callable[[Path, dict[str, Tensor]], None]:
    return lambda folder, tensors: save_file(OTHER, folder / name)


@pytest.mark.parametrize(
    "add",
    [
        beside("consolidated.safetensors"),
        beside("consolidated-00001-of-00001.safetensors"),
        beside("adapter_model.safetensors"),
        beside("optimizer.safetensors"),
        lambda folder, tensors: shards(folder, tensors, naming="model.fp16"),
    ],
    ids=["consolidated (report 19)", "consolidated shards", "adapter", "optimizer", "variant"],
)
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards_without_an_index_are_the_model(
    add: Callable[[Path, dict[str, Tensor]], None], suffix: str, tmp_path: Path
) -> None:
    tiny = variant("mistral", "no window")
    tensors = load_file(tiny.folder / "model.safetensors")
    shards(tmp_path, tensors, "model" if suffix == "safetensors" else "pytorch_model", suffix)
    add(tmp_path, {name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
    settings = {} if suffix == "safetensors" else {"load_format": "pt"}
    (tmp_path / "config.json").write_text((tiny.folder / "config.json").read_text())
    assert answers(engine(Tiny(tmp_path, tiny.config, tiny.reference), **settings), 4) == answers(engine(tiny), 4)


def test_files_of_names_of_their_own_are_all_the_models(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors", "consolidated.safetensors"):
        save_file(OTHER, tmp_path / name)
    assert [file.name for file in WeightFiles(tmp_path).files()] == ["a.safetensors", "b.safetensors"]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_file(OTHER, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"has 1 of the 2 files model-\*-of-00002.safetensors; fetch the rest"):
        WeightFiles(tmp_path).files()
