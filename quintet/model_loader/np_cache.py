"""Tensors of torch.save's files kept as NumPy arrays beside them (load_format="npcache"), for the starts after."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quintet.common.json_files import read_object
from quintet.model_loader.torch_checkpoint import TensorHeader, TorchFile

FOLDER = "np"  # vLLM's
INDEX = "quintet.json"
PLAIN = {"float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"}  # that NumPy has


class NpCache:
    """The arrays of one file: made when they are missing or older than it."""

    def __init__(self, file: Path) -> None:
        self._folder = file.parent / FOLDER / file.name
        state = file.stat()
        self._stamp = [state.st_size, state.st_mtime_ns]
        self._said = self._kept() or self._made(TorchFile(file))

    def keys(self) -> list[str]:
        return list(self._said)

    def get_slice(self, name: str) -> TensorHeader:
        number, dtype, shape = self._said[name]
        return TensorHeader(tuple(shape), getattr(torch, dtype))

    def get_tensor(self, name: str) -> Tensor:
        number, dtype, shape = self._said[name]
        content = np.load(self._folder / f"{number}.npy", mmap_mode="c", allow_pickle=False)
        return torch.from_numpy(content).view(getattr(torch, dtype)).reshape(shape)

    def _kept(self) -> dict[str, Any] | None:
        """Returns the index of tensors that were cached from this very file; None if there is none."""
        index = self._folder / INDEX
        content = read_object(index) if index.is_file() else {}
        tensors = content.get("tensors")
        return tensors if content.get("of") == self._stamp and isinstance(tensors, dict) else None

    def _made(self, file: TorchFile) -> dict[str, Any]:
        """The index comes last: without it nothing counts."""
        content = {}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for number, name in enumerate(file.keys()):
                tensor = file.get_tensor(name).contiguous()
                dtype = str(tensor.dtype).removeprefix("torch.")
                plain = tensor if dtype in PLAIN else tensor.reshape(-1).view(torch.uint8)
                np.save(self._folder / f"{number}.npy", plain.numpy(), allow_pickle=False)
                content[name] = (number, dtype, list(tensor.shape))
            handle, made = tempfile.mkstemp(dir=self._folder)
            with os.fdopen(handle, "w") as stream:
                json.dump({"of": self._stamp, "tensors": content}, stream)
            os.replace(made, self._folder / INDEX)
        except OSError as error:
            raise ValueError(
                f"load_format='npcache' keeps arrays in {self._folder}, which cannot be written ({error.strerror}); "
                "use load_format='pt'"
            ) from None
        return content
