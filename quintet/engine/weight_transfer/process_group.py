"""Tensors that a trainer broadcasts over a process group of torch.distributed: gloo, or NCCL.

The trainer is rank 0 of the group, and `rank_offset` ranks of the group come before the engine's, as in vLLM. Both ends
call join_group(); no rank sends an object, so nothing is unpickled.
"""

import datetime
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from quintet.engine.weight_transfer.receivers import Expect
from quintet.engine.weight_transfer.tensor_types import dtype_named

PREFIX = "quintet weights"
SECONDS = 300.0
# backends, by the names that init_process_group() has for them -> torch's classes; all but the first are unverified
KINDS = {name.removeprefix("ProcessGroup").lower(): name for name in ("ProcessGroupGloo", "ProcessGroupNCCL")}
HOST = next(iter(KINDS))  # tensors of the host's memory


def join_group(
    address: str, port: int, rank: int, world_size: int, backend: str = "gloo", seconds: float = SECONDS
) -> Any:
    """Joins a group beside the default one -> torch's ProcessGroup. Rank 0 listens at the address. Returns when all
    ranks have come. ValueError: this torch has no such backend; RuntimeError if they do not come."""
    kind = getattr(dist, KINDS.get(backend, ""), None)
    if kind is None:
        raise ValueError(f"this torch has no process groups of {backend!r}; give one of {', '.join(KINDS)}")
    limit = datetime.timedelta(seconds=seconds)
    torch_store: Any = dist  # torch's stubs leave stores out
    store = torch_store.PrefixStore(PREFIX, torch_store.TCPStore(address, port, world_size, rank == 0, limit))
    if backend != HOST:
        options = kind.Options()
        options._timeout = limit
        return kind(store, rank, world_size, options)
    return kind(store, rank, world_size, limit)


def broadcast(group: Any, tensor: Tensor, root: int = 0) -> None:
    """Sends the root's tensor to all ranks of a group, which write it into theirs."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = root, 0
    group.broadcast([tensor], options).wait()


def send_tensors(group: Any, tensors: Iterable[Tensor]) -> None:
    """The trainer's half: broadcasts tensors in the order of update_info's names."""
    for tensor in tensors:
        broadcast(group, tensor.detach().contiguous())


class GroupReceiver:
    """Memberships of this process's ranks in a trainer's group."""

    def __init__(self, info: Mapping[str, Any], ranks: Sequence[int], device: torch.device) -> None:
        """`device`: of the first rank's weights.

        `info`: vLLM's master_address, master_port, rank_offset and world_size; backend, gloo if left out."""
        missing = [name for name in ("master_address", "master_port", "world_size") if name not in info]
        if missing:
            raise ValueError(f"init_info lacks {', '.join(missing)}: the trainer's address, and the size of its group")
        offset, size = int(info.get("rank_offset", 1)), int(info["world_size"])
        outside = [rank + offset for rank in ranks if rank + offset >= size]
        if outside:
            raise ValueError(
                f"init_info: world_size {size} has no rank {outside[0]}; it is rank_offset and all ranks of the engine"
            )
        backend, seconds = str(info.get("backend", "gloo")), float(info.get("timeout", SECONDS))
        self._device = torch.empty(0).device if backend == HOST else device
        self._pool = ThreadPoolExecutor(len(ranks), thread_name_prefix="weights")
        place = str(info["master_address"]), int(info["master_port"])
        joins = [self._pool.submit(join_group, *place, rank + offset, size, backend, seconds) for rank in ranks]
        try:
            self._groups = [join.result() for join in joins]
        except RuntimeError as error:
            raise OSError(f"the trainer's process group was not joined: {error}") from None

    def receive(self, info: Mapping[str, Any], expect: Expect) -> Iterator[tuple[str, Tensor]]:
        """Yields tensors in the order of vLLM's names, dtype_names and shapes."""
        if info.get("packed"):
            raise ValueError("update_info: packed=True is not read; broadcast one tensor at a time (packed=False)")
        names, types, shapes = (list(info.get(key, ())) for key in ("names", "dtype_names", "shapes"))
        if not len(names) == len(types) == len(shapes):
            raise ValueError(
                f"update_info has {len(names)} names, {len(types)} dtype_names and {len(shapes)} shapes; give one of "
                "each for each tensor"
            )
        wanted = [
            (str(name), [int(each) for each in shape], dtype_named(dtype))
            for name, dtype, shape in zip(names, types, shapes, strict=True)
        ]
        for each in wanted:
            expect(*each)
        for name, shape, dtype in wanted:
            yield name, self._received(shape, dtype)

    def close(self) -> None:
        self._groups = []
        self._pool.shutdown(wait=False)

    def _received(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensors = [torch.empty(list(shape), dtype=dtype, device=self._device) for _ in self._groups]
        calls = [self._pool.submit(broadcast, *each) for each in zip(self._groups, tensors, strict=True)]
        try:
            for call in calls:
                call.result()
        except RuntimeError as error:
            raise ConnectionError(f"the trainer is gone: {str(error)[:200]}") from None
        return tensors[0]
