"""Platform contract: everything that the engine may ask of a device. A platform imports this file, never the engine."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from quintet.config import EngineConfig
from quintet.interface.stage_channel import StageChannel
from quintet.interface.types import (
    AttentionSpec,
    Batch,
    Estimate,
    HostBatch,
    HostGroup,
    IntArray,
    Layout,
    MaxShape,
    Memory,
    Outputs,
    RankInfo,
    RotaryArgs,
    ShapeBucket,
    StateSpec,
    StepContext,
)
from quintet.interface.weights import Weight

CONTRACT_VERSION = 3  # raised when a platform that was written for the one before could break; docs/contract-changes.md
State = tuple[Tensor, ...]  # all that is kept between steps, flat: each tensor [units, *layout.shape]
ASIDE, DROPPED = 1, 2  # levels of sleep
# -> (outputs, which hold until the next step, and the state); callers keep the state that it returned. A step may have
# an attribute `compilations`, a function that counts the programs compiled so far, those of ops too: it proves that an
# engine which has warmed up compiles nothing more
Step = Callable[[State, Batch], tuple[Outputs, State]]


@dataclass(frozen=True)
class Unavailable:
    """Why a platform cannot run here, shown to the user verbatim, and what would make it run."""

    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}" if self.remedy else self.reason


@dataclass(frozen=True)
class Capabilities:
    """Facts about the devices here, not their names. The defaults are conservative."""

    devices: int
    dtypes: tuple[torch.dtype, ...]  # what the kernels compute in, best first
    fp8: torch.dtype | None = None  # e4m3fn, e4m3fnuz and e5m2 differ per chip: data, never a constant
    # kinds of weight formats (WeightFormat.kind) that place() keeps; a checkpoint in others comes to it dequantized
    weight_formats: frozenset[str] = frozenset()
    static_shapes: bool = False  # the engine pads each step to a declared bucket
    # what the device holds can be computed with by ops alone, not by torch's own functions; nothing falls back to
    # a reference between the steps there: such a platform serves the ops of sampling itself
    ops_only: bool = False
    spmd: bool = False  # one worker drives all devices: place() shards, the compiler adds the collectives
    # a step and to_host() return before they are done, and are done in the order of the calls: the next step is planned
    # and started while one runs, and takes over tokens that it samples
    overlap: bool = False
    lora: bool = False  # place() heeds Weight.rows, so that adapters can be written
    lora_experts: bool = False  # it serves lora_experts(): adapters may change experts, too
    sleep: bool = False  # Device.sleep() frees memory while there are no requests
    batch_invariant: bool = False  # a request's results do not depend on what else is in the batch, bit for bit
    batch_invariant_mode: bool = False  # nor here, if EngineConfig.batch_invariant asks for it
    # each rank is a process of its own; they meet at a file that all have open (shared://NUMBER), or over the network
    # (tcp://HOST:PORT): communicators have a channel; else ranks are threads of one process
    processes: bool = False
    # ranks may be processes: distributed_executor_backend="mp" asks for it. They meet at tcp://HOST:PORT of a host,
    # and their communicators have a channel
    mp: bool = False
    # with spmd: one worker of each of several machines drives what that one has, and all compute as one; they meet over
    # the network (tcp://HOST:PORT), and their communicators, of size 1, have a channel
    multi_host: bool = False
    # what all devices here are of a cluster's resources, by Ray's names; ranks that are processes share it
    ray_resources: Mapping[str, float] = field(default_factory=lambda: {"GPU": 1.0})
    compiles_late: bool = False  # kernels are compiled, libraries loaded, by their first call: a prompt is run first
    auto_select: bool = True  # "auto" may choose it; False: it runs if asked for by name (an emulation, a test double)
    # what place() depends on besides the weight, for a cache of placed weights; empty: they do not lie in host memory
    layout_key: str = ""
    detail: str = ""  # the processor's name and what else a person may want to read


class Device(ABC):
    """One per worker: an opened device, its streams and its allocations."""

    @abstractmethod
    def memory(self) -> Memory:
        """Returns bytes that are free, in total, and used at most; limits set from outside (cgroups) count.

        On an SPMD platform, those of the device that has least: plans are made for one device, and hold for all.
        """

    @abstractmethod
    def allocate(self, layouts: Sequence[Layout], units: int) -> State:
        """One zeroed tensor [units, *shape] per layout. Raises MemoryError with the numbers if it does not fit.

        Where layers keep pages and others a state per request, it is called for each in turn.
        """

    @abstractmethod
    def to_device(self, arrays: Sequence[np.ndarray[Any, Any]]) -> tuple[Tensor, ...]:
        """Host arrays of int32 and float32 on the device, pinned and asynchronous where that exists. The caller writes
        to the arrays no more."""

    @abstractmethod
    def to_host(self, x: Tensor) -> Callable[[], Tensor]:
        """Starts the copy of x to the host; calling the result waits for it and returns the tensor.

        What a step returned may be overwritten by the next step: a copy of it is to be started, and in the device's
        order, before that step is.
        """

    def sleep(self, level: int) -> int:
        """Gives memory back -> bytes. ASIDE: the cache is lost, weights go to the host; DROPPED: both are lost.

        No step runs. The caller lets go of the cache, the compiled step and, if DROPPED, the weights afterwards: their
        bytes are the caller's to count where the device has not taken them first.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot sleep: it gives no memory back while it is open")

    def wake(self) -> None:
        """Restores weights that were put aside; does nothing if awake. MemoryError: still asleep, try again."""
        raise NotImplementedError(f"{type(self).__name__} never sleeps")


# Adds an event to a trace: name, kind, its track (a thread's ident, or a name of the platform's own), begin and end in
# ns of the Unix clock
RecordEvent = Callable[[str, str, int | str, int, int], None]


@dataclass(frozen=True)
class Recording:
    """Recording of a platform's steps while a trace runs."""

    description: str  # steps run meanwhile, for the trace's reader
    stop: Callable[[], None]  # ends it; may report all its events only now


class CacheLost(RuntimeError):
    """Raised by a step that took the cache and did not return it: the engine makes another and computes all again."""


class DeviceLost(RuntimeError):
    """Raised by whatever finds the device broken for good: the engine ends instead of failing each request."""


class Mixer(ABC):
    """Given to a layer that mixes positions when it is built: attention over what is kept, or a recurrence.

    Layers that keep alike form a group; `batch.groups` has each group's metadata. A mixer is a function of its inputs,
    of its own tensors of the state and of the step's context, and returns the new state. One for a StateSpec takes
    (inputs of the spec's op, state, context), see ops.states.StateMixer, and keeps one layout, with unit "request".
    """

    layouts: tuple[Layout, ...] = ()  # what it keeps; nothing: it sees the step alone
    fuses_rotary = False  # with_rotary() serves: one kernel rotates K and stores it

    def plan(self, batch: HostBatch, group: HostGroup) -> tuple[IntArray, ...]:
        """Per step, outside any graph: what the kernels of this group want to know beforehand, as its `plan`.

        One mixer plans for all of its class in the group. With Capabilities.overlap the step before may still run: what
        it reads must stay as it is. Tokens that it samples are -1 in batch.token_ids.
        """
        return ()

    @abstractmethod
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor | None, state: State, context: StepContext, sinks: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """q [T, H, D], k and v [T, Hkv, D] (v None where it is part of k), one tensor [units, *shape] for each of the
        layouts -> (out [T, H, value_dim], those tensors). Of a layer with source "cross", k and v are None: it reads
        what keep() wrote."""

    def keep(self, k: Tensor, v: Tensor, state: State, context: StepContext) -> State:
        """Writes an encoder's k and v [E, Hkv, D] at the group's slots [E] -> the layer's tensors. Called in the
        encoder's pass, for layers with source "cross"."""
        raise NotImplementedError(f"{type(self).__name__} keeps no rows of an encoder")

    def attend_chosen(  # noqa: PLR0913  # __call__'s, and what was chosen
        self, q: Tensor, k: Tensor, chosen: Tensor, state: State, context: StepContext, v: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, State]:  # fmt: skip
        """Same as __call__() of a layer with AttentionSpec.chosen; see the ops choose_tokens and choose_blocks."""
        raise NotImplementedError(f"{type(self).__name__} has no attention to chosen tokens")

    def attend_distances(
        self, q: Tensor, k: Tensor, v: Tensor, numbers: Tensor, state: State, context: StepContext
    ) -> tuple[Tensor, State]:
        """Same as __call__() of a layer with AttentionSpec.distances; `numbers`: the op paged_distance_attention's."""
        raise NotImplementedError(f"{type(self).__name__} adds no numbers of distances to scores")

    def with_rotary(  # noqa: PLR0913  # __call__'s, and the rotary arguments
        self, q: Tensor, k: Tensor, v: Tensor, rotary: RotaryArgs, state: State, context: StepContext,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, State]:  # fmt: skip
        """Same as __call__() once `rotary` has rotated q and k. Called if `fuses_rotary`: no other layer reads K."""
        raise NotImplementedError


class Channel(ABC):
    """Messages between ranks that are processes, beside collectives. DeviceLost: a rank is gone, so that none can go
    on."""

    @abstractmethod
    def broadcast(self, message: bytes) -> None:
        """Sends a message to all other ranks; only rank 0 does."""

    @abstractmethod
    def receive(self) -> bytes:
        """Returns the next message of rank 0, in order; waits as long as it takes."""

    @abstractmethod
    def exchange(self, message: bytes) -> list[bytes]:
        """All-gathers the messages of the ranks, 1000 bytes each at most, in rank order. No step runs. A rank that left
        a step before its end calls this: the others' collectives raise then, and afterwards all ranks begin anew."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Ends all waiting, on every rank: calls raise DeviceLost with this reason. From any thread."""

    @property
    @abstractmethod
    def aborted(self) -> str:
        """The reason; empty as long as there is none."""


class Communicator(ABC):
    """The ranks of a model, or of a stage of it. On an SPMD platform size is 1: the compiler adds the collectives."""

    rank: int
    size: int
    channel: Channel | None = None  # where ranks are processes; of all stages
    stage_channel: StageChannel | None = None  # where there are several stages; they are refused without one

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the ranks: the same bits on every rank, and every time. May overwrite x; use what it returns."""

    @abstractmethod
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """The ranks' equal-shaped tensors, joined along dim in rank order."""

    @abstractmethod
    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's equal share, along dim, of the sum."""

    @abstractmethod
    def all_to_all(self, x: Tensor, dim: int) -> Tensor:
        """Cuts x along dim into `size` equal pieces, sends piece i to rank i, joins what arrives in rank order."""

    def leave(self) -> None:  # noqa: B027  # most ranks may go in any order
        """The process is about to end: waits, a bounded time, for others that would end badly if it went before."""


class SingleRank(Communicator):
    """The communicator of a model on one rank: every collective returns what it was given."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        return x

    def all_to_all(self, x: Tensor, dim: int) -> Tensor:
        return x


class WrongContract(TypeError):
    """Raised for a platform that was written for another contract than this quintet's, or does not say for which."""

    def __init__(self, name: str, written: int | None) -> None:
        version = "does not say for which contract it was written" if written is None else f"is for contract {written}"
        super().__init__(f"{name} {version}, and this quintet has contract {CONTRACT_VERSION}")
        self._written = written

    def remedy(self, package: str) -> str:
        """Returns advice for the user who installed the package."""
        if self._written is None:
            return f"add `contract = {CONTRACT_VERSION}` to it once it keeps that one"
        newer = self._written > CONTRACT_VERSION
        return f"install a newer quintet, or an older {package}" if newer else f"install a newer {package}"


class Platform(ABC):
    """One way to run models; an instance serves one engine. A subclass may add nothing public: what the engine may ask
    stands here."""

    name: ClassVar[str]
    contract: ClassVar[int]  # the CONTRACT_VERSION that it was written for; what is built in need not say
    op_priority: ClassVar[Mapping[str, Sequence[str]]] = {}  # op -> providers, best first; "reference" is last
    # a layer's class name -> "module:Class", a subclass of it that is built in its place
    layers: ClassVar[Mapping[str, str]] = {}
    # model_type of a checkpoint -> "module:Class", a model that is built in the place of quintet's own
    models: ClassVar[Mapping[str, str]] = {}
    encoder_platform: ClassVar[str] = ""  # computes encoders of media on the host, where Capabilities.ops_only is set
    supports_states: ClassVar[bool] = False  # whether mixer() takes a StateSpec, too
    # what its mixers support of specs and no platform has to: "chunk"; "cross" (source, with keep()); "max_drafts";
    # "chosen" (with attend_chosen(); the op choose_tokens serves too), "chosen_blocks" (with v), "distances" (with
    # attend_distances()), "compressed" (specs with a rate: mixers are made of the bound ops of ops/compressed/)
    optional_spec_fields: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, config: EngineConfig | None = None) -> None:
        self._config = config or EngineConfig()  # as configure() settled it

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        written = vars(cls).get("contract", CONTRACT_VERSION)
        if written != CONTRACT_VERSION:  # checked first: other errors follow from it
            raise WrongContract(cls.__name__, written)
        for attribute, value in vars(cls).items():
            if not attribute.startswith("_"):
                _check_member(cls, attribute, value)

    @classmethod
    @abstractmethod
    def probe(cls) -> Capabilities | Unavailable:
        """Returns what the devices here can do. Opens no device, makes no context, writes no environment variable."""

    @classmethod
    @abstractmethod
    def configure(cls, config: EngineConfig) -> tuple[EngineConfig, list[str]]:
        """Settles what the user left open. Pure: returns a new config and the reasons, which are logged."""

    @abstractmethod
    def open(self, rank: int) -> Device:
        """Opens the rank-th device of this platform; on an SPMD platform, all that the config asks for."""

    @abstractmethod
    def connect(self, rank_info: RankInfo) -> Communicator:
        """Joins the ranks that meet at rank_info.endpoint; the ranks of one stage compute together. Blocks until all
        have come, here or in the first call that needs them. Size 1 needs no endpoint. Where ranks are processes, one
        of several without an endpoint connects to no other: its model is inspected, not run."""

    @abstractmethod
    def mixer(self, spec: AttentionSpec | StateSpec, ops: Any, rank: int) -> Mixer:
        """The mixer for such a layer, on the rank's ops; or ValueError with *all* the reasons why there is none.

        A platform with `supports_states` False is asked for attention alone."""

    @abstractmethod
    def place(
        self, weight: Weight, parts: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None
    ) -> Mapping[str, Tensor]:
        """Slices by rank (or shards by mesh), repacks and uploads: checkpoint tensors -> the layer's attributes.

        `into`: what it returned for this weight before, and the layer's others. The numbers are written into these,
        which are returned: no address and no shape changes, so that a compiled step reads the new ones. No step runs.
        """

    def estimate(self, model: nn.Module, weights: Sequence[Weight], max_shape: MaxShape) -> Estimate:
        """Estimates what the model takes on one device, and which steps are captured, or padded to where shapes are
        free: the memory plan is made before anything is read."""
        return Estimate(sum(weight.nbytes for weight in weights), max_shape.workspace)

    @abstractmethod
    def compile(self, model: nn.Module, buckets: Iterable[ShapeBucket]) -> Step:
        """The step: compiled per bucket, captured, or eager. With fixed shapes `buckets` are all the steps that come,
        else those of estimate(); going through them shows the progress to the user."""

    def profile(self, record: RecordEvent) -> Recording:
        """Reports what runs in steps to `tell`, until the recording is stopped. One at a time; both between two steps.

        The engine itself reports its own work and the calls of ops, as far as steps make them one by one. The results
        of a step are the same to the bit.
        """
        return Recording("as without a trace; ops inside one compiled program are not reported", lambda: None)


def _check_member(cls: type, attribute: str, value: Any) -> None:
    """A hook that nothing calls, or one with other parameters, is refused when the class is made."""
    declared = inspect.getattr_static(Platform, attribute, None)
    if declared is None and attribute not in Platform.__annotations__:
        raise TypeError(
            f"{cls.__name__}.{attribute} is not in the Platform contract, so nothing would call it; "
            f"rename it _{attribute} or extend quintet/interface/platform.py"
        )
    if isinstance(declared, classmethod):
        declared, value = declared.__func__, getattr(value, "__func__", value)
    if inspect.isfunction(declared):
        want = list(inspect.signature(declared).parameters)
        got = list(inspect.signature(value).parameters) if callable(value) else value
        if want != got:
            raise TypeError(f"{cls.__name__}.{attribute} takes {got}; the Platform contract says {want}")
