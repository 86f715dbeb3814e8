"""Models on this machine: in the hub's cache, and in folders of GGUF files."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintet.common.json_files import read_object
from quintet.gguf.file import SPLIT
from quintet.gguf.file_choice import BESIDE, part_number, quantization_label

MAX_ENTRIES = 200_000  # files and folders below one folder
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".npz")


@dataclass(frozen=True)
class LocalModel:
    """A model that commands take by its name without a network."""

    name: str
    size: int  # bytes on disk
    quantization: str
    last_used: float  # Unix time of the last access to its files
    folder: str | None = None  # None: in the hub's cache


def cache_root(cache_dir: str | None) -> Path:
    """Returns the folder of the hub's cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(os.path.expanduser(cache_dir or HF_HUB_CACHE)).absolute()


def scan_cache(cache_dir: str | None) -> tuple[list[Any], list[str]]:
    """Returns the repositories of models in the hub's cache, and what is wrong with unreadable ones."""
    root = cache_root(cache_dir)
    if not root.is_dir():
        return [], []
    from huggingface_hub import scan_cache_dir

    found = scan_cache_dir(root)
    repositories = [each for each in found.repos if each.repo_type == "model" and each.revisions]
    return repositories, [" ".join(str(each).split()) for each in found.warnings]


def files_of(repository: Any) -> dict[str, list[Any]]:
    """Returns the cached files of a repository: path in it -> its entry in each revision."""
    found: dict[str, list[Any]] = {}
    for revision in repository.revisions:
        for each in revision.files:
            found.setdefault(each.file_path.relative_to(revision.snapshot_path).as_posix(), []).append(each)
    return found


def cached_models(repositories: Iterable[Any]) -> list[LocalModel]:
    """Returns a model for each GGUF file of a repository, or one for its other weights."""
    return [model for each in repositories for model in _models_of(each)]


def _models_of(repository: Any) -> list[LocalModel]:
    files, name = files_of(repository), repository.repo_id
    heads = model_heads(files)
    if not heads:
        kind = _checkpoint_quantization(files)
        return [LocalModel(name, repository.size_on_disk, kind, repository.last_accessed)]
    labels = [quantization_label(each) for each in heads]
    found = []
    for head, label in zip(heads, labels, strict=True):
        entries = [entry for part in split_parts(head, files) for entry in files[part]]
        size = sum({entry.blob_path: entry.size_on_disk for entry in entries}.values())
        tagged = f"{name}:{label}" if label and labels.count(label) == 1 else f"{name}/{head}"
        found.append(LocalModel(tagged, size, label or "GGUF", max(entry.blob_last_accessed for entry in entries)))
    return found


def model_heads(files: Iterable[str]) -> list[str]:
    """Returns the GGUF files that are models, or the first parts of split ones."""
    found = [each for each in files if each.endswith(".gguf") and part_number(each) == 1]
    return sorted(each for each in found if not BESIDE.search(each.rpartition("/")[2]))


def split_parts(head: str, there: Iterable[str]) -> list[str]:
    """Returns the parts of a split model that are there; the file itself if it is whole."""
    split = SPLIT.fullmatch(head)
    return [head] if split is None else [each for each in there if _stem_and_count(each) == (split[1], split[3])]


def _stem_and_count(file: str) -> tuple[str, str] | None:
    split = SPLIT.fullmatch(file)
    return split and (split[1], split[3])


def has_weights(files: Iterable[str]) -> bool:
    """Returns whether there are weights other than GGUF files."""
    return any(each.endswith(_WEIGHTS) for each in files)


def _checkpoint_quantization(files: dict[str, list[Any]]) -> str:
    """Returns the quantization method of config.json, or the type of its weights."""
    if not has_weights(files):
        return "no weights"
    try:
        config = read_object(files["config.json"][0].file_path)
    except (KeyError, OSError, ValueError):
        return "-"
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("quant_method"):
        bits = quantization.get("bits")
        return f"{quantization['quant_method']}{f' {bits} bits' if isinstance(bits, int) else ''}"[:40]
    return str(config.get("dtype") or config.get("torch_dtype") or "-")[:40]


def folder_models(folder: str) -> list[LocalModel]:
    """Returns the GGUF models below a folder; links to folders are not followed."""
    root = Path(os.path.expanduser(folder))
    if not root.is_dir():
        raise ValueError(f"there is no folder {folder!r}; give one that holds GGUF files")
    found, count = [], 0
    for where, inner, names in os.walk(root):
        count += len(inner) + len(names)
        if count > MAX_ENTRIES:
            raise ValueError(
                f"{folder!r} has more than {MAX_ENTRIES} files and folders; give one that holds models alone"
            )
        for head in model_heads(names):
            stats = [Path(where, part).stat() for part in split_parts(head, names) if Path(where, part).exists()]
            if stats:
                size, used = sum(each.st_size for each in stats), max(each.st_atime for each in stats)
                label = quantization_label(head) or "GGUF"
                found.append(LocalModel(str(Path(where, head)), size, label, used, str(root)))
    return found


def local_models(folders: Sequence[str], cache_dir: str | None) -> tuple[list[LocalModel], list[str]]:
    """Returns the models of the hub's cache and of the folders, last used first, and warnings about the cache."""
    repositories, warnings = scan_cache(cache_dir)
    found = [*cached_models(repositories), *(model for folder in folders for model in folder_models(folder))]
    return sorted(found, key=lambda each: -each.last_used), warnings
