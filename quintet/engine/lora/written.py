"""Files of adapters that callers gave as tensors: the engine reads these as it reads others, on each rank."""

import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from quintet.lora.adapter import adapter_digest, write_adapter


class WrittenAdapters:
    """A folder for each content, as long as it has users. Any thread may call it."""

    def __init__(self) -> None:
        self._root: tempfile.TemporaryDirectory[str] | None = None
        self._folders: dict[bytes, Path] = {}  # by digest
        self._lock = threading.Lock()

    def write(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
        """Returns the folder of an adapter with this content. AdapterError or OSError says why it cannot be written."""
        with self._lock:
            if self._root is None:
                self._root = tempfile.TemporaryDirectory(prefix="quintet-adapters-")
            folder = Path(tempfile.mkdtemp(dir=self._root.name))
        try:
            write_adapter(folder, config, tensors)
            digest = adapter_digest(folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        with self._lock:
            kept = self._folders.setdefault(digest, folder)
        if kept != folder:
            shutil.rmtree(folder, ignore_errors=True)
        return kept

    @property
    def digests(self) -> list[bytes]:
        """Digests of the adapters that have a folder here."""
        with self._lock:
            return list(self._folders)

    def delete(self, digest: bytes) -> None:
        """Deletes an adapter's files, if it came as tensors."""
        with self._lock:
            folder = self._folders.pop(digest, None)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Deletes all."""
        if self._root is not None:
            self._root.cleanup()
