"""Generation config of a model as its files have it: generation_config.json, or what stands for it in other formats."""

from pathlib import Path
from typing import Any

from quintet.common.json_files import read_object
from quintet.gguf.config import generation
from quintet.model_loader.ctranslate2 import generation_config_of, is_ctranslate2
from quintet.model_loader.gguf_weights import model_of


def read_generation_config(path: Path) -> dict[str, Any]:
    """Returns the entries of a folder's or a GGUF file's generation config; none, if it has none."""
    if path.is_file():
        return generation(model_of(path))
    file = path / "generation_config.json"
    if file.is_file():
        return read_object(file)
    return generation_config_of(path) if is_ctranslate2(path) else {}
