"""Rows of encoders in a folder that several engines see: a file for each medium, by its digest and the encoder's."""

import hashlib
import logging
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from quintet.config.media.ec_transfer import ECTransferConfig
from quintet.media.items import MediaItem

logger = logging.getLogger(__name__)
SUFFIX = ".rows"
WIDEST = 4  # bytes of a number
HEADER = 2**16  # bytes of a file beside its rows


def identity_of(tensors: Iterable[tuple[str, Tensor]]) -> bytes:
    """Returns a digest of an encoder's weights as they lie on this device."""
    found = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors:
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.digest()


class SharedRows:
    """The folder, as one encoder uses it. A file that cannot be read or written costs the time to encode."""

    def __init__(self, config: ECTransferConfig, identity: bytes) -> None:
        """`identity`: of what is encoded with. ValueError if the folder cannot be made."""
        self._config, self._identity, self._folder = config, identity, Path(config.extras.shared_storage_path)
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ValueError(f"{config.name}: {self._folder} is no folder for rows: {error}") from None

    def load(self, item: MediaItem, levels: int, width: int) -> tuple[Tensor, ...] | None:
        """Returns an item's rows [count, width] of up to `levels`; None if they are not there, or of other sizes."""
        if not self._config.reads:
            return None
        file, count = self._file(item), item.count
        try:
            if file.stat().st_size > levels * count * width * WIDEST + HEADER:
                raise ValueError("it is larger than its rows")
            rows = load(file.read_bytes())["rows"]
            if rows.dim() != 3 or not 0 < len(rows) <= levels or rows.shape[1:] != (count, width):
                raise ValueError(f"it has rows {tuple(rows.shape)}, not {(levels, count, width)}")
            if not rows.is_floating_point() or not bool(rows.isfinite().all()):
                raise ValueError(f"its rows of {rows.dtype} are no finite floats")
            os.utime(file)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            logger.warning("rows of a %s are encoded again: %s: %s", item.kind, file, error)
            return None
        return tuple(rows)

    def save(self, item: MediaItem, rows: tuple[Tensor, ...]) -> None:
        """Writes an item's rows [count, H] of each level, if this engine does, and deletes the oldest of too many."""
        if not self._config.writes:
            return
        file = self._file(item)
        partial = file.with_name(f"{file.name}.{os.getpid()}")
        try:
            partial.write_bytes(save({"rows": torch.stack(rows).cpu().contiguous()}))
            partial.replace(file)  # whole, or not there
            self._bound()
        except OSError as error:
            logger.warning("rows of a %s are not shared: %s: %s", item.kind, file, error)
            partial.unlink(missing_ok=True)

    def _file(self, item: MediaItem) -> Path:
        key = hashlib.blake2b(self._identity + item.digest, digest_size=16).hexdigest()
        return self._folder / f"{key}{SUFFIX}"

    def _bound(self) -> None:
        """Deletes files, those first that were not read for longest, until the rest has max_bytes."""
        found = [(each.stat(), each) for each in self._folder.glob(f"*{SUFFIX}")]
        size = sum(state.st_size for state, _ in found)
        for state, file in sorted(found, key=lambda each: each[0].st_mtime):
            if size <= self._config.extras.max_bytes:
                return
            file.unlink(missing_ok=True)
            size -= state.st_size
