"""Arrays to the device and back: what comes home, when, and that it stays as it is.

Work between uploads and downloads is done by ops of sampling, which every device must have between its steps.
"""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quintet.conformance.check import Trial, check, require
from quintet.conformance.harness.subject import Subject
from quintet.interface.platform import State
from quintet.interface.types import Batch, Outputs, ShapeBucket
from quintet.interface.weights import CheckpointSlice, Weight
from quintet.ops import Ops

Array = np.ndarray[Any, Any]
FLIGHTS = 64  # uploads, and copies home, that are under way at once
BIG = 1_000_003  # elements: more than one piece of any staging memory, and no multiple of a page
WIDE = (48, 1021)  # of the arrays that are many in flight
TURNS = 6  # steps of one size: who records them plays them again by the third
STEP = ShapeBucket(16, 16, 16, (), decode=True)

ARRAYS: dict[str, Callable[[], list[Array]]] = {
    "int32": lambda: [np.arange(-6, 6, dtype=np.int32).reshape(3, 4)],
    "float32": lambda: [np.array([0.0, -0.0, 1e-30, 3.4e38, np.inf, -np.inf], np.float32)],
    "a NaN": lambda: [np.array([1.0, np.nan, -2.0], np.float32)],
    "uint8": lambda: [np.arange(256, dtype=np.uint8).reshape(2, 128)],
    "the ends of int32": lambda: [np.array([-(2**31), 2**31 - 1, 0, -1], np.int32)],
    "empty": lambda: [np.zeros(shape, np.int32) for shape in ((0,), (0, 2), (3, 0), (2, 0, 5))],
    "nothing at all": list,
    "no dimension": lambda: [np.array(7, np.int32), np.array(0.5, np.float32)],
    "one element": lambda: [np.ones((1,) * dims, np.float32) for dims in (1, 2, 4)],
    "transposed": lambda: [np.arange(35, dtype=np.float32).reshape(5, 7).T],
    "every third column": lambda: [np.arange(60, dtype=np.int32).reshape(4, 15)[:, ::3]],
    "a row of a larger one": lambda: [np.arange(60, dtype=np.float32).reshape(4, 15)[2]],
    "big": lambda: [np.arange(BIG, dtype=np.int32)],
    "a step's dozen of mixed types": lambda: [
        np.arange(n, dtype=dtype) for n, dtype in zip(range(12), [np.int32, np.float32, np.uint8] * 4, strict=True)
    ],
}


@check("device.arrays")
def round_trips(subject: Subject) -> Iterator[Trial]:
    for what, make in ARRAYS.items():
        yield Trial(what, partial(_round_trip, subject, make))


def _round_trip(subject: Subject, make: Callable[[], list[Array]]) -> None:
    device, arrays, wanted = subject.device, make(), make()
    there = device.to_device(arrays)
    require(len(there) == len(arrays), f"to_device() of {len(arrays)} arrays gave {len(there)} tensors")
    for i, (x, want) in enumerate(zip(there, wanted, strict=True)):
        require(tuple(x.shape) == want.shape, f"array {i} of shape {want.shape} has {tuple(x.shape)} on the device")
    waiting = [device.to_host(x) for x in there]
    for i, (wait, want) in enumerate(zip(waiting, wanted, strict=True)):
        _same(wait(), want, f"array {i} of {len(wanted)}")


def _same(got: Tensor, want: Array, what: str) -> None:
    """To the bit; what is not a number may be another one that is not."""
    require(type(got) is Tensor and got.device == torch.empty(0).device, f"{what} came as {type(got)} on {got.device}")
    array = got.numpy()
    require(array.dtype == want.dtype, f"{what} went as {want.dtype} and came as {array.dtype}")
    require(array.shape == want.shape, f"{what} went with shape {want.shape} and came with {array.shape}")
    equal = array == want
    if want.dtype.kind == "f":
        equal = (equal & (np.signbit(array) == np.signbit(want))) | (np.isnan(array) & np.isnan(want))
    if not equal.all():
        at = tuple(int(i) for i in np.argwhere(~equal)[0])
        require(False, f"{what}: element {at} went as {want[at]} and came as {array[at]}; {(~equal).sum()} differ")


@check("device.wait")
def what_was_queued_before(subject: Subject) -> Iterator[Trial]:
    yield Trial(f"{FLIGHTS} copies home, each behind one more op", partial(_chain, subject, list(range(FLIGHTS))))
    yield Trial("the copies waited for in the other order", partial(_chain, subject, list(range(FLIGHTS))[::-1]))
    yield Trial("a copy that is waited for after all later work", partial(_chain, subject, [FLIGHTS - 1, 0]))
    yield Trial("waiting twice gives the same", partial(_twice, subject))
    yield Trial("an op's inputs that are let go at once", partial(_let_go, subject))


def _doubled(subject: Subject, x: Tensor, times: int = 1) -> Tensor:
    """x [R, V] * 2**times, exactly, in memory of its own."""
    rows = x.shape[0]
    (half,) = subject.device.to_device([np.full(rows, 0.5**times, np.float32)])
    return subject.ops.scale_logits(subject.ops.widen(x, rows, True), half)


def _chain(subject: Subject, order: list[int]) -> None:
    """x becomes 2 x, 4 x, ...: each is sent home at its place in the queue, and its memory let go."""
    device = subject.device
    start = np.arange(WIDE[0] * WIDE[1], dtype=np.float32).reshape(WIDE) % 1000
    (x,) = device.to_device([start.copy()])
    waiting = []
    for _ in range(FLIGHTS):
        x = _doubled(subject, x)
        waiting.append(device.to_host(x))
    for i in order:
        _same(waiting[i](), start * np.float32(2.0 ** (i + 1)), f"the copy after {i + 1} doublings of {FLIGHTS}")


def _twice(subject: Subject) -> None:
    device = subject.device
    array = np.arange(9000, dtype=np.float32).reshape(9, 1000)
    x = _doubled(subject, device.to_device([array.copy()])[0])
    wait = device.to_host(x)
    first = wait().clone()
    for _ in range(8):  # later work, which has memory of its own
        x = _doubled(subject, x)
    _same(first, array * 2, "the first time")
    _same(wait(), array * 2, "the second time, after later work")


def _let_go(subject: Subject) -> None:
    """Memory that the host lets go of may be given to others once the work that reads it is done, not before."""
    device = subject.device
    waiting = []
    for i in range(FLIGHTS):
        x, quarter = device.to_device([np.full(WIDE, i, np.float32), np.full(WIDE[0], 0.25, np.float32)])
        waiting.append(device.to_host(subject.ops.scale_logits(x, quarter)))
        del x, quarter
    for i, wait in enumerate(waiting):
        _same(wait(), np.full(WIDE, 4 * i, np.float32), f"product {i}, whose factors were let go at once")


@check("device.kept")
def what_was_handed_over(subject: Subject) -> Iterator[Trial]:
    yield Trial(f"{FLIGHTS} uploads in flight, their arrays let go", partial(_uploads, subject, WIDE))
    yield Trial(f"{FLIGHTS} small uploads in flight", partial(_uploads, subject, (3,)))
    yield Trial("uploads of growing sizes", partial(_growing, subject))
    yield Trial(f"{FLIGHTS} results on the host, whatever comes after", partial(_results, subject))
    yield Trial("one upload read by many ops", partial(_read_often, subject))


def _uploads(subject: Subject, shape: tuple[int, ...]) -> None:
    """Nothing waits between them, so memory that is pinned for one must not serve the next too soon."""
    device = subject.device
    there = [device.to_device([np.full(shape, i, np.int32), np.full(shape, -i, np.float32)]) for i in range(FLIGHTS)]
    gc.collect()
    for i, (whole, real) in enumerate(there):
        _same(device.to_host(whole)(), np.full(shape, i, np.int32), f"upload {i} of {FLIGHTS}, first array")
        _same(device.to_host(real)(), np.full(shape, -i, np.float32), f"upload {i} of {FLIGHTS}, second array")


def _growing(subject: Subject) -> None:
    device, sizes = subject.device, [1 << i for i in range(18)]
    there = [device.to_device([np.arange(size, dtype=np.int32) + size])[0] for size in sizes]
    for size, x in zip(sizes, there, strict=True):
        _same(device.to_host(x)(), np.arange(size, dtype=np.int32) + size, f"the upload of {size} elements")


def _results(subject: Subject) -> None:
    """The tensors that they came from are gone, and their memory has been given to others."""
    device = subject.device

    def came(i: int) -> Tensor:
        (x,) = device.to_device([np.full(WIDE, i, np.float32)])
        return device.to_host(_doubled(subject, x))()

    results = [came(i) for i in range(FLIGHTS)]
    gc.collect()
    for i in range(FLIGHTS):
        came(-1000 - i)
    for i, result in enumerate(results):
        _same(result, np.full(WIDE, 2 * i, np.float32), f"result {i} of {FLIGHTS}, looked at again later")


def _read_often(subject: Subject) -> None:
    device = subject.device
    array = np.arange(5000, dtype=np.float32).reshape(5, 1000)
    (x,) = device.to_device([array.copy()])
    waiting = [device.to_host(_doubled(subject, x, times)) for times in range(16)]
    for times, wait in enumerate(waiting):
        _same(wait(), array * 2**times, f"product {times} of 16 with the same upload")
    _same(device.to_host(x)(), array, "the upload itself, after 16 products")


@check("device.kept")
def what_came_home(subject: Subject) -> Iterator[Trial]:
    """It is no view of what is overwritten later: of weights that are replaced, of the outputs of one step after the
    other."""
    yield Trial("weights, and then others are written over them", partial(_written_over, subject))
    yield Trial(f"the results of {TURNS} steps, looked at after the last", partial(_of_steps, subject, True))
    yield Trial(f"the results of {TURNS} steps, waited for after the last", partial(_of_steps, subject, False))


def _written_over(subject: Subject) -> None:
    device, (rows, width) = subject.device, WIDE
    weight = Weight("x", (CheckpointSlice("x", WIDE, ((0, rows),)),), 0, 0, torch.float32, "vector")
    there = subject.platform.place(weight, {"x": torch.full(WIDE, 1.0)})
    came = device.to_host(there["x"])()
    subject.platform.place(weight, {"x": torch.full((rows, width), 2.0)}, there)
    _same(came, np.full(WIDE, 1, np.float32), "weights that came home before others were written over them")
    _same(device.to_host(there["x"])(), np.full(WIDE, 2, np.float32), "the weights that were written over them")


class _LookUp(nn.Module):
    """A step that gives the table's row of each token."""

    def __init__(self, ops: Ops, table: Tensor) -> None:
        super().__init__()
        self.vocab_size = WIDE[1]
        self._ops = ops.take("embedding", "take_rows")
        self.table = nn.Parameter(table, requires_grad=False)

    def forward(self, state: State, batch: Batch) -> tuple[Outputs, State]:
        rows = self._ops.embedding(batch.token_ids, self.table, 0, False)
        return Outputs(self._ops.take_rows(rows, batch.logits_indices)), state


def _of_steps(subject: Subject, waits: bool) -> None:
    """A step's result may be overwritten by the next step, but not the copy that was started before that."""
    there, host = subject.with_new_platform(), STEP.batch
    table = np.arange(WIDE[0] * WIDE[1], dtype=np.float32).reshape(WIDE)
    model = _LookUp(there.ops, there.place(torch.from_numpy(table.copy()), "embedding")["x"]).eval()
    state = there.device.allocate((), 1)
    step = there.platform.compile(model, [STEP])
    ids = [(np.arange(STEP.tokens, dtype=np.int32) * 5 + 7 * turn) % WIDE[0] for turn in range(TURNS)]
    waiting = []
    for each in ids:
        given = host._replace(token_ids=each)
        out, state = step(state, given.on(there.device.to_device(given.leaves())))
        assert out.logits is not None
        waiting.append(there.device.to_host(out.logits))
        if waits:
            waiting[-1]()
    for turn, (wait, each) in enumerate(zip(waiting, ids, strict=True)):
        _same(wait(), table[each], f"the result of step {turn + 1} of {TURNS}, after the last")
