"""The sum of small messages by csrc/cuda, where it was built and devices reach each other. Unverified on a GPU."""

import ctypes
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

LIBRARY = "quintet._cuda_comm"  # no module: found as one, loaded as what it is
MAX_RANKS = 8  # as csrc/cuda/all_reduce.h has it
# Each rank reads every rank's: beyond this NCCL's two passes move less. A guess until it is measured.
MAX_BYTES = 256 * 1024
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class CustomAllReduce:
    """One rank's part. Every rank makes the same calls in the same order."""

    def __init__(self, library: Any, regions: Sequence[int], rank: int, queue: Any) -> None:
        self._library, self._rank, self._size, self._queue = library, rank, len(regions), queue
        self._regions = (ctypes.c_void_p * len(regions))(*regions)

    def supports(self, x: Tensor) -> bool:
        nbytes = x.numel() * x.element_size()
        plain = x.is_contiguous() and x.data_ptr() % 16 == 0 and x.dtype in DTYPES
        return plain and 0 < nbytes <= MAX_BYTES and nbytes % 16 == 0

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        pointers = ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr())
        code = self._library.quintet_comm_all_reduce(
            self._regions, self._rank, self._size, *pointers, ctypes.c_int64(x.numel()), DTYPES[x.dtype],
            ctypes.c_void_p(self._queue()),
        )  # fmt: skip
        _check(self._library, code)
        return out


def load(name: str = LIBRARY) -> Any:
    """The library, or the reason why there is none."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        return f"{name} was not built: install quintet-llm from source with nvcc and a GPU, or QUINTET_CUDA=ON"
    try:
        library = ctypes.CDLL(found.origin)
    except OSError as error:
        return f"{name} cannot be loaded: {error}"
    library.quintet_comm_error.restype = ctypes.c_char_p
    return library


def join(library: Any, store: Any, rank: int, size: int, queue: Any) -> CustomAllReduce | str:
    """Opens this rank's region and gets the others' addresses; or returns, on every rank, why sums are left to NCCL.

    The store is one of this process: ranks share regions as addresses. `queue` gives the current stream's handle.
    """
    if size > MAX_RANKS:
        return f"{size} ranks, and it serves up to {MAX_RANKS}"
    devices = (ctypes.c_int * size)(*range(size))
    reaches = ctypes.c_int(0)
    if code := library.quintet_comm_reaches(devices, size, ctypes.byref(reaches)):
        return f"the devices cannot be asked: {_error_text(library, code)}"
    if not reaches.value:
        return "the devices do not reach each other's memory"
    region = ctypes.c_void_p()
    code = library.quintet_comm_open(devices, size, rank, ctypes.byref(region))
    store.set(f"region {rank}", str(0 if code else region.value))
    regions = [int(store.get(f"region {other}")) for other in range(size)]
    if not all(regions):
        return f"a rank could not open its region: {_error_text(library, code) if code else 'not this one'}"
    return CustomAllReduce(library, regions, rank, queue)


def _check(library: Any, code: int) -> None:
    if code:
        raise RuntimeError(f"the small-message sum failed: {_error_text(library, code)}")


def _error_text(library: Any, code: int) -> str:
    return str(library.quintet_comm_error(code).decode())
