"""Which files of a folder hold a model's weights."""

import reprlib
from pathlib import Path, PurePath
from typing import Any

from quintet.engine import gguf_source
from quintet.engine.json_object import read_object

NAMED = 8  # tensors that an error lists before it only counts


def files(folder: Path) -> list[Path]:
    """The files that make up the model: those that an index names, or the one of the usual name, or all there are.

    Some folders hold the same weights again in another layout (consolidated.safetensors), or an adapter's.
    """
    if folder.is_file():
        return gguf_source.paths(folder)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return _regular(_indexed(index))
    if (folder / "model.safetensors").exists():
        return _regular([folder / "model.safetensors"])
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        pickles = sorted(file.name for file in folder.glob("*.bin"))
        raise ValueError(
            f"{folder} has no *.safetensors file"
            + (f", only {listed(pickles)}, and a pickle runs code when it is read" if pickles else "")
            + "; convert the checkpoint with transformers' save_pretrained(), or use load_format='dummy'"
        )
    return _regular(found)


def _regular(files: list[Path]) -> list[Path]:
    """ValueError for what would block when it is opened (a named pipe), or is a folder."""
    wrong = next((file for file in files if not file.is_file()), None)
    if wrong is not None:
        raise ValueError(f"{wrong} is no regular file; fetch it again")
    return files


def _indexed(index: Path) -> list[Path]:
    """The files that it names. A link may lead out of the folder, as in the hub's cache; a name may not."""
    where = read_object(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ValueError(f"{index} is not an index of safetensors files: it has no weight_map; fetch it again")
    for tensor, name in where.items():
        if not _is_inside(name):
            raise ValueError(
                f"{index}: weight_map says that {tensor[:80]!r} is in {reprlib.repr(name)}, which is no file of its "
                "folder; fetch it again"
            )
    files = [index.parent / name for name in sorted(set(where.values()))]
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise ValueError(
            f"{index.parent} lacks {listed(absent)}, which {index.name} names; fetch the rest of the model"
        )
    return files


def _is_inside(name: Any) -> bool:
    """Whether it is the path of a file within a folder."""
    if not isinstance(name, str) or not name.endswith(".safetensors") or not name.isprintable() or len(name) > 255:
        return False
    path = PurePath(name)
    return not path.is_absolute() and ".." not in path.parts


def listed(names: list[str]) -> str:
    shown = ", ".join(names[:NAMED])
    return shown if len(names) <= NAMED else f"{shown} and {len(names) - NAMED} more"
