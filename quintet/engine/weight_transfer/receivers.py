"""Ways by which tensors come to a rank: shared memory, files, TCP, a process group of torch.distributed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from quintet.model_loader.weight_files import WeightFiles

Expect = Callable[[str, list[int], torch.dtype], None]  # ValueError: a tensor that is to come has no place
TCP = "tcp"


class Receiver(Protocol):
    """An open way."""

    def receive(self, info: Mapping[str, Any], expect: Expect) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of one transfer, with their names; nothing else has them. `expect` is called before room
        is made for one."""

    def close(self) -> None: ...


def open_receiver(info: Mapping[str, Any], ranks: Sequence[int], device: torch.device) -> Receiver:
    """Opens the way that `info` names (vLLM's init_info; ours has "backend" beside it), for the ranks of this process,
    counted over all engines. ValueError or OSError says why it cannot be opened."""
    if info.get("backend") == TCP or "address" in info:
        from quintet.engine.weight_transfer.tcp import TCPReceiver

        return TCPReceiver(info, ranks)
    from quintet.engine.weight_transfer.process_group import GroupReceiver  # imports torch.distributed

    return GroupReceiver(info, ranks, device)


def receive_files(info: Mapping[str, Any], expect: Expect) -> Iterator[tuple[str, Tensor]]:
    """Yields tensors of a segment of shared memory, or of a folder's safetensors; they may be gone when the next is
    asked for. ValueError or OSError: they cannot be read."""
    if "folder" in info:
        yield from _read_folder(Path(str(info["folder"])).expanduser())
        return
    from quintet.engine.weight_transfer.shared_memory import read_segment

    yield from read_segment(info, expect)


def _read_folder(folder: Path) -> Iterator[tuple[str, Tensor]]:
    if not folder.is_dir():
        raise ValueError(f"update_info: {str(folder)[:200]} is no folder on this machine")
    for _, handle in WeightFiles(folder).open_files():
        for name in handle.keys():  # a handle is no mapping
            yield name, handle.get_tensor(name)
