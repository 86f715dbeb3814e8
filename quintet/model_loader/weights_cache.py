"""A model's weights as a platform placed them, kept in a file for the next start (--weights-cache).

A file is found by the digest of all that placing depends on; it holds a JSON header and then the tensors' bytes.
Anyone who may write to the folder can change the model's output: a folder that others can write to is not used.
The file is mapped: a start copies none of it, processes share it, and rows of a table that no prompt has stay on disk.
"""

import contextlib
import functools
import hashlib
import json
import logging
import math
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor, nn

from quintet import __version__
from quintet.common.file_digests import file_identity
from quintet.common.terminal import print_stderr
from quintet.config.cache_dir import cache_folder, unsafe_reason
from quintet.layers.build import Layer, named_layers
from quintet.model_loader.mmap_replace import replace_by_file

try:
    import fcntl
except ImportError:  # no POSIX: an unfinished file is stale by its age
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

FORMAT = 4  # raised with any change of what is in a file
SUFFIX, UNFINISHED = ".weights", "unfinished-"
MAX_HEADER = 2**26  # bytes
ALIGNMENT = 4096  # of a tensor's bytes in the file
AT_A_TIME = 2**26  # bytes that are written at once
UNNOTICED = 0.5  # seconds of a wait without a message
DELAY = 2.0  # seconds before an automatic cache is written: the first tokens come before
AUTO, OFF = "auto", "none"  # of the setting, beside folders
MIN_AUTO_BYTES = 2**26  # of a GGUF file: smaller ones are packed in less than 0.1 s
MAX_AUTO_BYTES = 2**34  # of all files in the user's cache; those that were not used for longest go first
AUTO_SHARE = 0.25  # of the free disk space that one file may take
STALE_SECONDS = 3600.0  # after which an unfinished file is of a process that has ended, where files have no locks
TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int8, torch.int32),
        *(torch.bool, torch.int16, torch.int64),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    )
}


class TensorName(NamedTuple):
    """Path of a layer, and the name that it assigns a tensor to."""

    path: str
    name: str


class CachedTensor(NamedTuple):
    """One tensor in a file. Layers may share one."""

    names: tuple[TensorName, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # from where the tensors begin

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorKind(NamedTuple):
    """The dtype and shape of a parameter that a platform does not repack."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class CacheEntry(NamedTuple):
    """The folder of a cache, and what the platform's placing depends on (Capabilities.layout_key)."""

    folder: Path
    layout_key: str
    auto: bool = False  # by default, so that the folder is bounded and a start does not wait for the file


def cache_entry(setting: str | None, layout_key: str, checkpoint: Path) -> CacheEntry | None:
    """Returns the cache of a setting: a folder; "auto", the user's cache for GGUF files that take long to pack; None.

    ValueError for a folder on a platform that has no layout key: its weights are not in the host's memory."""
    if setting in (None, OFF, "off"):
        return None
    if setting != AUTO:
        if not layout_key:
            raise ValueError("weights_cache: this device's weights do not lie in the host's memory; leave it out")
        return CacheEntry(Path(setting).expanduser(), layout_key)
    large = bool(layout_key) and checkpoint.is_file() and checkpoint.stat().st_size >= MIN_AUTO_BYTES
    return CacheEntry(cache_folder("weights"), layout_key, auto=True) if large else None


@dataclass(frozen=True)
class WeightsCache:
    """One model's weights on one rank, there or not."""

    file: Path
    auto: bool = False
    checkpoint: str = ""  # real path of its first file; without that file the copy has no use

    def load(self, model: nn.Module, expected: Mapping[TensorName, TensorKind]) -> bool:
        """Fills the layers, if the file holds their tensors; False if it does not. `expected`: those of known kind."""
        if unsafe_reason(self.file.parent) is not None or not self.file.is_file():
            return False
        try:
            with self.file.open("rb") as stream:
                kept, start = _header(stream)
                owners = _owners(kept, model)
                _check_kinds(kept, expected)
                for named, tensor in zip(owners, _tensors(stream, kept, start), strict=True):
                    for layer, name in named:
                        layer.assign({name: tensor})
        except (AttributeError, OSError, KeyError, RecursionError, RuntimeError, TypeError, ValueError) as error:
            logger.info("%s is damaged (%s); it is made anew", self.file, error)
            return False
        logger.info("weights as they were placed before: %s", self.file)
        with contextlib.suppress(OSError):
            os.utime(self.file)  # used: the last to go
        return True

    def store(self, model: nn.Module) -> "StoreThread | None":
        """Stores the placed weights for the next start; if that fails, it logs the reason. An automatic cache returns
        the thread that does so: until it has ended, the weights must not change."""
        constants = {(path, name) for path, layer in named_layers(model) for name in layer.constants()}
        kept, tensors = _file_layout([each for each in assigned_tensors(model) if each[0] not in constants])
        if not self.auto:
            self.write(kept, tensors, threading.Event())
            return None
        thread = StoreThread(self, kept, tensors)
        thread.start()
        return thread

    def write(self, kept: Sequence[CachedTensor], tensors: Sequence[Tensor], cancelled: threading.Event) -> None:
        """Writes the file if there is room for it; else, or if that fails, it logs the reason."""
        folder = self.file.parent
        need = kept[-1].offset + kept[-1].nbytes if kept else 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            why = unsafe_reason(folder)
            limit = MAX_AUTO_BYTES if self.auto else math.inf  # a folder of the user's is not bounded
            if why is None:
                prune(folder, limit)
            if why is None and (free := shutil.disk_usage(folder).free) < need + MAX_HEADER:
                why = f"{folder} has {free / 2**30:.1f} GiB left, and {need / 2**30:.1f} GiB are to be kept"
            elif why is None and self.auto and need > min(MAX_AUTO_BYTES, AUTO_SHARE * free):
                return logger.info("weights of %.1f GiB are not kept in %s: give --weights-cache FOLDER to keep them",
                                   need / 2**30, folder)  # fmt: skip
            if why is None:
                _write(self, kept, tensors, cancelled)
                logger.info("packed weights are kept for the next start: %s (%.0f MiB)", self.file, need / 2**20)
                prune(folder, limit)
        except StoreCancelled:
            why = "cancelled"
        except OSError as error:
            why = f"{folder} cannot be written to ({error.strerror})"
        if why is not None:
            level = logging.INFO if self.auto else logging.WARNING  # an automatic one was not asked for
            logger.log(level, "weights_cache: %s; each start packs the weights anew", why)


class StoreCancelled(Exception):
    """The file is not wanted any more."""


class StoreThread(threading.Thread):
    """Writes placed weights to an automatic cache while the engine serves."""

    def __init__(self, cache: WeightsCache, kept: Sequence[CachedTensor], tensors: Sequence[Tensor]) -> None:
        super().__init__(name="quintet-weights-cache")
        self._write = functools.partial(cache.write, kept, tensors)
        self._cancelled, self._finished, self._closing = threading.Event(), threading.Event(), threading.Event()

    def run(self) -> None:
        self._closing.wait(DELAY)
        try:
            self._write(self._cancelled)
        finally:
            self._finished.set()

    def close(self) -> None:
        """Waits for the file, with a message if that takes longer than UNNOTICED. Ctrl-C cancels it."""
        self._closing.set()
        try:
            if not self._finished.wait(UNNOTICED):
                print_stderr("keeping packed weights for the next start; Ctrl-C skips it")
                self._finished.wait()
        except KeyboardInterrupt:  # join() of an interrupted thread may return at once: thus the event
            self._cancelled.set()
            self._finished.wait()


def prune(folder: Path, limit: float) -> None:
    """Removes the files that were not used for longest, beyond `limit` bytes, and what processes left unfinished."""
    total = 0
    states = []
    for file in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):  # another process took it away first
            states.append((file.stat(), file))
    for state, file in sorted(states, key=lambda each: -each[0].st_mtime):
        unfinished = file.name.startswith(UNFINISHED)
        total += 0 if unfinished else state.st_size
        if _is_abandoned(file, state.st_mtime) if unfinished else total > limit:
            file.unlink(missing_ok=True)


def remove_copies(checkpoints: Sequence[Path]) -> None:
    """Removes from the user's cache the weights of checkpoints (real paths of files, or of folders that held them)."""
    folder = cache_folder("weights")
    if unsafe_reason(folder) is not None:
        return
    for file in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError, KeyError, RecursionError, TypeError, ValueError), file.open("rb") as stream:
            original = Path(_read_header(stream)[0]["checkpoint"])
            if any(original.is_relative_to(each) for each in checkpoints):
                file.unlink(missing_ok=True)


def _is_abandoned(file: Path, written: float) -> bool:
    """Returns whether the writer of an unfinished file has ended: it holds a lock as long as it writes."""
    if fcntl is not None:
        with contextlib.suppress(OSError):  # a file system without locks
            try:
                with file.open("r+b") as stream:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return True
            except BlockingIOError:
                return False
    return time.time() - written > STALE_SECONDS


def digest(parts: Iterable[Any], files: Sequence[Path]) -> str:
    """Returns the digest of what placing depends on: `parts`, each with a complete repr, and the checkpoint's files
    (their real names, which in the hub's cache are digests, sizes, times, inodes and samples of their content)."""
    named = hashlib.sha256(f"{FORMAT} {__version__}".encode())
    for part in parts:
        named.update(hashlib.sha256(repr(part).encode()).digest())
    for file in files:
        named.update(file_identity(file))
    return named.hexdigest()


def assigned_tensors(model: nn.Module) -> list[tuple[TensorName, Tensor]]:
    """Returns the tensors of all layers: parameters, and buffers of transformers' modules."""
    return [
        (TensorName(path, name), tensor.detach())
        for path, layer in named_layers(model)
        for name, tensor in layer.assigned_tensors.items()
    ]


def _owners(kept: Sequence[CachedTensor], model: nn.Module) -> list[list[tuple[Layer, str]]]:
    """Returns the layers and names that each tensor belongs to; KeyError for a layer of another model's."""
    layers = dict(named_layers(model))
    return [[(layers[path], name) for path, name in each.names] for each in kept]


def _check_kinds(kept: Sequence[CachedTensor], expected: Mapping[TensorName, TensorKind]) -> None:
    """Raises ValueError for a parameter that is absent, or has another shape or dtype."""
    there = {name: TensorKind(each.dtype, each.shape) for each in kept for name in each.names}
    for name, kind in expected.items():
        if there.get(name) != kind:
            raise ValueError(f"{'.'.join(name)} is {there.get(name)} in it, not {kind}")


def _file_layout(assigned: Sequence[tuple[TensorName, Tensor]]) -> tuple[list[CachedTensor], list[Tensor]]:
    """Returns each distinct tensor once, and its place in the file; tensors keep the model's order."""
    places: dict[Any, list[TensorName]] = {}
    tensors: dict[Any, Tensor] = {}
    for name, tensor in assigned:
        key = tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
        places.setdefault(key, []).append(name)
        tensors[key] = tensor
    kept, offset = [], 0
    for key, names in places.items():
        kept.append(CachedTensor(tuple(names), tensors[key].dtype, tuple(tensors[key].shape), offset))
        offset += -(-kept[-1].nbytes // ALIGNMENT) * ALIGNMENT
    return kept, list(tensors.values())


def _write(
    cache: WeightsCache, kept: Sequence[CachedTensor], tensors: Sequence[Tensor], cancelled: threading.Event
) -> None:
    """Writes the file atomically: another process may read it meanwhile. StoreCancelled leaves nothing of it. Then maps
    it in the place of the tensors' memory."""
    entries = [[each.names, str(each.dtype).removeprefix("torch."), each.shape, each.offset] for each in kept]
    header = json.dumps({"checkpoint": cache.checkpoint, "tensors": entries}).encode()
    start = -(-(8 + len(header)) // ALIGNMENT) * ALIGNMENT
    handle, made = tempfile.mkstemp(SUFFIX, UNFINISHED, dir=cache.file.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            if fcntl is not None:
                with contextlib.suppress(OSError):
                    fcntl.flock(stream, fcntl.LOCK_EX)
            stream.write(len(header).to_bytes(8, "little") + header)
            for each, tensor in zip(kept, tensors, strict=True):
                stream.seek(start + each.offset)
                content = memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
                for first in range(0, len(content), AT_A_TIME):
                    if cancelled.is_set():
                        raise StoreCancelled
                    stream.write(content[first : first + AT_A_TIME])
            stream.flush()
            os.fsync(stream.fileno())  # or a crash could leave a name without its content
            os.replace(made, cache.file)  # while the lock is held
            replace_by_file(stream.fileno(), ((start + each.offset, x) for each, x in zip(kept, tensors, strict=True)))
    except BaseException:
        with contextlib.suppress(OSError):
            Path(made).unlink()
        raise


def _header(stream: BinaryIO) -> tuple[list[CachedTensor], int]:
    """Returns the tensors' entries, and the offset where tensors begin; ValueError if they do not fit the file."""
    size, (header, length) = os.fstat(stream.fileno()).st_size, _read_header(stream)
    kept = [
        CachedTensor(
            tuple(TensorName(str(path), str(name)) for path, name in names),
            TYPES[dtype],
            tuple(map(int, shape)),
            int(offset),
        )
        for names, dtype, shape, offset in header["tensors"]
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


def _read_header(stream: BinaryIO) -> tuple[Any, int]:
    """Returns a file's header and its length in bytes."""
    size, length = os.fstat(stream.fileno()).st_size, int.from_bytes(stream.read(8), "little")
    if not 0 < length <= min(MAX_HEADER, size):
        raise ValueError("its header is not whole")
    return json.loads(stream.read(length)), length


def _tensors(stream: BinaryIO, kept: Sequence[CachedTensor], start: int) -> list[Tensor]:
    """The tensors by memory map: private, so that nothing written to them gets into the file."""
    memory = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_WILLNEED"):
        memory.madvise(mmap.MADV_WILLNEED)  # read ahead while the rest of the engine starts
    whole = torch.frombuffer(memory, dtype=torch.uint8)[start:]
    return [whole[each.offset : each.offset + each.nbytes].view(each.dtype).reshape(each.shape) for each in kept]
