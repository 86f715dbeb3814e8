"""A model's weights as a platform placed them, kept in a file for the next start (--weights-cache).

A file is found by the digest of everything that placing depends on; it holds a JSON header and then the tensors' bytes.
Anyone who may write to the folder can change the model's output: a folder that others can write to is not used.
"""

import contextlib
import hashlib
import json
import logging
import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor, nn

from quintet import __version__
from quintet.config.cache_dir import unsafe_reason

logger = logging.getLogger(__name__)

FORMAT = 1  # raised with any change of what is in a file
SUFFIX = ".weights"
MAX_HEADER = 2**26  # bytes
ALIGNMENT = 4096  # of a tensor's bytes in the file
HUGE = 2**21  # bytes of a huge page
AT_A_TIME = 2**26  # bytes that are read or written at once
HEADS = 2**20  # bytes of a checkpoint's file that its digest looks at, besides its size and times
TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int8, torch.int32),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    )
}


class CachedTensor(NamedTuple):
    """One tensor in a file. Parameters may share one."""

    names: tuple[str, ...]  # of the parameters
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # from where the tensors begin

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class CacheEntry(NamedTuple):
    """The folder of a cache, and what the platform's placing depends on (Capabilities.layout_key)."""

    folder: Path
    layout_key: str


@dataclass(frozen=True)
class WeightsCache:
    """One model's weights on one rank, there or not."""

    file: Path

    def load(self, model: nn.Module) -> bool:
        """Fills the model, if the file holds exactly its parameters; False if it does not."""
        if unsafe_reason(self.file.parent) is not None or not self.file.is_file():
            return False
        try:
            with self.file.open("rb") as stream:
                kept, start = _header(stream)
                named = _parameters(kept, model)
                tensors = _tensors(stream, kept, start)
        except (AttributeError, OSError, KeyError, RecursionError, TypeError, ValueError) as error:
            logger.info("%s is damaged (%s); it is made anew", self.file, error)
            return False
        for places, tensor in zip(named, tensors, strict=True):
            for module, name in places:
                setattr(module, name, nn.Parameter(tensor, requires_grad=False))  # also where a layer says None of it
        logger.info("weights as they were placed before: %s", self.file)
        return True

    def store(self, model: nn.Module) -> None:
        """Stores the placed weights for the next start; if that fails, it logs the reason."""
        parameters = list(model.named_parameters(remove_duplicate=False))
        folder, kept, tensors = self.file.parent, *_file_layout(parameters)
        need = kept[-1].offset + kept[-1].nbytes if kept else 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            why = unsafe_reason(folder)
            if why is None and (free := shutil.disk_usage(folder).free) < need + MAX_HEADER:
                why = f"{folder} has {free / 2**30:.1f} GiB left, and {need / 2**30:.1f} GiB are to be kept"
            if why is None:
                _write(self.file, kept, tensors)
        except OSError as error:
            why = f"{folder} cannot be written to ({error.strerror})"
        if why is not None:
            logger.warning("weights_cache: %s; each start packs the weights anew", why)


def digest(parts: Iterable[Any], files: Sequence[Path]) -> str:
    """Returns the digest of what placing depends on: `parts`, each with a complete repr, and the checkpoint's files
    (their real names, which in the hub's cache are digests, sizes, times and beginnings)."""
    named = hashlib.sha256(f"{FORMAT} {__version__}".encode())
    for part in parts:
        named.update(hashlib.sha256(repr(part).encode()).digest())
    for file in files:
        state = file.stat()
        named.update(f"{file.resolve()} {state.st_size} {state.st_mtime_ns}".encode())
        with file.open("rb") as stream:
            named.update(hashlib.sha256(stream.read(HEADS)).digest())
    return named.hexdigest()


def _parameters(kept: Sequence[CachedTensor], model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Returns the modules and names that each tensor belongs to; AttributeError for a name of another model's."""
    split = [[name.rpartition(".") for name in each.names] for each in kept]
    return [[(model.get_submodule(parent), name) for parent, _, name in each] for each in split]


def _file_layout(parameters: Sequence[tuple[str, Tensor]]) -> tuple[list[CachedTensor], list[Tensor]]:
    """Returns each distinct tensor once, and its place in the file; tensors keep the model's order."""
    places: dict[Any, list[str]] = {}
    tensors: dict[Any, Tensor] = {}
    for name, tensor in parameters:
        key = tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
        places.setdefault(key, []).append(name)
        tensors[key] = tensor
    kept, offset = [], 0
    for key, names in places.items():
        kept.append(CachedTensor(tuple(names), tensors[key].dtype, tuple(tensors[key].shape), offset))
        offset += -(-kept[-1].nbytes // ALIGNMENT) * ALIGNMENT
    return kept, list(tensors.values())


def _write(file: Path, kept: Sequence[CachedTensor], tensors: Sequence[Tensor]) -> None:
    """Writes the file atomically: another process may read it meanwhile."""
    entries = [[each.names, str(each.dtype).removeprefix("torch."), each.shape, each.offset] for each in kept]
    header = json.dumps(entries).encode()
    start = -(-(8 + len(header)) // ALIGNMENT) * ALIGNMENT
    handle, made = tempfile.mkstemp(SUFFIX, dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(len(header).to_bytes(8, "little") + header)
            for each, tensor in zip(kept, tensors, strict=True):
                stream.seek(start + each.offset)
                content = memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
                for first in range(0, len(content), AT_A_TIME):
                    stream.write(content[first : first + AT_A_TIME])
        os.replace(made, file)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(made).unlink()
        raise


def _header(stream: BinaryIO) -> tuple[list[CachedTensor], int]:
    """Returns the tensors' entries, and the offset where tensors begin; ValueError if they do not fit the file."""
    size, length = os.fstat(stream.fileno()).st_size, int.from_bytes(stream.read(8), "little")
    if not 0 < length <= min(MAX_HEADER, size):
        raise ValueError("its header is not whole")
    kept = [
        CachedTensor(tuple(map(str, names)), TYPES[dtype], tuple(map(int, shape)), int(offset))
        for names, dtype, shape, offset in json.loads(stream.read(length))
    ]
    start = -(-(8 + length) // ALIGNMENT) * ALIGNMENT
    ends = [each.offset + each.nbytes for each in kept]
    if not kept or any(min(each.shape, default=0) < 0 or each.offset % ALIGNMENT for each in kept):
        raise ValueError("its header says what no file holds")
    if kept[0].offset or any(end > later.offset for end, later in zip(ends, kept[1:], strict=False)):
        raise ValueError("its tensors overlap")
    if start + kept[-1].offset + kept[-1].nbytes != size:
        raise ValueError("it is cut short")
    return kept, start


def _tensors(stream: BinaryIO, kept: Sequence[CachedTensor], start: int) -> list[Tensor]:
    """Reads the tensors into one piece of memory, in huge pages if available: products read weights from end to end."""
    size = kept[-1].offset + kept[-1].nbytes
    memory = mmap.mmap(-1, size + HUGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    whole = whole[-whole.data_ptr() % HUGE :][:size]
    into = whole.numpy().data
    stream.seek(start)
    for first in range(0, size, AT_A_TIME):
        piece = into[first : first + AT_A_TIME]
        if stream.readinto(piece) != len(piece):  # type: ignore[attr-defined]
            raise ValueError("it is cut short")
    found = []
    for each in kept:
        content = whole[each.offset : each.offset + each.nbytes]
        found.append(content.view(each.dtype).reshape(each.shape))
    return found
