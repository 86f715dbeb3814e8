"""A platform whose device is behind the host for good: it works when somebody waits, and then in order.

Until then everything that it will give holds zeros or NaN, so an engine that looks early sees nonsense. Its cache is a
real one: what a token's slot says and where it stands decides what comes next, so whoever writes to another's page is
found out.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quintet.interface.platform import Capabilities, Device, State, Step
from quintet.interface.types import Batch, Layout, Outputs, ShapeBucket, leaves
from quintet.ops.registry import Op, Ops
from quintet.platforms import SelectedPlatform
from quintet.platforms.null.platform import Null, NullDevice

SAMPLING = (
    *("widen", "greedy", "sample", "scale_logits", "filter_logits", "top_logprobs", "penalize"),
    *("bias_tokens", "ban_tokens", "keep_tokens", "place_tokens"),
)


class Job:
    """A piece of work, done once."""

    def __init__(self, run: Callable[[], object], sure: bool) -> None:
        self.run, self.sure, self.done = run, sure, False


class Work:
    """What the device still has to do, and what happened when. Steps are counted from 0."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []  # ("launch", step), and ("wait", step) when the host first waits for it
        self.requests: list[int] = []  # of each step
        self.fails: list[tuple[str, int, BaseException]] = []  # launch, run or wait; the first step; the error
        self.calls: set[tuple[Any, ...]] = set()  # ops and the shapes that they were called with
        self._queue: deque[Job] = deque()
        self.allocations = 0  # of a cache

    @property
    def step(self) -> int:
        """The last that was launched."""
        return len(self.requests) - 1

    def begin(self) -> None:
        """What was noted so far does not count."""
        self.log.clear()
        self.requests.clear()
        self.calls.clear()

    def launch(self, requests: int) -> None:
        self.requests.append(requests)
        self.log.append(("launch", self.step))
        self.fail("launch", self.step)

    def fail(self, where: str, step: int) -> None:
        """Raises what was asked for, once."""
        for failure in self.fails:
            if failure[0] == where and failure[1] <= step:
                self.fails.remove(failure)
                raise failure[2]

    def add(self, run: Callable[[], object], sure: bool = False) -> Job:
        """`sure`: it is done even after an error."""
        self._queue.append(job := Job(run, sure))
        return job

    @torch.inference_mode()
    def until(self, job: Job) -> None:
        """Works up to there. After an error nothing that was queued is computed; the host hears of it once."""
        while not job.done:
            first = self._queue.popleft()
            try:
                first.run()
            except Exception as error:
                self._give_up()
                raise error
            finally:
                first.done = True

    def _give_up(self) -> None:
        """What is queued is computed no more, but for copies to the device."""
        for job in self._queue:
            if job.sure:
                job.run()
            job.done = True
        self._queue.clear()

    def later(self, name: str) -> Callable[..., Any]:
        """An op that is run when its turn comes."""
        function = Op.registry[name].reference

        def call(*args: Any) -> Any:
            self.calls.add((name, *(_shape(arg) for arg in args)))
            promised = function(*args)  # of what is there now, for the shapes
            given = {x.untyped_storage().data_ptr() for x in _tensors(args)}
            for out in _tensors(promised):
                if out.untyped_storage().data_ptr() not in given:
                    _spoil(out)

            def run() -> None:
                for out, x in zip(_tensors(promised), _tensors(function(*args)), strict=True):
                    out.copy_(x)

            self.add(run)
            return promised

        return call

    def in_place(self, name: str) -> Callable[..., Any]:
        """An op that changes its first argument when its turn comes."""
        function = Op.registry[name].reference

        def call(kept: Tensor, *args: Any) -> Tensor:
            self.add(lambda: function(kept, *args))
            return kept

        return call

    def take(self, ops: Ops) -> None:
        """From now on these ops are run by the device."""
        for name in (*SAMPLING, "gather_pages"):
            ops.__dict__[name] = self.later(name)
        ops.__dict__["scatter_pages"] = self.in_place("scatter_pages")


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, tuple):
        for each in x:
            yield from _tensors(each)


def _shape(x: Any) -> Any:
    if isinstance(x, Tensor):
        return tuple(x.shape)
    return tuple(map(_shape, x)) if isinstance(x, tuple) else x


def _spoil(x: Tensor) -> None:
    x.fill_(torch.nan if x.is_floating_point() else 0)


class BehindDevice(NullDevice):
    """Copies to and fro come in their turn, too."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def allocate(self, layouts: Sequence[Layout], units: int) -> State:
        self.work.allocations += 1
        if layouts[0].unit != "page":
            return (torch.empty(0),) * len(layouts)
        page_size = layouts[0].shape[2]
        return (torch.zeros(units, page_size, dtype=torch.int64), *[torch.empty(0)] * (len(layouts) - 1))

    def to_device(self, arrays: Sequence[np.ndarray[Any, Any]]) -> tuple[Tensor, ...]:
        there = tuple(torch.zeros_like(torch.from_numpy(array)) for array in arrays)

        def run() -> None:
            for to, array in zip(there, arrays, strict=True):
                to.copy_(torch.from_numpy(array))

        self.work.add(run, sure=True)
        return there

    def to_host(self, x: Tensor) -> Callable[[], Tensor]:
        here, step = torch.zeros_like(x), self.work.step
        _spoil(here)
        job = self.work.add(lambda: here.copy_(x))

        def wait() -> Tensor:
            if ("wait", step) not in self.work.log:
                self.work.log.append(("wait", step))
            self.work.fail("wait", step)
            self.work.until(job)
            return here

        return wait


def behind(work: Work, **facts: Any) -> SelectedPlatform:
    """Such a platform, doing this work."""

    class Behind(Null):
        name = "behind"

        def open(self, rank: int) -> Device:
            return BehindDevice(work)

        def compile(self, model: nn.Module, buckets: Iterable[ShapeBucket]) -> Step:
            vocab: int = model.vocab_size  # type: ignore[assignment]  # every model has it; nn.Module hides the type
            logits = torch.zeros(4096, vocab)  # of every step: the next overwrites them

            def step(state: State, batch: Batch) -> tuple[Outputs, State]:
                work.launch(batch.query_start_loc.shape[0] - 1)
                out, number = logits[: batch.logits_indices.shape[0]], work.step

                def run() -> None:
                    work.fail("run", number)
                    out.copy_(torch.from_numpy(_model(state[0].numpy(), batch, vocab)))

                work.add(run)
                return Outputs(out), state

            return step

    probed = Null.probe()
    assert isinstance(probed, Capabilities)
    return SelectedPlatform(Behind, Capabilities(devices=1, dtypes=probed.dtypes, **facts), "for a test")


def _model(cache: np.ndarray[Any, Any], batch: Batch, vocab: int) -> np.ndarray[Any, Any]:
    """Writes each token to its slot; logits are made of all that stands in the slots up to a row's token."""
    token_ids, positions, owners, _, rows, slots, table, *_ = (leaf.numpy() for leaf in leaves(batch))
    if token_ids.min() < 0:
        raise IndexError("there is no token of a negative id")
    cache.reshape(-1)[slots] = token_ids * 4096 + positions
    out = np.zeros((len(rows), vocab), np.float32)
    for row, token in enumerate(rows):
        seen = cache[table[owners[token]]].reshape(-1)[: int(positions[token]) + 1]
        key = int(seen @ (np.arange(len(seen)) * 2654435761 % 1000003 + 1)) % 2**32
        out[row] = np.random.default_rng(key).normal(size=vocab) * 3
    return out
