"""Adapters of ranks that are processes: no step waits for a rank that reads, and what one cannot read none serves."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quintet.config import EngineConfig
from quintet.engine.engine import Engine
from quintet.engine.executor.engine_parts import EngineParts
from quintet.engine.lora.manager import LoRARole
from quintet.engine.lora.references import LoRAReferences
from quintet.engine.parallel.external_launcher import MirroredLeader
from quintet.engine.parallel.follower import Follower
from quintet.engine.parallel.leader import Leader
from quintet.interface.platform import DeviceLost
from quintet.lora.adapter import write_adapter
from quintet.lora.request import LoRARequest
from quintet.outputs import TokenDelta
from tests.engine.lora.shelves import WAIT, Desk, Shelf, ThreadChannel, asked, engine_of, named

STEPS = 2000


class Ranks:
    """Rank 0, and rank 1 in a thread."""

    def __init__(self, max_loras: int, max_cpu_loras: int, **settings: Any) -> None:
        desk, self.shelves = Desk(), (Shelf(), Shelf())
        channels = [ThreadChannel(desk, rank) for rank in range(2)]
        for shelf, channel in zip(self.shelves, channels, strict=True):
            shelf.channel = channel
        first, second = self.shelves
        sizes = max_loras, max_cpu_loras
        self.leader = engine_of(
            first, *sizes, LoRARole.LEADS, lambda parts: Leader(parts, channels[0]), **settings
        ).engine
        follower: Any = engine_of(second, *sizes, LoRARole.FOLLOWS, **settings).engine
        self.errors: list[BaseException] = []
        self._channel = channels[0]
        self._thread = threading.Thread(
            target=self._follow, args=(Follower(follower, None, channels[1], None),)  # type: ignore[arg-type]
        )  # fmt: skip
        self._thread.start()

    def _follow(self, follower: Follower) -> None:
        try:
            follower.run()
        except DeviceLost:
            pass
        except BaseException as error:
            self.errors.append(error)
            self._channel.abort(str(error))

    def close(self) -> None:
        for shelf in self.shelves:
            for gate in shelf.gates.values():
                gate.set()
        self._channel.abort("the test is over")
        self._thread.join(WAIT)
        assert not self.errors, self.errors


@contextmanager
def ranks_of(max_loras: int, max_cpu_loras: int, **settings: Any) -> Iterator[Ranks]:
    ranks = Ranks(max_loras, max_cpu_loras, **settings)
    try:
        yield ranks
    finally:
        ranks.close()


def ends(engine: Engine, deltas: list[TokenDelta]) -> dict[str, str | None]:
    engine.check_integrity()
    return {each.request_id: each.error for each in deltas if each.finish_reason is not None}


def run(engine: Engine, until: str = "") -> dict[str, str | None]:
    """Steps until a request has ended, or all -> the errors of those that have."""
    found: dict[str, str | None] = {}
    for _ in range(STEPS):
        if until in found or not engine.busy:
            return found
        found |= ends(engine, engine.step())
    raise AssertionError("it goes round in circles")


@pytest.mark.parametrize("slow", [0, 1])
def test_no_stream_waits_for_a_rank_that_reads(slow: int) -> None:
    with ranks_of(1, 1) as ranks:
        gate = ranks.shelves[slow].gates["slow"] = threading.Event()
        ranks.leader.add(asked("stream", None, tokens=30))
        ranks.leader.step()
        ranks.leader.add(asked("adapted", "slow"))
        ranks.leader.step()
        ranks.leader.add(asked("later", None, tokens=30))
        assert run(ranks.leader, until="later") == {"stream": None, "later": None}
        gate.set()
        assert run(ranks.leader) == {"adapted": None}


def test_the_other_ranks_read_an_adapter_when_it_is_named() -> None:
    with ranks_of(1, 1) as ranks:
        assert ranks.leader.lora is not None and not ranks.leader.busy
        assert ranks.leader.lora.check(named("a")) == ""
        assert run(ranks.leader) == {}
        assert ranks.shelves[1].started.acquire(timeout=WAIT)
        ranks.leader.add(asked("r", "a"))
        assert run(ranks.leader) == {"r": None}
        assert ranks.shelves[0].read == ranks.shelves[1].read == ["a"]


def test_an_adapter_that_one_rank_cannot_read_ends_its_requests() -> None:
    with ranks_of(1, 2) as ranks:
        ranks.shelves[1].bad.add("gone")
        for request in (asked("r1", "a"), asked("r2", "gone"), asked("r3", "gone"), asked("r4", None)):
            ranks.leader.add(request)
        why = "the adapter 'gone' cannot be served: rank 1: no file of gone"
        assert run(ranks.leader) == {"r1": None, "r2": why, "r3": why, "r4": None}
        ranks.shelves[1].bad.clear()
        ranks.leader.add(asked("r5", "gone"))
        assert run(ranks.leader) == {"r5": None}


@pytest.mark.parametrize(("max_loras", "max_cpu_loras"), [(1, 1), (2, 3)])
def test_all_ranks_hold_the_same_and_no_more_than_there_may_be(max_loras: int, max_cpu_loras: int) -> None:
    with ranks_of(max_loras, max_cpu_loras) as ranks:
        for at in range(24):
            ranks.leader.add(asked(f"r{at}", f"a{at * 5 % 9}"))
        found: dict[str, str | None] = {}
        for _ in range(STEPS):
            if not ranks.leader.busy:
                break
            found |= ends(ranks.leader, ranks.leader.step())
            for shelf in ranks.shelves:
                assert len(shelf.names) <= max_cpu_loras + max_loras
        assert len(found) == 24 and not any(found.values())
        assert ranks.shelves[0].slots == ranks.shelves[1].slots


def test_a_held_request_gets_its_turn_whatever_comes_after_it() -> None:
    with ranks_of(1, 1) as ranks:
        for name in "abz":
            ranks.leader.add(asked(name, name))
        for at in range(STEPS):
            if "z" in ends(ranks.leader, ranks.leader.step()):
                break
            assert at < 1500, "z waits while a and b go on"
            if len(ranks.leader) < 12:
                for name in "ab":
                    ranks.leader.add(asked(f"{name} {at}", name))
        run(ranks.leader)


def test_an_adapter_that_one_rank_cannot_write_ends_its_requests() -> None:
    with ranks_of(2, 2) as ranks:

        def write(platform: None, slot: int, tensors: Any) -> None:
            if tensors.name == "broken":
                raise MemoryError("no room")

        ranks.shelves[1].write = write  # type: ignore[method-assign]
        for request in (asked("r1", "a"), asked("r2", "broken"), asked("r3", None)):
            ranks.leader.add(request)
        why = "the adapter 'broken' cannot be written to the device: rank 1: MemoryError: no room"
        assert run(ranks.leader) == {"r1": None, "r2": why, "r3": None}


def mirrored(work: Any, bad: str = "", slow: str = "") -> list[Any]:
    """Has two ranks that a launcher has started do the same -> what each returns. Rank 1 cannot read one adapter, and
    another only when `gate` is set."""
    desk, gate, found = Desk(), threading.Event(), [None, None]
    shelves = Shelf(), Shelf()
    shelves[1].bad.add(bad)
    shelves[1].gates[slow] = gate
    engines = []
    for rank, shelf in enumerate(shelves):
        channel = shelf.channel = ThreadChannel(desk, rank)
        engines.append(engine_of(shelf, 1, 1, LoRARole.MIRRORS, partial(_mirror, channel)).engine)

    def on_rank(rank: int) -> None:
        try:
            found[rank] = work(engines[rank], gate)
        except BaseException as error:
            shelves[rank].channel.abort(f"rank {rank}: {error!r}")  # type: ignore[union-attr]
            raise

    threads = [threading.Thread(target=on_rank, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT)
    gate.set()
    assert not desk.why, desk.why
    return found


def _mirror(channel: ThreadChannel, parts: EngineParts) -> Engine:
    return MirroredLeader(parts, channel)


def test_ranks_of_a_launcher_refuse_an_adapter_together() -> None:
    def work(engine: Engine, gate: threading.Event) -> dict[str, str | None]:
        for request in (asked("r1", "gone"), asked("r2", "a"), asked("r3", None)):
            engine.add(request)
        return run(engine)

    why = "the adapter 'gone' cannot be served: rank 1: no file of gone"
    assert mirrored(work, bad="gone") == [{"r1": why, "r2": None, "r3": None}] * 2


def test_ranks_of_a_launcher_do_not_wait_for_one_that_reads() -> None:
    def work(engine: Engine, gate: threading.Event) -> dict[str, str | None]:
        engine.add(asked("stream", None, tokens=20))
        engine.add(asked("adapted", "slow"))
        found = run(engine, until="stream")
        assert "adapted" not in found
        gate.set()
        return found | run(engine)

    assert mirrored(work, slow="slow") == [{"stream": None, "adapted": None}] * 2


def test_ranks_of_a_launcher_read_many_adapters_alike() -> None:
    def work(engine: Engine, gate: threading.Event) -> dict[str, str | None]:
        for at in range(12):
            engine.add(asked(f"r{at}", f"a{at * 5 % 7}"))
        return run(engine)

    first, second = mirrored(work)
    assert first == second and len(first) == 12 and not any(first.values())


def folder_of(place: Path, scale: float) -> Path:
    """An adapter's files."""
    tensors = {"q_proj.lora_A.weight": torch.full((1, 4), scale), "q_proj.lora_B.weight": torch.ones(4, 1)}
    write_adapter(place, {"peft_type": "LORA", "r": 1, "lora_alpha": 1}, tensors)
    return place


def test_ranks_of_a_launcher_refuse_a_name_together(tmp_path: Path) -> None:
    config = EngineConfig(model="bundled", enable_lora=True)
    one, other = folder_of(tmp_path / "one", 1.0), folder_of(tmp_path / "other", 2.0)

    def work(engine: Engine, gate: threading.Event) -> list[str]:
        assert isinstance(engine, MirroredLeader) and engine.lora is not None
        rank = engine.lora._ranks.channel._rank  # type: ignore[union-attr]

        def find(path: str) -> Path:
            if path == "here" and rank:
                raise FileNotFoundError("check the adapter's path")
            if path == "nowhere":
                raise FileNotFoundError("nowhere is no folder")
            return other if path == "differs" and rank else one

        references = LoRAReferences(config, find, engine.lora, engine.agree_on_files)
        found = []
        for name, path in [("a", "here"), ("a", "nowhere"), ("a", "differs"), ("gone", "x"), ("fine", "x")]:
            try:
                found.append(references.reference(LoRARequest(name, 0, path)).name)
            except (ValueError, OSError) as error:
                found.append(f"{type(error).__name__}: {error}")
        return found

    first, second = mirrored(work, bad="gone")
    assert first == second == [
        "ValueError: the adapter 'a' cannot be served: rank 1: check the adapter's path",
        "FileNotFoundError: nowhere is no folder",
        "ValueError: the adapter 'a' cannot be served: rank 1 has other files than rank 0; give all ranks the same "
        "adapter, and send the request again",
        "ValueError: the adapter 'gone' cannot be served: rank 1: no file of gone",
        "fine",
    ]  # fmt: skip
