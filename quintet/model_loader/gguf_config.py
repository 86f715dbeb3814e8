"""Configuration of a model in GGUF files, with its encoder of images (mmproj), and generation configs."""

import logging
from pathlib import Path
from typing import Any

from quintet.common.json_files import read_object
from quintet.config import EngineConfig
from quintet.gguf.config import config as gguf_config
from quintet.gguf.config import encoder_types, generation
from quintet.gguf.file import is_gguf
from quintet.gguf.file_choice import choose_mmproj
from quintet.gguf.mmproj import wrapper_config
from quintet.media.kinds import IMAGE
from quintet.model_loader.ctranslate2 import generation_config_of, is_ctranslate2
from quintet.model_loader.gguf_weights import model_of

logger = logging.getLogger(__name__)
ENCODER = "encoder_quantization"  # entry that stands for the types of an encoder's tensors
SNAPSHOTS = "snapshots"  # folder of the hub's cache: below it, a folder for each revision of a model


def gguf_entries(model: Path, mmproj: str | None = None) -> dict[str, Any]:
    """Returns the entries of config.json that a GGUF file stands for; with an encoder, those of both together."""
    text = model_of(model)
    entries = gguf_config(text)
    if mmproj is None:
        return entries
    encoder = model_of(Path(mmproj))
    entries, types = wrapper_config(entries, text, encoder), encoder_types(encoder)
    return {**entries, **({ENCODER: {"quant_method": "gguf", "types": types}} if types else {})}


def wants_images(config: EngineConfig) -> bool:
    """Returns whether the settings leave images."""
    return not config.language_model_only and (config.limit_mm_per_prompt or {}).get(IMAGE) != 0


def resolve_mmproj(config: EngineConfig, model: Path) -> tuple[EngineConfig, list[str]]:
    """Returns the settings with the file of the encoder, and a line about it: one that was given must fit the model,
    one that was found is passed over if it does not."""
    if config.mmproj is not None and not (model.is_file() and is_gguf(model)):
        raise ValueError(f"mmproj={config.mmproj!r} is for GGUF models, and {model} is no GGUF file; leave it "
                         "out")  # fmt: skip
    if not wants_images(config):
        return config.replace(mmproj=None), []
    if config.mmproj is not None:
        file = Path(config.mmproj).expanduser()
        kind = gguf_entries(model, str(file))["model_type"]
        return config.replace(mmproj=str(file)), [f"images: by the encoder of {file}, as {kind}"]
    found = _beside(model) if model.is_file() and is_gguf(model) else None
    if found is None:
        return config, []
    try:
        kind = gguf_entries(model, str(found))["model_type"]
    except (ValueError, OSError) as error:
        return config, [f"images are not served, for the encoder beside the model is passed over: {error}"]
    return config.replace(mmproj=str(found)), [f"images: by the encoder of {found}, found beside the model, as {kind}"]


def _beside(model: Path) -> Path | None:
    """Returns the encoder in a model's folder; in the hub's cache also one in the folders around it."""
    folder = model.parent
    top = next((each for each in model.parents if each.parent.name == SNAPSHOTS), folder)
    there = [each.relative_to(top).as_posix() for each in top.rglob("*.gguf")] if top != folder else []
    there = there or [each.name for each in folder.glob("*.gguf")]
    found = choose_mmproj(there, model.relative_to(top).as_posix())
    return None if found is None else top / found


def read_generation_config(path: Path) -> dict[str, Any]:
    """Returns the entries of a folder's or a GGUF file's generation config; none, if it has none."""
    if path.is_file():
        return generation(model_of(path))
    file = path / "generation_config.json"
    if file.is_file():
        return read_object(file)
    return generation_config_of(path) if is_ctranslate2(path) else {}
