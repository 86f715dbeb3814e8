"""Ranks that an external launcher has started, such as torchrun: each runs the caller's script, with the same calls."""

import datetime
import hashlib
import importlib
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from quintet.config import EngineConfig, read_environment
from quintet.distributed.rendezvous import listen_on
from quintet.engine.engine import Engine
from quintet.engine.parallel import commands as inbox
from quintet.engine.parallel.adapters import MAX_ADAPTERS
from quintet.engine.parallel.leader import MAX_ERROR_BYTES, HeldRequest, Leader
from quintet.engine.request import CoreRequest
from quintet.interface.platform import Channel, DeviceLost
from quintet.interface.types import RankInfo
from quintet.lora.request import LoRAReference

EXTERNAL = "external_launcher"
_count = itertools.count()  # engines of this process: each has its own rendezvous


class LauncherEnvironment(NamedTuple):
    """Values that the launcher of the ranks sets in the environment."""

    rank: int
    size: int
    local_size: int  # ranks of this machine
    address: str
    port: int
    has_store: bool  # whether the launcher has a store for the ranks at that port
    restart_count: str  # how often it has restarted them


def with_launcher_values(config: EngineConfig) -> EngineConfig:
    """Returns the settings with the launcher's values. ValueError: they are missing, or differ from the settings."""
    if config.distributed_executor_backend != EXTERNAL:
        return config
    launch, size = launcher_environment(), config.tensor_parallel_size
    if size != launch.size:
        raise ValueError(
            f"tensor_parallel_size is {size}, and the launcher has started {launch.size} processes (WORLD_SIZE); give "
            "as many as there are"
        )
    if config.data_parallel_size > 1 or config.kv_events_config.is_enabled:
        raise ValueError(
            f"distributed_executor_backend={EXTERNAL!r} runs one engine and sends no KV events; leave "
            "data_parallel_size and kv_events_config out"
        )
    place = {"nnodes": size // launch.local_size, "node_rank": launch.rank // launch.local_size}
    return config.replace(**place, master_addr=launch.address, master_port=launch.port)


def launcher_environment(environ: Mapping[str, str] | None = None) -> LauncherEnvironment:
    """Returns the launcher's values; ValueError says which variable is missing, or wrong."""
    environment = read_environment() if environ is None else read_environment(environ)
    numbers = {"RANK": environment.rank, "WORLD_SIZE": environment.world_size, "MASTER_PORT": environment.master_port}
    missing = [name for name, value in {**numbers, "MASTER_ADDR": environment.master_addr}.items() if value is None]
    if missing or environment.master_addr is None:
        raise ValueError(
            f"distributed_executor_backend={EXTERNAL!r}: the environment says no {', '.join(missing)}; start the "
            "script by torchrun --nproc-per-node N script.py"
        )
    whole = {name: _number(name, value) for name, value in numbers.items()}
    rank, size = whole["RANK"], whole["WORLD_SIZE"]
    here = size if environment.local_world_size is None else _number("LOCAL_WORLD_SIZE", environment.local_world_size)
    if not (0 <= rank < size and 0 < here <= size and size % here == 0):
        raise ValueError(
            f"distributed_executor_backend={EXTERNAL!r}: rank {rank} of {size}, {here} on each (RANK, WORLD_SIZE"
            ", LOCAL_WORLD_SIZE) do not fit; start as many on each machine"
        )
    store = environment.agent_store == "True"
    return LauncherEnvironment(
        rank, size, here, environment.master_addr, whole["MASTER_PORT"], store, environment.restart_count or "0"
    )


def _number(name: str, value: str | None) -> int:
    if value is None or not value.isdecimal():
        raise ValueError(f"distributed_executor_backend={EXTERNAL!r}: {name} is {value!r}, and no number")
    return int(value)


def rank_info_of(seconds: float) -> RankInfo:
    """Returns this process's rank, and where the ranks meet: rank 0 publishes its port in the launcher's store, where
    there is one, in so many seconds, or else listens itself at the launcher's port."""
    launch, number = launcher_environment(), next(_count)
    host = f"[{launch.address}]" if ":" in launch.address else launch.address
    if not launch.has_store:
        return RankInfo(launch.rank, launch.size, f"tcp://{host}:{launch.port}")
    limit = datetime.timedelta(seconds=seconds)
    distributed = importlib.import_module("torch.distributed")
    store = distributed.TCPStore(launch.address, launch.port, is_master=False, timeout=limit)
    name = f"quintet/{launch.restart_count}/{number}"
    if launch.rank:
        return RankInfo(launch.rank, launch.size, f"tcp://{host}:{store.get(name).decode()}")
    listener = listen_on(launch.address, 0)
    port = listener.getsockname()[1]
    store.set(name, str(port))
    return RankInfo(0, launch.size, f"tcp://{host}:{port}?listener={listener.detach()}")


class LaunchedRanks:
    """Other ranks, which the launcher ends."""

    pids: list[int] = []  # never any

    def set_channel(self, channel: Channel) -> None:
        """Does nothing: their connections show when they are gone."""

    def close(self) -> None:
        """Does nothing: a script that ends here may still be at its last step on another rank."""


class MirroredLeader(Leader):
    """Engine of each externally launched rank. It sends no calls: before a step all ranks compare the calls that they
    got."""

    _name = "a rank"

    def add(self, admitted: CoreRequest) -> None:
        """Adds a request; all ranks wait for its grammar and its adapter, which must be there on each."""
        item = inbox.make_add(replace(admitted, arrival=0.0))  # clocks differ
        self._check_id(admitted)
        if admitted.lora is None:
            self._enter(admitted)
        else:
            self.check_awake()
            self._matcher(admitted)  # or why it cannot be
            self._held[admitted.request_id] = HeldRequest(admitted, None, self._adapter(admitted))
        self._items.append(item)

    def _enter(self, admitted: CoreRequest) -> None:
        try:
            Engine.add(self, admitted)
        finally:
            self._release(admitted.request_id)
        self.wait_for_needs()

    def agree_on_files(self, reference: LoRAReference, why: str) -> str:
        """Compares with the other ranks an adapter that the caller names -> why none serves it: `why`, if it is the
        same on all. Each rank calls it, also one that cannot read the adapter."""
        assert self.lora is not None, "adapters are on"
        reason = why.encode()[:MAX_ERROR_BYTES]
        notes = self._channel.exchange(hashlib.sha256(reference.digest).digest() + reason)
        others = [rank for rank, note in enumerate(notes) if note != notes[0]]
        reasons = [note[hashlib.sha256().digest_size :].decode(errors="ignore") for note in notes]
        if any(reasons):
            rank = next(rank for rank, each in enumerate(reasons) if each)
            return f"rank {rank}: {reasons[rank]}" if others else why
        if others:
            return (
                f"rank {others[0]} has other files than rank 0; give all ranks the same adapter, and send the request "
                "again"
            )
        adapter = self.lora.find(reference)
        adapter.confirmed = adapter.has_place
        return ""

    def _agree_on_adapters(self, idle: bool) -> dict[bytes, str]:
        """Compares all, also those that are read already: ranks do the same, and differ in how fast they read."""
        here = self._held_adapters().values()
        asked = [each.reference for each in here if each.has_place and not each.confirmed][:MAX_ADAPTERS]
        return self._confirm(asked, idle, {})

    def _end_late_requests(self) -> None:
        """Ends none: clocks differ, and every rank must do the same."""

    def _tell(self, joint: inbox.CollectiveCommand | None) -> None:
        self._number += 1
        items, self._items = self._items, []
        traced = self.profiler.spans.events is not None
        asked = hashlib.sha256(inbox.encode(self._number, items, traced, joint)).digest()
        notes = self._channel.exchange(asked)
        others = [str(rank) for rank, note in enumerate(notes) if note != notes[0]]
        if not others:
            return
        why = (
            f"rank {', '.join(others)} of {len(notes)} was asked something else than rank 0 before step {self._number}"
            f"; with distributed_executor_backend={EXTERNAL!r} every process makes the same calls, in the same order"
        )
        self._channel.abort(why)
        raise DeviceLost(why)
