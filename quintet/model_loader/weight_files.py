"""Finds the files that hold a model's weights, and their format, and opens them."""

import fnmatch
import functools
import os
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from quintet.common.json_files import read_object
from quintet.config import EngineConfig
from quintet.model_loader import ctranslate2
from quintet.model_loader import gguf_weights as gguf_source
from quintet.model_loader.external_loaders import PACKAGES, reader
from quintet.model_loader.mistral_format import PARAMS, MistralFile, heads_of
from quintet.model_loader.np_cache import NpCache
from quintet.model_loader.sharded_state import FORMATS as SHARDED
from quintet.model_loader.sharded_state import SHARDS
from quintet.model_loader.torch_checkpoint import TensorHeader, TorchFile

NAMED = 8  # tensors that an error lists before it only counts
LONGEST = 400  # characters of what safetensors says of a file
PICKLED = ("*.bin", "*.pt", "*.pth")
CONSOLIDATED = "consolidated*.safetensors"  # Mistral's
CTRANSLATE2 = "ctranslate2"  # found by its file, not asked for
PICKLES = ("pt", "npcache")  # formats that read them
TRAINING_FILES = (
    "training_args.*",
    "optimizer.*",
    "scheduler.*",
    "scaler.*",
    "rng_state*",
    "random_states*",
)  # of a training
DECODER_PREFIXES = (
    "layers.",
    "embed_tokens.",
    "norm.",
    "embedding_norm.",
    "rotary_emb.",
)  # beginnings of a decoder's tensors, saved by itself
BESIDE = (
    "consolidated",
    "adapter_model",
    "optimizer",
)  # beginnings of files beside a model's: not its weights, or again
_SHARD = re.compile(r"(?P<naming>.+)-\d{5}-of-(?P<count>\d{5})")  # a file's name without its suffix
AT_A_TIME = 2**24  # bytes that are read ahead


DTYPES = {  # safetensors' names
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "I64": torch.int64,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True)
class WeightFiles:
    """A folder of weights or a GGUF file, and how it is read."""

    folder: Path
    load_format: str = "safetensors"
    strategy: str | None = None  # of safetensors: lazy, eager or prefetch
    options: Mapping[str, Any] = field(default_factory=dict)  # of what reads the format
    mmproj: Path | None = None  # of a GGUF model: the file of its encoder of images
    prefix: str = ""  # put before the names of a trunk that was saved without the model around it

    @property
    def of_encoders(self) -> "WeightFiles":
        """The files of its encoders of media."""
        return self if self.mmproj is None else replace(self, folder=self.mmproj)

    def module_name(self, name: str) -> str:
        """The name that a tensor has within its model."""
        return self.prefix + name if self.prefix and name.startswith(DECODER_PREFIXES) else name

    def __str__(self) -> str:
        return str(self.folder)

    def files(self) -> list[Path]:
        """The files that make up the model: those that an index names, or the one of the usual name, or all there are.

        Some folders hold the same weights again in another layout (consolidated.safetensors), or an adapter's.
        """
        if self.folder.is_file():
            return gguf_source.paths(self.folder)
        if self.load_format == "tensorizer":
            return _regular([Path(self.options.get("tensorizer_uri") or _only(self.folder, "*.tensors"))])
        if self.load_format == CTRANSLATE2:
            return _regular([self.folder / ctranslate2.MODEL])
        if self.load_format == "mistral":
            return _files(self.folder, "consolidated.safetensors", _consolidated)
        if self.load_format in PICKLES:
            return _files(self.folder, "pytorch_model.bin", _pickled)
        return _files(self.folder, "model.safetensors", _safetensors)

    def open_files(self) -> Iterator[tuple[Path, Any]]:
        """Yields each file with a reader of its tensors. ValueError names a file that cannot be read."""
        readers: Mapping[str, Callable[[Path], Any]] = {
            "pt": TorchFile, "npcache": NpCache, CTRANSLATE2: ctranslate2.CTranslate2File,
        }  # fmt: skip
        if self.load_format in PACKAGES:
            whole = reader(self.load_format)
            readers = {self.load_format: lambda file: WholeFile(file, whole)}
        read = readers.get(self.load_format, self._safetensors)
        for file in self.files():
            yield file, MistralFile(read(file), self.options) if self.load_format == "mistral" else read(file)

    def _safetensors(self, file: Path) -> Any:
        try:
            if self.strategy == "eager":
                return WholeFile(file, lambda file: load(file.read_bytes()))
            if self.strategy == "prefetch":
                _read_ahead(file)
            return safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            why = " ".join(str(error).split())[:LONGEST]  # of several lines where a header names no type
            raise ValueError(f"{file} cannot be read ({why}); fetch it again") from None


class WholeFile:
    """A file that is read whole when its first tensor is asked for; of safetensors the header says the rest."""

    def __init__(self, file: Path, read: Callable[[Path], dict[str, Tensor]]) -> None:
        self._file, self._read = file, read
        self._head = safe_open(file, framework="pt") if file.suffix == ".safetensors" else None

    @functools.cached_property
    def _tensors(self) -> dict[str, Tensor]:
        return self._read(self._file)

    def keys(self) -> list[str]:
        return list(self._tensors if self._head is None else self._head.keys())

    def get_slice(self, name: str) -> Any:
        if self._head is not None:
            return self._head.get_slice(name)
        return TensorHeader(tuple(self._tensors[name].shape), self._tensors[name].dtype)

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]


def weights_of(config: EngineConfig, path: Path) -> WeightFiles:
    """A model's, as the settings have it read; what torch.save wrote only where there is nothing else."""
    weights = _weights_of(config, path)
    if config.runner != "pooling" or path.is_file() or weights.load_format not in ("safetensors", "pt"):
        return weights
    names = [name for _, handle in weights.open_files() for name in handle.keys()]
    bare = any(name.startswith("layers.") for name in names) and not any(name.startswith("model.") for name in names)
    return replace(weights, prefix="model.") if bare and "embed_tokens.weight" in names else weights


def _weights_of(config: EngineConfig, path: Path) -> WeightFiles:
    strategy, options = config.safetensors_load_strategy, config.model_loader_extra_config or {}
    if config.load_format in PICKLES:
        return WeightFiles(path, config.load_format)
    own = config.load_format == "auto" and path.is_dir() and not (path / "config.json").exists()
    if config.load_format == "mistral" or (own and (path / PARAMS).exists() and any(path.glob("consolidated*"))):
        return WeightFiles(path, "mistral", strategy, heads_of(path))
    if config.load_format in PACKAGES:
        reader(config.load_format)  # refused here, where the package is missing
    if config.load_format in SHARDED:
        return WeightFiles(path, config.load_format)
    if config.load_format in PACKAGES:
        return WeightFiles(path, config.load_format, options=options)
    if config.load_format == "auto" and path.is_dir() and ctranslate2.is_ctranslate2(path):
        return WeightFiles(path, CTRANSLATE2)
    if config.load_format == "auto" and path.is_dir() and not any(path.glob("*.safetensors")) and has_pickles(path):
        return WeightFiles(path, "pt")
    mmproj = None if config.mmproj is None else Path(config.mmproj)
    return WeightFiles(path, "safetensors", strategy, options, mmproj)


def weights_of_folder(folder: "Path | WeightFiles") -> WeightFiles:
    """Returns a folder's weights with the default settings; Weights are returned as they are."""
    return folder if isinstance(folder, WeightFiles) else WeightFiles(folder)


def patterns_of(load_format: str) -> tuple[str, ...]:
    """The files that hold a format's weights."""
    if load_format in PACKAGES:
        return (PACKAGES[load_format].pattern,)
    return {"dummy": (), "mistral": (CONSOLIDATED,), "sharded_state": (SHARDS,), **dict.fromkeys(PICKLES, PICKLED)}.get(
        load_format, ("*.safetensors",)
    )


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise ValueError(f"{folder} has {len(found)} files {pattern}, and one is wanted; name it with tensorizer_uri")
    return found[0]


def has_pickles(folder: Path) -> bool:
    """Returns whether the folder has weights that torch.save has written."""
    return bool(_matching_files(folder, PICKLED))


def _read_ahead(file: Path) -> None:
    """Into the system's cache, one piece after the other: network filesystems are slow at small reads."""
    with file.open("rb", buffering=0) as stream:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        piece = bytearray(AT_A_TIME)
        while stream.readinto(piece):
            continue


def _files(folder: Path, usual: str, otherwise: Callable[[Path], list[Path]]) -> list[Path]:
    index = folder / f"{usual}.index.json"
    if index.exists():
        return _regular(_files_of_index(index, PurePath(usual).suffix))
    if (folder / usual).exists():
        return _regular([folder / usual])
    return _regular(otherwise(folder))


def _safetensors(folder: Path) -> list[Path]:
    found = _one_naming(sorted(folder.glob("*.safetensors")), ("model",))
    if not found:
        there = ", only what torch.save wrote: load_format='pt' reads it" if has_pickles(folder) else ""
        raise ValueError(
            f"{folder} has no *.safetensors file{there}; fetch the rest of the model, or use load_format='dummy'"
        )
    return found


def _consolidated(folder: Path) -> list[Path]:
    if not (found := sorted(folder.glob(CONSOLIDATED))):
        raise ValueError(f"{folder} has no {CONSOLIDATED} file; fetch the rest of the model")
    return found


def _pickled(folder: Path) -> list[Path]:
    if not (found := _one_naming(_matching_files(folder, PICKLED), ("pytorch_model", "model"))):
        raise ValueError(f"{folder} has no {', '.join(PICKLED)} file; leave load_format='pt' out")
    return found


def _one_naming(files: list[Path], usual: tuple[str, ...]) -> list[Path]:
    """Returns the files that one save has written, of a folder without an index: the shards (model-00001-of-00002), or
    all but files that are known to hold the weights again, or an adapter. ValueError if a shard is missing."""
    shards: dict[tuple[str, int], list[Path]] = {}
    for file in files:
        if (match := _SHARD.fullmatch(file.stem)) is not None:
            shards.setdefault((match["naming"], int(match["count"])), []).append(file)
    own = {each: found for each, found in shards.items() if not each[0].startswith(BESIDE)}
    chosen = next((each for name in usual for each in own if each[0] == name), next(iter(own), None))
    if chosen is None:
        return [file for file in files if not file.name.startswith(BESIDE)] or files
    naming, count = chosen
    if len(own[chosen]) < count:
        raise ValueError(
            f"{own[chosen][0].parent} has {len(own[chosen])} of the {count} files {naming}-*-of-{count:05}"
            f"{own[chosen][0].suffix}; fetch the rest of the model"
        )
    return own[chosen]


def _matching_files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    found = {file for pattern in patterns for file in folder.glob(pattern)}
    return sorted(file for file in found if not any(fnmatch.fnmatch(file.name, each) for each in TRAINING_FILES))


def _regular(files: list[Path]) -> list[Path]:
    """ValueError for what would block when it is opened (a named pipe), or is a folder."""
    wrong = next((file for file in files if not file.is_file()), None)
    if wrong is not None:
        raise ValueError(f"{wrong} is no regular file; fetch it again")
    return files


def _files_of_index(index: Path, suffix: str) -> list[Path]:
    """The files that it names. A link may lead out of the folder, as in the hub's cache; a name may not."""
    where = read_object(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ValueError(f"{index} is not an index of {suffix[1:]} files: it has no weight_map; fetch it again")
    for tensor, name in where.items():
        if not _is_inside(name, suffix):
            raise ValueError(
                f"{index}: weight_map says that {tensor[:80]!r} is in {reprlib.repr(name)}, which is no file of its "
                "folder; fetch it again"
            )
    files = [index.parent / name for name in sorted(set(where.values()))]
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise ValueError(
            f"{index.parent} lacks {format_names(absent)}, which {index.name} names; fetch the rest of the model"
        )
    return files


def _is_inside(name: Any, suffix: str) -> bool:
    """Returns whether a name is the path of a file within a folder."""
    if not isinstance(name, str) or not name.endswith(suffix) or not name.isprintable() or len(name) > 255:
        return False
    path = PurePath(name)
    return not path.is_absolute() and ".." not in path.parts


def format_names(names: list[str]) -> str:
    shown = ", ".join(names[:NAMED])
    return shown if len(names) <= NAMED else f"{shown} and {len(names) - NAMED} more"
