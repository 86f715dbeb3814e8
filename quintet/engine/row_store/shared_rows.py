"""Rows of encoders in a folder that several engines see: a file for each medium, by its digest and the encoder's."""

import contextlib
import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from quintet.config.media.ec_transfer import ECTransferConfig
from quintet.media.items import MediaItem
from quintet.media.processors.made import fields_digest

logger = logging.getLogger(__name__)
SUFFIX, PARTIAL = ".rows", ".partial"  # of files, and while they are written
LEFT = 3600  # seconds after which a file is not being written any more
SCANS = 16  # countings of the folder while max_bytes are written
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 4  # bytes of a number
HEADER = 2**16  # bytes of a file beside its rows


def identity_of(known: Sequence[Any], tensors: Iterable[tuple[str, Tensor]]) -> bytes:
    """Returns a digest of an encoder: what is known of it, and its weights as they lie on this device."""
    found = hashlib.blake2b(json.dumps(_public(known), sort_keys=True, default=str).encode(), digest_size=16)
    for name, tensor in tensors:
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.digest()


def _public(known: Any) -> Any:
    """Entries of a config, without those that say where its files lie."""
    if isinstance(known, dict):
        return {str(name): _public(each) for name, each in known.items() if not str(name).startswith("_")}
    return [_public(each) for each in known] if isinstance(known, list | tuple) else known


class SharedRows:
    """The folder, as one encoder uses it. A file that cannot be read or written costs the time to encode."""

    def __init__(self, config: ECTransferConfig, identity: bytes) -> None:
        """`identity`: of what is encoded with. ValueError if the folder cannot be made."""
        self._config, self._identity, self._folder = config, identity, Path(config.extras.shared_storage_path)
        self._unseen = config.extras.max_bytes  # bytes that were written since the folder's were counted
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self._folder.stat().st_mode & 0o022:
                logger.warning("%s: other users may write rows to it, which change what the model sees", self._folder)
        except OSError as error:
            raise ValueError(f"{config.name}: {self._folder} is no folder for rows: {error}") from None

    def load(self, item: MediaItem, levels: int, width: int) -> tuple[Tensor, ...] | None:
        """Returns an item's rows [count, width] of up to `levels`; None if they are not there, or of other sizes."""
        if not self._config.reads:
            return None
        file, count = self._file(item), item.count
        try:
            rows = load(_content(file, levels * count * width * WIDEST + HEADER))["rows"]
            if rows.dim() != 3 or not 0 < len(rows) <= levels or rows.shape[1:] != (count, width):
                raise ValueError(f"it has rows {tuple(rows.shape)}, not {(levels, count, width)}")
            if rows.dtype not in DTYPES or not bool(rows.isfinite().all()):
                raise ValueError(f"its rows of {rows.dtype} are no finite floats of the types that encoders have")
            os.utime(file)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            logger.warning("rows of a %s are encoded again: %s: %s", item.kind, file, error)
            return None
        return tuple(rows)

    def save(self, item: MediaItem, rows: tuple[Tensor, ...]) -> None:
        """Writes an item's rows [count, H] of each level, if this engine does, and deletes the oldest of too many."""
        if not self._config.writes:
            return
        file, content = self._file(item), save({"rows": torch.stack(rows).cpu().contiguous()})
        partial = ""
        try:
            handle, partial = tempfile.mkstemp(PARTIAL, dir=self._folder)
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
            Path(partial).replace(file)  # whole, or not there
            self._unseen += len(content)
            if self._unseen * SCANS >= self._config.extras.max_bytes:
                self._unseen = 0
                self._bound()
        except OSError as error:
            logger.warning("rows of a %s are not shared: %s: %s", item.kind, file, error)
            if partial:
                _delete(Path(partial))

    def _file(self, item: MediaItem) -> Path:
        content = fields_digest(item.kind, item.fields)  # a caller's name for the medium (uuid) is in item.digest
        key = hashlib.blake2b(self._identity + content, digest_size=16).hexdigest()
        return self._folder / f"{key}{SUFFIX}"

    def _bound(self) -> None:
        """Deletes files, those first that were not read for longest, until the rest has max_bytes; and what writers
        that were killed have left."""
        found: list[tuple[float, int, Path]] = []
        for entry in os.scandir(self._folder):
            with contextlib.suppress(FileNotFoundError):  # another engine has deleted it
                state = entry.stat(follow_symlinks=False)
                if entry.name.endswith(SUFFIX):
                    found.append((state.st_mtime, state.st_size, Path(entry.path)))
                elif entry.name.endswith(PARTIAL) and state.st_mtime < time.time() - LEFT:
                    _delete(Path(entry.path))
        size = sum(each for _, each, _ in found)
        for _, own, file in sorted(found):
            if size <= self._config.extras.max_bytes:
                return
            _delete(file)
            size -= own


def _content(file: Path, most: int) -> bytes:
    """Reads a file of at most so many bytes. ValueError if it is larger, or no plain file."""
    handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as stream:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError("it is no plain file")
        content = stream.read(most + 1)
    if len(content) > most:
        raise ValueError("it is larger than its rows")
    return content


def _delete(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()
