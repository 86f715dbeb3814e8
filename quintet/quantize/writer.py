"""The folder that is written: beside its place until it is whole, in files of a bounded size."""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

SHARD = 4 * 2**30  # bytes of a file
# What is copied from a model's folder beside its weights.
COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "LICENSE*", "NOTICE*")
OWN = ("config.json", "*.safetensors.index.json", "quantize_config.json", "recipe.yaml", "adapter_config.json")


class CheckpointWriter:
    """A folder, or a single file, in the making; as a context it is put in its place if nothing failed."""

    def __init__(self, place: Path, overwrite: bool = False) -> None:
        self._place, self._overwrite = place.absolute(), overwrite
        if (place.exists() or place.is_symlink()) and not overwrite:
            raise ValueError(f"{place} is there already; give another folder, or overwrite it (--overwrite)")
        if overwrite and place.is_dir() and any(place.iterdir()) and not _is_model(place):
            raise ValueError(f"{place} has neither config.json nor *.gguf, so it is no model, and is not written over")
        self._place.parent.mkdir(parents=True, exist_ok=True)
        self.folder: Path  # the one in the making

    def __enter__(self) -> "CheckpointWriter":
        self.folder = Path(tempfile.mkdtemp(prefix=f".{self._place.name}.", dir=self._place.parent))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def finish(self, file: str | None = None) -> Path:
        """Into its place, in one step: the folder, or only this file of it. What was there is removed before."""
        if file is not None:
            (self.folder / file).chmod(0o666 & ~_umask())
            os.replace(self.folder / file, self._place)
            self.folder.rmdir()
            return self._place
        self.folder.chmod(0o777 & ~_umask())
        if self._overwrite and self._place.exists():
            aside = Path(tempfile.mkdtemp(prefix=f".{self._place.name}.", dir=self._place.parent))
            os.replace(self._place, aside / "old")
            os.replace(self.folder, self._place)
            shutil.rmtree(aside)
        else:
            os.rename(self.folder, self._place)
        self.folder = self._place
        return self._place

    def refuse_overlap(self, original: Path) -> None:
        """ValueError if this would take the place of that folder, or of one that it is in."""
        folder = original.resolve()
        if self._place.resolve() in (folder, *folder.parents):
            raise ValueError(f"{self._place} is where the original is; give another folder")

    def check_space(self, num_bytes: int) -> None:
        """OSError if that does not fit."""
        free = shutil.disk_usage(self._place.parent).free
        if num_bytes > free:
            raise OSError(
                f"{self._place.parent} has room for {free / 1e9:.2f} GB, and {self._place.name} will take about "
                f"{num_bytes / 1e9:.2f} GB; make room, or give another folder"
            )


class CheckpointShards:
    """Tensors into safetensors files, an index beside them if there are several."""

    def __init__(self, folder: Path, most: int = SHARD) -> None:
        self._folder, self._most = folder, most
        self._held: dict[str, Tensor] = {}
        self._size = self.num_bytes = 0
        self._where: list[list[str]] = []

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            size = tensor.numel() * tensor.element_size()
            if self._held and self._size + size > self._most:
                self._write()
            self._held[name] = tensor.contiguous()
            self._size += size
            self.num_bytes += size

    def finish(self) -> None:
        if self._held:
            self._write()
        count = len(self._where)
        if count == 1:
            self._file(1).rename(self._folder / "model.safetensors")
            return
        index: dict[str, Any] = {"metadata": {"total_size": self.num_bytes}, "weight_map": {}}
        for number, names in enumerate(self._where, 1):
            file = f"model-{number:05}-of-{count:05}.safetensors"
            self._file(number).rename(self._folder / file)
            index["weight_map"] |= dict.fromkeys(names, file)
        write_json(self._folder / "model.safetensors.index.json", index)

    def _write(self) -> None:
        self._where.append(list(self._held))
        file = self._file(len(self._where))
        save_file(self._held, file, metadata={"format": "pt"})
        file.chmod(0o666 & ~_umask())
        self._held, self._size = {}, 0

    def _file(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"


def copy_rest(model: Path, folder: Path) -> None:
    """Tokenizer, chat template, generation defaults, licence."""
    for pattern in COPIED:
        for file in sorted(model.glob(pattern)):
            if file.is_file() and not any(file.match(own) for own in OWN):
                shutil.copyfile(file, folder / file.name)


def write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").exists() or any(folder.glob("*.gguf"))


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
