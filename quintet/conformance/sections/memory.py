"""Bytes of a device: counted, refused when they run out, given back when they are let go, and planned beforehand.

Where a platform's memory is the host's, every process takes from it: there this process's own size is looked at.
"""

import ctypes
import gc
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import partial

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from quintet.config import EngineConfig
from quintet.conformance.check import ContractViolation, NotSupported, Trial, check, require
from quintet.conformance.harness.subject import Subject
from quintet.interface.platform import Device
from quintet.interface.types import AttentionSpec, Layout, MaxShape, Memory, ShapeBucket
from quintet.interface.weights import CheckpointSlice, Weight
from quintet.layers.quantization import ONLINE, format_for_inputs
from quintet.platforms.host import host_memory

MIB = 2**20
CACHE = 8 * MIB  # of the caches that come and go
CYCLES = 200
WARM = 20  # cycles after which everything that is made once has been made
NOISE = 64 * MIB  # by which other users of a device, and allocators that keep pieces, may move its numbers
DIRT = 0x7F7F7F7F  # nothing like zeros, in any format


@check("memory.facts")
def numbers(subject: Subject) -> Iterator[Trial]:
    yield Trial("free, total and peak", lambda: _believable(subject.device.memory()))
    yield Trial("what is allocated is counted, and free again", partial(_counted, subject))


def _believable(memory: Memory) -> None:
    require(all(type(each) is int for each in memory), f"bytes are whole numbers, not {memory}")
    require(0 < memory.free <= memory.total, f"free is to be over 0 and at most total: {memory}")
    require(0 <= memory.peak, f"the peak is to be 0 or more: {memory}")


def own_memory(subject: Subject) -> Memory:
    """The device's memory, where it counts its own."""
    memory, host = subject.device.memory(), host_memory().total
    if memory.total in {host // share for share in range(1, subject.facts.devices + 1)}:
        raise NotSupported(
            "Device.memory() gives the host's memory, of which every process takes: what one allocation takes does not "
            "show"
        )
    return memory


def _counted(subject: Subject) -> None:
    before = own_memory(subject)
    layout = _layouts(subject)[0]
    pages = max(2, min(256 * MIB, before.free // 4) // layout.nbytes)
    need = pages * layout.nbytes
    slack = min(NOISE, need // 4)
    kv = subject.device.allocate([layout], pages)
    during = subject.device.memory()
    del kv
    gc.collect()
    after = subject.device.memory()
    taken = before.free - during.free
    require(abs(taken - need) <= slack, f"a cache of {need} bytes took {taken} of what memory() says is free")
    require(during.peak >= need, f"a cache of {need} bytes is there, and memory() says the peak is {during.peak}")
    require(after.peak >= need, f"a cache of {need} bytes was there, and memory() says the peak was {after.peak}")
    gone = before.free - after.free
    require(gone <= slack, f"{gone} bytes are missing after a cache of {need} was let go: {before} became {after}")


def _layouts(subject: Subject) -> list[Layout]:
    """Returns the cache layouts of the platform's attention, in each dtype that it computes in."""
    _ = subject.device  # attention is asked for once a device is open
    specs = [AttentionSpec(6, 3, 16, 0.25, dtype, 16) for dtype in subject.facts.dtypes]
    return [subject.platform.mixer(spec, subject.ops, 0).layouts[0] for spec in specs]


@check("memory.cache")
def caches(subject: Subject) -> Iterator[Trial]:
    yield Trial("shapes", partial(_shapes, subject))
    yield Trial("zeros, where others left something", partial(_zeroed, subject))
    yield Trial("no layers, and one page", partial(_small, subject))


def _shapes(subject: Subject) -> None:
    layouts = _layouts(subject)
    kv = subject.device.allocate(layouts * 2, 5)
    require(isinstance(kv, tuple), f"a cache is a tuple with one tensor per layer, not {type(kv).__name__}")
    got, wanted = [tuple(x.shape) for x in kv], [(5, *layout.shape) for layout in layouts * 2]
    require(got == wanted, f"caches of {wanted} were asked for, and {got} came")


def _zeroed(subject: Subject) -> None:
    device = subject.device
    for layout in _layouts(subject):
        pages = max(2, CACHE // layout.nbytes)
        for _ in range(3):
            dirt = device.to_device([np.full(pages * layout.nbytes // 4, DIRT, np.int32)])
            device.to_host(dirt[0])()
            del dirt
            (layer,) = device.allocate([layout], pages)
            came = device.to_host(layer)()
            places = int(came.reshape(-1).view(torch.uint8).count_nonzero())
            require(not places, f"a new cache in {layout.dtype} holds {places} bytes that are not zero")
            del layer, came


def _small(subject: Subject) -> None:
    require(subject.device.allocate([], 4) == (), "a cache of no layers is ()")
    require(len(subject.device.allocate(_layouts(subject)[:1], 1)) == 1, "a cache of one page is a cache")


@check("memory.limit")
def too_much(subject: Subject) -> Iterator[Trial]:
    huge = Layout(torch.float32, (2, 8, 16, 128))
    yield Trial("a cache larger than any machine", partial(_refused, subject, [huge] * 100, 10**8))
    yield Trial("a cache half as large again as what is free", partial(_half_more, subject))
    yield Trial("many refusals in a row", partial(_many, subject, huge))


def _half_more(subject: Subject) -> None:
    layout = _layouts(subject)[0]
    _refused(subject, [layout] * 2, subject.device.memory().free * 3 // 4 // layout.nbytes + 1)


def _many(subject: Subject, layout: Layout) -> None:
    for _ in range(20):
        _refused(subject, [layout] * 4, 10**7)


def _refused(subject: Subject, layouts: list[Layout], pages: int) -> None:
    device, need = subject.device, pages * sum(layout.nbytes for layout in layouts)
    before = device.memory()
    try:
        device.allocate(layouts, pages)
    except MemoryError as error:
        message = str(error)
    else:
        raise ContractViolation(
            f"a cache of {need} bytes was allocated, and {before.free} bytes are free; raise MemoryError"
        )
    known = {field.name for field in fields(EngineConfig)}
    require(
        len(re.findall(r"\d[\d.]*", message)) >= 2,
        f"MemoryError is to say what is needed and what is free: {message!r}",
    )
    require(
        bool(known & set(re.findall(r"\w+", message))), f"MemoryError is to say which setting to lower: {message!r}"
    )
    layout = _layouts(subject)[0]
    require(len(device.allocate([layout], 4)) == 1, "after a refusal, a small cache is there")
    array = np.arange(100, dtype=np.int32)
    came = device.to_host(device.to_device([array.copy()])[0])()
    require(bool((came.numpy() == array).all()), "after a refusal, arrays came back changed")


@check("memory.cycles")
def again_and_again(subject: Subject) -> Iterator[Trial]:
    yield Trial(f"{CYCLES} caches of {CACHE // MIB} MiB", partial(_cycles, subject))
    yield Trial("most of the device, three times", partial(_most, subject))
    yield Trial(f"{CYCLES} uploads of {CACHE // MIB} MiB", partial(_uploads, subject))


class _Start:
    """Memory of the device and of this process when a count began."""

    def __init__(self, device: Device, counts: bool) -> None:
        self._device = device
        _give_back()
        self._free = device.memory().free if counts else 0
        self._process = psutil.Process().memory_info()

    def grown(self) -> int:
        """Bytes that went since, by the device's own numbers, or by what this process touched or asked for."""
        gc.collect()
        now, then = psutil.Process().memory_info(), self._process
        device = self._free - self._device.memory().free if self._free else 0
        return int(max(device, now.rss - then.rss, now.vms - then.vms))


def _give_back() -> None:
    """Frees what the C library keeps for later: a leak would come out of it, and not show."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # another C library
        return


def _start(subject: Subject) -> _Start:
    try:
        own_memory(subject)
    except NotSupported:
        return _Start(subject.device, False)
    return _Start(subject.device, True)


def _cycles(subject: Subject) -> None:
    layout = _layouts(subject)[0]
    pages = CACHE // layout.nbytes
    start = _start(subject)
    for cycle in range(CYCLES):
        if cycle == WARM:
            start = _start(subject)
        subject.device.allocate([layout], pages)
    _nothing_left(start, "caches that were let go")


def _uploads(subject: Subject) -> None:
    start = _start(subject)
    for cycle in range(CYCLES):
        if cycle == WARM:
            start = _start(subject)
        (x,) = subject.device.to_device([np.full(CACHE // 4, cycle, np.int32)])
        subject.device.to_host(x)()
    _nothing_left(start, "arrays that were let go")


def _nothing_left(start: _Start, what: str) -> None:
    grown, through = start.grown(), (CYCLES - WARM) * CACHE
    require(grown < through // 4, f"{grown} bytes went while {through} bytes of {what} came and went")


def _most(subject: Subject) -> None:
    """Allocates a cache of 60% of the free memory three times: each must be freed before the next."""
    free, layout = own_memory(subject).free, _layouts(subject)[0]
    for time in range(3):
        try:
            subject.device.allocate([layout], free * 6 // 10 // layout.nbytes)
        except MemoryError as error:
            raise ContractViolation(
                f"cache {time + 1} of 60% of what is free: the one before was not given back ({error})"
            ) from None
        gc.collect()


SHAPES = {"linear": (160, 192), "embedding": (211, 192), "vector": (1536,)}


@check("memory.plan")
def planned(subject: Subject) -> Iterator[Trial]:
    for use in SHAPES:
        for dtype in subject.facts.dtypes:
            what = f"a weight for {use} in {str(dtype).removeprefix('torch.')}"
            yield Trial(what, partial(_planned, subject, use, dtype, None))
    for name in sorted(subject.facts.weight_formats & set(ONLINE)):
        for dtype in subject.facts.dtypes[:1]:
            what, features = f"a product's weight in {name}", (f"scheme/{name}",)
            yield Trial(what, partial(_planned, subject, "linear", dtype, name), features)


def _planned(subject: Subject, use: str, dtype: torch.dtype, scheme: str | None) -> None:
    _ = subject.device  # a platform places on devices that are open
    x = torch.randn(SHAPES[use], generator=torch.Generator().manual_seed(0))
    part = CheckpointSlice("x", tuple(x.shape), ((0, x.shape[0]),))
    packed = format_for_inputs(ONLINE[scheme] if scheme else None, x.shape[-1])
    weight = Weight("x", (part,), 0, 0, dtype, use, packed)
    planned = subject.platform.estimate(nn.Module(), [weight], MaxShape(ShapeBucket(1, 1, 1, ()), 0, 0)).weights
    placed = subject.platform.place(weight, {"x": x.to(dtype)})
    taken = sum(_nbytes(tensor) for tensor in placed.values())
    parts = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in placed.items())
    least = taken / subject.devices if subject.facts.spmd else taken  # on one device, where several may share it
    near = 0.98 * least - 1024 <= planned <= 1.02 * taken + 1024
    require(near, f"estimate() says {planned} for {tuple(x.shape)} in {dtype}; place() took {taken}: {parts}")


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
