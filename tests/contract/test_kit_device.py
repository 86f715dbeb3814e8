"""The kit's sections of probing, devices, memory, ranks, steps and sampling name the clause that a platform breaks."""

import importlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quintet.config import EngineConfig
from quintet.conformance import kit
from quintet.conformance.harness import rank_threads
from quintet.conformance.harness.subject import Subject
from quintet.conformance.sections import probe
from quintet.interface.platform import (
    Capabilities,
    Communicator,
    Device,
    Platform,
    SingleRank,
    State,
    Step,
    Unavailable,
)
from quintet.interface.types import Batch, Estimate, Layout, MaxShape, Memory, Outputs, RankInfo, ShapeBucket, leaves
from quintet.interface.weights import Weight
from quintet.ops import bind
from quintet.ops.sampling import Draw
from quintet.platforms.cpu.ops.extension import missing
from quintet.platforms.cpu.platform import CPU, CPUDevice
from tests.helpers.platforms.loopback import LoopbackPlatform
from tests.helpers.platforms.planted import first_failure

MIB = 2**20


def stand_in(platform: type[Platform]) -> Subject:
    """The platform under test, found under the name of the one that it is made of."""
    subject = Subject("cpu")
    facts = platform.probe()
    assert isinstance(facts, Capabilities)
    subject.chosen = replace(subject.chosen, platform=platform, capabilities=facts)
    subject.facts = facts
    return subject


# ---------------------------------------------------------------------------------------------------------- probing


PLANTED = """
import os
import threading

from quintet.platforms.cpu.platform import CPU


class Touches(CPU):
    @classmethod
    def probe(cls):
        os.environ["PROBED"] = "yes"
        cls().open(0)
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return super().probe()


class Needs(CPU):
    @classmethod
    def probe(cls):
        import pytest
        return super().probe()
"""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that a fresh process can import: there, probing is tried."""
    (tmp_path / "planted_platforms.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("planted_platforms")
    del sys.modules["planted_platforms"]


@pytest.mark.slow
def test_a_probe_that_leaves_something_behind_and_takes_long(planted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = stand_in(CPU)
    subject.chosen = replace(subject.chosen, platform=planted.Touches)
    said = first_failure("probe.pure", subject)
    assert "changed environment variables (PROBED); it opened 1 devices" in said and "threads running" in said
    monkeypatch.setattr(probe, "TIMEOUT", 0.0)
    assert "0 s are allowed" in first_failure("probe.quick", subject)


@pytest.mark.slow
def test_a_probe_that_needs_what_may_be_missing(planted: Any) -> None:
    said = first_failure("probe.reasons", stand_in(planted.Needs))
    assert "ModuleNotFoundError: No module named 'pytest'" in said


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"devices": 0}, "devices is to be 1 or more"),
        ({"dtypes": ()}, "dtypes is to be a tuple"),
        ({"dtypes": (torch.int8,)}, "torch's floating types"),
        ({"dtypes": (torch.float32, torch.float32)}, "names one twice"),
        ({"dtypes": (torch.float8_e5m2,)}, "8-bit types are formats"),
        ({"fp8": torch.float16}, "fp8 is to be None or one of"),
        ({"weight_formats": frozenset(["int3"])}, "kinds that quintet does not have: ['int3']"),
        ({"overlap": "no"}, "overlap of Capabilities must be True or False"),
        ({"detail": "another"}, "a second probe() returns"),
    ],
)
def test_facts_that_cannot_be(facts: dict[str, Any], says: str) -> None:
    subject = stand_in(CPU)
    subject.facts = replace(subject.facts, **facts)
    assert says in first_failure("probe.facts", subject)


class Silent(CPU):
    @classmethod
    def configure(cls, config: EngineConfig) -> tuple[EngineConfig, list[str]]:
        return super().configure(config)[0].replace(max_num_seqs=8), []


class Restless(CPU):
    @classmethod
    def configure(cls, config: EngineConfig) -> tuple[EngineConfig, list[str]]:
        return config.replace(max_num_seqs=max(1, config.max_num_seqs // 2)), ["half as many requests"]


class InPlace(CPU):
    @classmethod
    def configure(cls, config: EngineConfig) -> tuple[EngineConfig, list[str]]:
        object.__setattr__(config, "max_num_seqs", 8)
        return config, ["8 requests"]


class Curt(CPU):
    @classmethod
    def configure(cls, config: EngineConfig) -> tuple[EngineConfig, list[str]]:
        if config.enforce_eager:
            raise ValueError("unsupported")
        return super().configure(config)


class Boundless(CPU):
    @classmethod
    def configure(cls, config: EngineConfig) -> tuple[EngineConfig, list[str]]:
        settled, reasons = super().configure(config.replace(tensor_parallel_size=1))
        return settled.replace(tensor_parallel_size=config.tensor_parallel_size), reasons


@pytest.mark.parametrize(
    ("platform", "says"),
    [
        (Silent, "changed ['max_num_seqs', 'kv_cache_memory_bytes'] and gave no reason"),
        (Restless, "gave other values of max_num_seqs"),
        (InPlace, "changed the config that it was given"),
        (Curt, "names no setting of it"),
        (Boundless, "configure() took tensor_parallel_size=17"),
    ],
)
def test_a_configuration_that_is_not_settled(platform: type[CPU], says: str) -> None:
    said = first_failure("probe.configure", stand_in(platform))
    assert all(part in said for part in says.split("['max_num_seqs', 'kv_cache_memory_bytes']"))


# ---------------------------------------------------------------------------------------------------------- devices


class Planted(CPU):
    """A platform whose device is another."""

    _made: type[CPUDevice]

    def open(self, rank: int) -> Device:
        super().open(rank)
        return self._made()


def opening(device: type[CPUDevice]) -> type[CPU]:
    return type(f"Opens{device.__name__}", (Planted,), {"_made": device})


class Strideless(CPUDevice):
    """Reads the memory of an array from its beginning on, however it lies."""

    def to_device(self, arrays: Sequence[np.ndarray[Any, Any]]) -> tuple[Tensor, ...]:
        return super().to_device([array.T.copy().reshape(array.shape) if array.ndim > 1 else array for array in arrays])


class OneType(CPUDevice):
    """Keeps bytes as int32."""

    def to_device(self, arrays: Sequence[np.ndarray[Any, Any]]) -> tuple[Tensor, ...]:
        return super().to_device([a.astype(np.int32) if a.dtype == np.uint8 else a for a in arrays])


class Flat(CPUDevice):
    """Knows no empty arrays of more than one dimension."""

    def to_device(self, arrays: Sequence[np.ndarray[Any, Any]]) -> tuple[Tensor, ...]:
        return super().to_device([array if array.size else array.reshape(-1) for array in arrays])


class ShortRead(CPUDevice):
    """The last bytes of a large copy are left out."""

    def to_host(self, x: Tensor) -> Callable[[], Tensor]:
        came = x.clone()
        if came.numel() > 2**18:
            came.view(-1)[-3:] = 0
        return lambda: came


class Staged(CPUDevice):
    """All copies home go through one piece of memory."""

    def to_host(self, x: Tensor) -> Callable[[], Tensor]:
        if not hasattr(self, "staging") or self.staging.shape != x.shape or self.staging.dtype != x.dtype:
            self.staging = torch.empty_like(x)
        staging = self.staging
        staging.copy_(x)
        return lambda: staging


class Once(CPUDevice):
    """A copy can be waited for once."""

    def to_host(self, x: Tensor) -> Callable[[], Tensor]:
        came = [torch.zeros_like(x), x]
        return lambda: came.pop() if len(came) > 1 else came[0]


class Alias(CPUDevice):
    """What came home is the device's own memory."""

    def to_host(self, x: Tensor) -> Callable[[], Tensor]:
        return lambda: x


class Lazy(CPUDevice):
    """A copy is made when somebody waits for it."""

    def to_host(self, x: Tensor) -> Callable[[], Tensor]:
        return lambda: x.clone()


class Reused(CPUDevice):
    """All uploads of a shape go through one piece of pinned memory, which the next overwrites."""

    def to_device(self, arrays: Sequence[np.ndarray[Any, Any]]) -> tuple[Tensor, ...]:
        pinned: dict[Any, Tensor] = vars(self).setdefault("pinned", {})
        there = []
        for place, x in enumerate(super().to_device(arrays)):
            there.append(pinned.setdefault((place, x.shape, x.dtype), torch.empty_like(x)).copy_(x))
        return tuple(there)


@pytest.mark.grid(cases=3)
@pytest.mark.parametrize(
    ("device", "clause", "says"),
    [
        (Strideless, "device.arrays", "int32: array 0 of 1: element (0, 1) went as -5 and came as"),
        (OneType, "device.arrays", "went as uint8 and came as int32"),
        (Flat, "device.arrays", "array 1 of shape (0, 2) has (0,)"),
        (ShortRead, "device.arrays", "3 differ"),
        (Staged, "device.wait", "the copy after 1 doublings of 64"),
        (Once, "device.wait", "the second time, after later work"),
        (Reused, "device.kept", "upload 0 of 64, first array"),
        (Staged, "device.kept", "result 0 of 64, looked at again later"),
        (Alias, "device.kept", "weights that came home before others were written over them"),
    ],
)
def test_a_device_that_loses_something(device: type[CPUDevice], clause: str, says: str) -> None:
    assert says in first_failure(clause, stand_in(opening(device)))


@pytest.mark.skipif(missing("Graph") is not None, reason="steps are not recorded without the compiled extension")
@pytest.mark.parametrize("device", [Alias, Lazy])
def test_results_of_recorded_steps_that_are_no_copies(device: type[CPUDevice]) -> None:
    """Such steps write to the same memory: a view of it, or a copy that comes too late, shows the next one's."""
    assert "the result of step" in first_failure("device.kept", stand_in(opening(device)), "the results of 6 steps")


# ----------------------------------------------------------------------------------------------------------- memory


class Counting(CPUDevice):
    """A small device that counts its caches; what is planted below it counts wrongly."""

    total = 192 * MIB

    def __init__(self) -> None:
        self.used = self.peak = 0

    def memory(self) -> Memory:
        return Memory(self.total - self.used, self.total, self.peak)

    def allocate(self, layouts: Sequence[Layout], units: int) -> State:
        need, free = units * sum(layout.nbytes for layout in layouts), self.memory().free
        if need > free:
            raise MemoryError(f"{need} bytes are needed and {free} are free; lower num_pages")
        kv = tuple(torch.zeros((units, *layout.shape), dtype=layout.dtype) for layout in layouts)
        self.take(need, kv)
        return kv

    def take(self, need: int, kv: State) -> None:
        self.used += need
        self.peak = max(self.peak, self.used)
        if kv:
            weakref.finalize(kv[0], self.give, need)

    def give(self, need: int) -> None:
        self.used -= need


class Forgets(Counting):
    """Counts nothing."""

    def take(self, need: int, kv: State) -> None:
        self.peak = max(self.peak, need)


class Keeps(Counting):
    """Nothing comes back."""

    def give(self, need: int) -> None:
        self.used += 0


class Leaks(Counting):
    """Of every cache, a part stays."""

    total = 1024 * MIB

    def give(self, need: int) -> None:
        self.used -= need // 2


class NoPeak(Counting):
    """The peak is that of the moment."""

    def memory(self) -> Memory:
        return super().memory()._replace(peak=0)


class Inflated(CPUDevice):
    def memory(self) -> Memory:
        memory = super().memory()
        return memory._replace(free=memory.total + 1)


class Dirty(CPUDevice):
    def allocate(self, layouts: Sequence[Layout], units: int) -> State:
        kv = super().allocate(layouts, units)
        for layer in kv:
            layer[-1].view(-1)[-1] = 1
        return kv


class Short(CPUDevice):
    def allocate(self, layouts: Sequence[Layout], units: int) -> State:
        return tuple(layer[1:] for layer in super().allocate(layouts, units))


class Limitless(CPUDevice):
    def allocate(self, layouts: Sequence[Layout], units: int) -> State:
        return tuple(torch.empty((units, *layout.shape), device="meta") for layout in layouts)


class Crashes(CPUDevice):
    def allocate(self, layouts: Sequence[Layout], units: int) -> State:
        try:
            return super().allocate(layouts, units)
        except MemoryError:
            raise RuntimeError("device lost") from None


class Mute(CPUDevice):
    def allocate(self, layouts: Sequence[Layout], units: int) -> State:
        try:
            return super().allocate(layouts, units)
        except MemoryError:
            raise MemoryError("out of memory") from None


class Stuck(Counting):
    """After the first refusal, nothing is given out."""

    def allocate(self, layouts: Sequence[Layout], units: int) -> State:
        try:
            return super().allocate(layouts, units)
        except MemoryError:
            self.total = 0
            raise


class Hoarding(CPUDevice):
    """Keeps every cache."""

    def allocate(self, layouts: Sequence[Layout], units: int) -> State:
        kv = super().allocate(layouts, units)
        vars(self).setdefault("kept", []).append(kv)
        return kv


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "clause", "says"),
    [
        (Inflated, "memory.facts", "free is to be over 0 and at most total"),
        (Forgets, "memory.facts", "took 0 of what memory() says is free"),
        (Keeps, "memory.facts", "bytes are missing after a cache"),
        (NoPeak, "memory.facts", "memory() says the peak is 0"),
        (Dirty, "memory.cache", "bytes that are not zero"),
        (Short, "memory.cache", "were asked for, and"),
        (Limitless, "memory.limit", "was allocated, and"),
        (Crashes, "memory.limit", "device lost"),
        (Mute, "memory.limit", "is to say what is needed and what is free"),
        (Stuck, "memory.limit", "are needed and 0 are free"),
        (Hoarding, "memory.cycles", "of caches that were let go came and went"),
        (Leaks, "memory.cycles", "of caches that were let go came and went"),
    ],
)
def test_memory_that_is_not_what_it_seems(device: type[CPUDevice], clause: str, says: str) -> None:
    assert says in first_failure(clause, stand_in(opening(device)))


@pytest.mark.sweep
def test_memory_that_is_counted_passes() -> None:
    """Otherwise those above fail for another reason."""
    for clause in ("memory.facts", "memory.limit", "memory.cycles"):
        with pytest.raises(pytest.fail.Exception, match="every trial"):
            first_failure(clause, stand_in(opening(Counting)))


class Unplanned(CPU):
    def estimate(self, model: nn.Module, weights: Sequence[Weight], max_shape: MaxShape) -> Estimate:
        made = super().estimate(model, weights, max_shape)
        return made._replace(weights=made.weights // 2)


def test_a_plan_that_is_too_small() -> None:
    assert "estimate() says" in first_failure("memory.plan", stand_in(Unplanned))


def ahead(bucket: Callable[[ShapeBucket], ShapeBucket], workspace: int = 1) -> type[CPU]:
    """One that names a step to run ahead, made of the largest, and a workspace."""

    def estimate(self: CPU, model: nn.Module, weights: Sequence[Weight], max_shape: MaxShape) -> Estimate:
        return CPU.estimate(self, model, weights, max_shape)._replace(
            workspace=workspace, buckets=(bucket(max_shape.largest),)
        )

    return type("Ahead", (CPU,), {"estimate": estimate})


@pytest.mark.parametrize(
    ("platform", "among", "says"),
    [
        (ahead(lambda most: most, workspace=0), "what a small model", "a step of 16 tokens: Estimate("),
        (ahead(lambda most: most._replace(tokens=2 * most.tokens)), "the steps", "no step is larger than"),
        (ahead(lambda most: most._replace(pages=())), "the steps", "no step is larger than"),
        (ahead(lambda most: most._replace(decode=True)), "the steps", "a request brings one token"),
    ],
)
def test_a_plan_of_steps_that_cannot_come(platform: type[CPU], among: str, says: str) -> None:
    assert says in first_failure("memory.plan", stand_in(platform), among)


def test_a_plan_of_steps_that_run() -> None:
    assert kit.first_failure(stand_in(ahead(lambda most: most)), "memory.plan", "the steps") is None


class Sleepless(CPU):
    """Its weights do not survive."""

    def open(self, rank: int) -> Device:
        super().open(rank)
        self._opened = SleeplessDevice()
        return self._opened

    def place(
        self, weight: Weight, parts: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        placed = super().place(weight, {name: tensor.clone() for name, tensor in parts.items()}, into)
        self._opened.weights += placed.values()
        return placed


class SleeplessDevice(CPUDevice):
    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def sleep(self, level: int) -> int:
        for weight in self.weights:
            weight.data.mul_(0.5)
        return super().sleep(level)


@pytest.mark.slow
def test_weights_that_do_not_survive_sleep() -> None:
    assert "awake after sleep(1), the model's logits differ" in first_failure("memory.sleep", stand_in(Sleepless))


# ------------------------------------------------------------------------------------------------------------ ranks


class Wrapped(Communicator):
    """A communicator that does as the one inside does."""

    def __init__(self, inside: Communicator) -> None:
        self.rank, self.size, self.inside = inside.rank, inside.size, inside

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.inside.all_reduce(x)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return self.inside.all_gather(x, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return self.inside.reduce_scatter(x, dim)

    def all_to_all(self, x: Tensor, dim: int) -> Tensor:
        return self.inside.all_to_all(x, dim)


class OwnFirst(Wrapped):
    """Each rank adds up in an order of its own."""

    def all_reduce(self, x: Tensor) -> Tensor:
        every = list(self.inside.all_gather(x[None], 0))
        return (
            torch.stack(every[self.rank :] + every[: self.rank]).double().mul(1 + 1e-8 * self.rank).sum(0).to(x.dtype)
        )


class Unsummed(Wrapped):
    """Rank 0's numbers in the place of the sum's, past the first thousand."""

    def all_reduce(self, x: Tensor) -> Tensor:
        out = self.inside.all_reduce(x.clone())
        return torch.where(torch.arange(x.numel()).view(x.shape) < 1000, out, self.inside.all_gather(x[None], 0)[0])


class Backwards(Wrapped):
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self.inside.all_gather(x, dim).chunk(self.size, dim)[::-1], dim)


class Neighbours(Wrapped):
    """The share of the next rank."""

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return self.inside.all_reduce(x.clone()).chunk(self.size, dim)[(self.rank + 1) % self.size]


class Kept(Wrapped):
    """Pieces stay where they are."""

    def all_to_all(self, x: Tensor, dim: int) -> Tensor:
        self.inside.all_to_all(x, dim)
        return x


class Overwritten(Wrapped):
    """Each sum of a shape stands where the one before stood."""

    def all_reduce(self, x: Tensor) -> Tensor:
        out = self.inside.all_reduce(x)
        kept: dict[Any, Tensor] = vars(self).setdefault("kept", {})
        return kept.setdefault((out.shape, out.dtype), torch.empty_like(out)).copy_(out)


class Fickle(Wrapped):
    """The 50th sum has another last bit, on every rank."""

    turns = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        self.turns += 1
        return self.inside.all_reduce(x) * (1 + 2e-7 * (self.turns % 50 == 0))


class Absent(Wrapped):
    """Rank 1 never comes to a join; nobody waits longer than three seconds for it, nor for rank 0's answer."""

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        if self.rank == 1:
            threading.Event().wait()
        rank_threads.TIMEOUT = 3.0
        return x


class Doubled(SingleRank):
    def all_reduce(self, x: Tensor) -> Tensor:
        return x * 2


def connecting(kind: type[Wrapped]) -> type[Platform]:
    def connect(self: LoopbackPlatform, rank_info: RankInfo) -> Communicator:
        return kind(LoopbackPlatform.connect(self, rank_info))

    return type(f"Connects{kind.__name__}", (LoopbackPlatform,), {"connect": connect})


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (OwnFirst, "on rank 1, held against rank 0's: element"),
        (Unsummed, "all_reduce on 2 ranks in float32: the sum of"),
        (Backwards, "all_gather on 2 ranks in float32: all_gather of (12, 12) along 0 on rank 0: element 0"),
        (Neighbours, "reduce_scatter of (12, 12) along 0 on rank 0"),
        (Kept, "all_to_all of (12, 12) along 0 on rank 0"),
        (Overwritten, "sum 0 of 100 on rank 0"),
        (Fickle, "the same sum for the"),
    ],
)
def test_collectives_that_are_none(kind: type[Wrapped], says: str) -> None:
    assert says in first_failure("communicator.collectives", stand_in(connecting(kind)))


def test_ranks_that_wait_for_each_other_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_threads, "TIMEOUT", rank_threads.TIMEOUT)  # which Absent shortens
    said = first_failure("communicator.collectives", stand_in(connecting(Absent)))
    assert "ranks [1] of 2 still wait for the others" in said


class NotAlone(CPU):
    def connect(self, rank_info: RankInfo) -> Communicator:
        return Doubled()


def test_one_rank_that_is_not_itself() -> None:
    assert "all_reduce() on one rank changed" in first_failure("communicator.alone", stand_in(NotAlone))


class Unequal(LoopbackPlatform):
    """Rank 1 has another share of the first product than its own."""

    def place(
        self, weight: Weight, parts: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        spoilt = {name: x.flip(0) if weight.rank and x.dim() == 2 else x for name, x in parts.items()}
        return super().place(weight, spoilt, into)


def test_ranks_that_hold_other_weights() -> None:
    assert "logits of rank 0 of 2 are off" in first_failure("communicator.model", stand_in(Unequal))


# ------------------------------------------------------------------------------------------------------------ steps


def changed(outputs: Outputs, change: Callable[[Tensor], Tensor]) -> Outputs:
    assert outputs.logits is not None
    return outputs._replace(logits=change(outputs.logits))


class Static(CPU):
    """The platform with fixed shapes: it knows the sizes that it compiled, and no others."""

    @classmethod
    def probe(cls) -> Capabilities | Unavailable:
        facts = super().probe()
        assert isinstance(facts, Capabilities)
        return replace(facts, static_shapes=True)

    def compile(self, model: nn.Module, buckets: Iterable[ShapeBucket]) -> Step:
        self._sizes, self._ran, run = [each.tokens for each in buckets], 1, super().compile(model, [])

        def step(state: State, batch: Batch) -> tuple[Outputs, State]:
            self._admit(batch.token_ids.shape[0])
            self._ran += 1
            return self._around(run, state, batch)

        step.compilations = self._count  # type: ignore[attr-defined]
        return step

    def _admit(self, tokens: int) -> None:
        if tokens not in self._sizes:
            raise RuntimeError(f"a step of {tokens} tokens was never compiled")

    def _around(self, run: Step, state: State, batch: Batch) -> tuple[Outputs, State]:
        return run(state, batch)

    def _count(self) -> int:
        return len(self._sizes)


class AnySize(Static):
    def _admit(self, tokens: int) -> None:
        assert tokens > 0


class Nameless(Static):
    def _admit(self, tokens: int) -> None:
        if tokens not in self._sizes:
            raise RuntimeError("shape mismatch")


class Unfinished(Static):
    """Leaves out the last rows of a full step."""

    def _around(self, run: Step, state: State, batch: Batch) -> tuple[Outputs, State]:
        outputs, state = run(state, batch)
        return changed(outputs, lambda logits: torch.cat([logits[:60], logits[60:] * 0])), state


class Unsettled(Static):
    """Compiles something for every step."""

    def _count(self) -> int:
        return self._ran


class Uncounted(Static):
    def _count(self) -> int:
        return 0


class Padding(Static):
    """The size of the step shows in the results."""

    def _around(self, run: Step, state: State, batch: Batch) -> tuple[Outputs, State]:
        outputs, state = run(state, batch)
        return changed(outputs, lambda logits: logits * (1 + 1e-3 * len(batch.token_ids))), state


class Scribbled(Static):
    """What stands in padded tokens shows in the results."""

    def _around(self, run: Step, state: State, batch: Batch) -> tuple[Outputs, State]:
        outputs, state = run(state, batch)
        more = 0.01 * batch.token_ids[int(batch.query_start_loc[-1]) :].sum()
        return changed(outputs, lambda logits: logits + more), state


class ReadsPageZero(CPU):
    """Somebody's page 0 shows in everybody's results."""

    def compile(self, model: nn.Module, buckets: Iterable[ShapeBucket]) -> Step:
        run = super().compile(model, buckets)

        def step(state: State, batch: Batch) -> tuple[Outputs, State]:
            outputs, state = run(state, batch)
            more = 0.01 * state[0][0].float().abs().sum()
            return changed(outputs, lambda logits: logits + more), state

        return step


def _with(batch: Batch, other: Batch, name: str) -> Batch:
    """The batch with one field of another, its own or its groups'."""
    if name in Batch._fields:
        return batch._replace(**{name: getattr(other, name)})
    pairs = zip(batch.groups, other.groups, strict=True)
    return batch._replace(groups=tuple(mine._replace(**{name: getattr(theirs, name)}) for mine, theirs in pairs))


class Replaying(CPU):
    """A step of a shape that came before is run on the inputs, or the cache, of that time."""

    _stale: str

    def compile(self, model: nn.Module, buckets: Iterable[ShapeBucket]) -> Step:
        run, seen = super().compile(model, buckets), {}

        def step(state: State, batch: Batch) -> tuple[Outputs, State]:
            if self._config.enforce_eager:
                return run(state, batch)
            before = seen.setdefault(tuple(x.shape for x in leaves(batch)), (state, batch))
            if self._stale == "cache":
                return run(before[0], batch)
            return run(state, _with(batch, before[1], self._stale))

        return step


def stale(what: str) -> type[Platform]:
    return type(f"Stale_{what}", (Replaying,), {"_stale": what})


@pytest.mark.parametrize(
    ("platform", "clause", "says"),
    [
        (AnySize, "graphs.buckets", "a step of 24 tokens ran"),
        (Nameless, "graphs.buckets", "which does not name the size"),
        (Unfinished, "graphs.buckets", "a step of 64 tokens, full and nearly empty"),
        (Unsettled, "graphs.settled", "programs were compiled after the warm-up"),
        (Uncounted, "graphs.settled", "counted none while the engine started"),
        (Padding, "graphs.padding", "12 tokens in a step of 64"),
        (Scribbled, "graphs.padding", "whose padding is not zeros"),
        (ReadsPageZero, "graphs.padding", "after page 0 was written to"),
        (stale("token_ids"), "graphs.replay", "held against enforce_eager"),
        (stale("block_table"), "graphs.replay", "held against enforce_eager"),
        (stale("seq_lens"), "graphs.replay", "held against enforce_eager"),
        (stale("cache"), "graphs.replay", "cache 2, step 1, held against"),
    ],
)
def test_a_step_that_is_another(platform: type[Platform], clause: str, says: str) -> None:
    assert says in first_failure(clause, stand_in(platform))


@pytest.mark.parametrize("clause", ["graphs.buckets", "graphs.settled", "graphs.padding", "graphs.replay"])
def test_fixed_shapes_that_are_kept_pass(clause: str) -> None:
    """Otherwise those above fail for another reason."""
    with pytest.raises(pytest.fail.Exception, match="every trial"):
        first_failure(clause, stand_in(Static))


# --------------------------------------------------------------------------------------------------------- sampling

SPECIFICATION = bind({})


def _by_place(logits: Tensor, draw: Draw, width: int) -> Tensor:
    """The random numbers are the row's, not the request's."""
    rows = torch.arange(len(logits), dtype=torch.int32)
    out: Tensor = SPECIFICATION.sample(logits, draw._replace(keys=torch.stack([rows, rows], 1)), width)
    return out


def _without_position(logits: Tensor, draw: Draw, width: int) -> Tensor:
    out: Tensor = SPECIFICATION.sample(logits, draw._replace(positions=draw.positions % 65_536), width)
    return out


def _uncut(field: str, off: float) -> Callable[..., Tensor]:
    def sample(logits: Tensor, draw: Draw, width: int) -> Tensor:
        column = torch.full_like(getattr(draw, field), off)
        out: Tensor = SPECIFICATION.sample(logits, draw._replace(**{field: column}), logits.shape[1])
        return out

    return sample


def _ignores_nan(logits: Tensor, draw: Draw, width: int) -> Tensor:
    out: Tensor = SPECIFICATION.sample(logits, draw, width)
    return out.clamp(min=0)


def _last_of_the_largest(logits: Tensor) -> Tensor:
    best: Tensor = SPECIFICATION.greedy(logits.flip(1))
    return torch.where(best < 0, best, logits.shape[1] - 1 - best)


def _uncounted(logits: Tensor, rows: Tensor, ids: Tensor, counts: Tensor, penalties: Tensor) -> Tensor:
    out: Tensor = SPECIFICATION.penalize(logits, rows, ids, counts.clamp(max=1), penalties)
    return out


def _not_the_last(logits: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    out: Tensor = SPECIFICATION.ban_tokens(logits, rows[:-1], ids[:-1])
    return out


def _first_row(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    out: Tensor = SPECIFICATION.bias_tokens(logits, rows * 0, ids, values)
    return out


def _whole_words(logits: Tensor, bits: Tensor) -> Tensor:
    """The last tokens, which fill no word, are let through."""
    bits = bits.clone()
    bits[:, -1] = -1
    out: Tensor = SPECIFICATION.keep_tokens(logits, bits)
    return out


def _ranks(logits: Tensor, token_ids: Tensor, num: int, normalize: bool, wanted: Tensor) -> Any:
    ids, values, ranks = SPECIFICATION.top_logprobs(logits, token_ids, num, normalize, wanted)
    return ids, values, ranks - 1


def _unwanted(logits: Tensor, token_ids: Tensor, num: int, normalize: bool, wanted: Tensor) -> Any:
    """In the order of sort(), which says nothing of equal ones."""
    ids, values, ranks = SPECIFICATION.top_logprobs(logits, token_ids, num, normalize, wanted)
    order = (logits.shape[1] - 1 - torch.sort(logits.float().flip(1), stable=True, dim=-1, descending=True).indices)[
        :, :num
    ]
    return torch.cat([ids[:, :1], order.to(torch.int32)], 1), values, ranks


def _unnormalized(logits: Tensor, token_ids: Tensor, num: int, normalize: bool, wanted: Tensor) -> Any:
    return SPECIFICATION.top_logprobs(logits, token_ids, num, False, wanted)


def _half(logits: Tensor, count: int, copy: bool) -> Tensor:
    out: Tensor = SPECIFICATION.widen(logits.bfloat16() + 0.001, count, copy)
    return out


def _kept_in_place(logits: Tensor, temperature: Tensor) -> Tensor:
    return logits


def _another_stream(keys: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    out: Tensor = SPECIFICATION.gumbel(keys, positions + 1, token_ids)
    return out


@pytest.mark.parametrize(
    ("clause", "op", "wrong", "says"),
    [
        ("sampling.draws", "sample", _by_place, "the specification"),
        ("sampling.draws", "sample", _without_position, "places far on in a request: row"),
        ("sampling.draws", "sample", _uncut("top_k", 0), "top_k: row"),
        ("sampling.draws", "sample", _uncut("top_p", 1.0), "top_p: row"),
        ("sampling.draws", "sample", _uncut("min_p", 0.0), "min_p: row"),
        ("sampling.draws", "sample", _ignores_nan, "gave tokens"),
        ("sampling.draws", "greedy", _last_of_the_largest, "whose logits are 8.0625 and 8.0625"),
        ("sampling.draws", "gumbel", _another_stream, "gumbel() of 16 keys"),
        ("sampling.edits", "penalize", _uncounted, "frequency_penalty: row"),
        ("sampling.edits", "ban_tokens", _not_the_last, "bad_words: row"),
        ("sampling.edits", "bias_tokens", _first_row, "logit_bias: row"),
        ("sampling.edits", "keep_tokens", _whole_words, "allowed_token_ids: row"),
        ("sampling.edits", "scale_logits", _kept_in_place, "row"),
        ("sampling.logprobs", "top_logprobs", _ranks, "the rank of token"),
        ("sampling.logprobs", "top_logprobs", _unwanted, "tokens by likelihood"),
        ("sampling.logprobs", "top_logprobs", _unnormalized, "values"),
        ("sampling.logprobs", "widen", _half, "values"),
    ],
)
def test_sampling_that_is_another(clause: str, op: str, wrong: Callable[..., Any], says: str) -> None:
    subject = stand_in(CPU)
    subject.ops.__dict__[op] = wrong
    assert says in first_failure(clause, subject)
