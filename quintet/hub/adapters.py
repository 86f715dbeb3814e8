"""Finds an adapter's folder (LoRA), locally or on the Hugging Face hub."""

from pathlib import Path

from quintet.config import EngineConfig, read_environment
from quintet.hub.downloads import download
from quintet.hub.model_names import HUB_ID

FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")  # the last is refused with a reason


def resolve_adapter(path: str, config: EngineConfig) -> Path:
    """Returns the folder of an adapter, downloaded if need be. OSError or ValueError says what is wrong."""
    folder = local_adapter(path)
    if folder is not None:
        return folder
    return download(path, None, config, FILES, read_environment(), "give the adapter's folder")


def local_adapter(path: str) -> Path | None:
    """Returns the folder of an adapter on this machine; None: it is a hub id. OSError or ValueError says what is
    wrong."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.is_file():
        raise ValueError(f"{path} is a file; an adapter is the folder that holds adapter_config.json")
    if path.startswith(("/", "./", "../", "~")) or HUB_ID.fullmatch(path) is None:
        raise FileNotFoundError(f"no folder {path!r} here; check the adapter's path")
    return None
