"""Ways by which tensors come from a trainer that is another process: TCP, a process group, shared memory."""

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quintet import LLM
from quintet.clients.weight_sender import WeightSender
from quintet.engine.weight_transfer.process_group import join_group, send_tensors
from quintet.engine.weight_transfer.shared_memory import Segment, segments
from quintet_tools.checkpoints.tiny import Tiny, make
from tests.e2e.weight_updates.test_updates import DOWN, SIZES, tensors_of
from tests.helpers.platforms.engines import answers, engine

RANKS = [{}, {"tensor_parallel_size": 2}, {"data_parallel_size": 2}]
NAMES = ["one process", "-tp 2", "-dp 2"]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUINTET_RANKS_KEY", "a key of these tests")


def models() -> tuple[Tiny, Tiny]:
    return make("llama", SIZES), make("llama", SIZES, 1)


class Trainer(threading.Thread):
    """Runs the trainer's half beside the engine's."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._work, self.result, self.error = work, None, ""
        self.start()

    def run(self) -> None:
        try:
            self.result = self._work()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def done(self) -> Any:
        self.join(60)
        assert not self.is_alive() and not self.error, self.error
        return self.result


def transferred(llm: LLM, info: dict[str, Any]) -> None:
    llm.start_weight_update()
    llm.update_weights({"update_info": info})
    llm.finish_weight_update("sent")


@pytest.mark.parametrize("settings", RANKS, ids=NAMES)
def test_tcp(settings: dict[str, Any]) -> None:
    old, new = models()
    with engine(new) as fresh:
        want = answers(fresh)
    sender = WeightSender()
    try:
        with engine(old, **settings) as llm:
            meeting = Trainer(lambda: sender.wait(llm.get_world_size()))
            llm.init_weight_transfer_engine({"init_info": {"address": sender.address}})
            meeting.done()
            for _ in range(2):
                sending = Trainer(lambda: sender.send(tensors_of(new)))
                transferred(llm, {})
                sending.done()
                assert answers(llm) == want and llm.get_weight_version() == "sent"
    finally:
        sender.close()


def test_a_trainer_that_dies_leaves_a_paused_engine_that_says_so() -> None:
    old, new = models()
    sender = WeightSender()

    def dies() -> None:
        def some() -> Iterator[Any]:
            yield from list(tensors_of(new).items())[:10]
            sender.close()
            raise RuntimeError("died")

        with pytest.raises(RuntimeError, match="died"):
            sender.send(some())

    with engine(old) as llm, engine(new) as fresh:
        meeting = Trainer(lambda: sender.wait(1))
        llm.init_weight_transfer_engine({"init_info": {"address": sender.address}})
        meeting.done()
        death = Trainer(dies)
        with pytest.raises(ConnectionError, match="its connection was closed"):
            transferred(llm, {})
        death.done()
        with pytest.raises(ValueError, match=r"replaced in part, and that failed \(its connection was closed\)"):
            answers(llm)
        llm.update_weights(tensors_of(new))
        assert answers(llm) == answers(fresh)
        llm.shutdown_weight_transfer_engine()
        llm.start_weight_update()
        with pytest.raises(ValueError, match=r"call init_weight_transfer_engine\(\) first"):
            llm.update_weights({"update_info": {}})


def test_a_trainer_with_another_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old, _ = models()
    monkeypatch.setenv("QUINTET_RANKS_KEY", "another key of these tests")
    sender = WeightSender()
    monkeypatch.setenv("QUINTET_RANKS_KEY", "a key of these tests")
    with engine(old) as llm:
        meeting = Trainer(lambda: sender.wait(1))
        with pytest.raises(ConnectionError, match="it knows another key|connection"):
            llm.init_weight_transfer_engine({"init_info": {"address": sender.address, "timeout": 5}})
        sender.close()
        meeting.join(10)
        llm.start_weight_update()
        with pytest.raises(ValueError, match=r"call init_weight_transfer_engine\(\) first"):
            llm.update_weights({"update_info": {}})


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("settings", RANKS, ids=NAMES)
def test_a_process_group_with_gloo(settings: dict[str, Any]) -> None:
    old, new = models()
    tensors = tensors_of(new)
    with engine(new) as fresh:
        want = answers(fresh)
    with engine(old, **settings) as llm:
        size, port = 1 + llm.get_world_size(), free_port()
        joining = Trainer(lambda: join_group("127.0.0.1", port, 0, size))
        llm.init_weight_transfer_engine(
            {"init_info": {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": size}}
        )
        group = joining.done()
        sending = Trainer(lambda: send_tensors(group, tensors.values()))
        names = {
            "names": list(tensors), "dtype_names": ["float32"] * len(tensors),
            "shapes": [list(each.shape) for each in tensors.values()],
        }  # fmt: skip
        transferred(llm, names)
        sending.done()
        assert answers(llm) == want
        llm.start_weight_update()
        with pytest.raises(ValueError, match="no place for elsewhere"):
            llm.update_weights({"update_info": {"names": ["elsewhere"], "dtype_names": ["float32"], "shapes": [[3]]}})
        assert answers(llm) == want


def test_a_segment_that_a_trainer_wrote() -> None:
    old, new = models()
    with engine(old) as llm, engine(new) as fresh:
        llm.start_weight_update()
        count = 0
        for segment in segments(tensors_of(new).items(), most=100_000):
            assert segment.path.exists() and segment.path.stat().st_mode & 0o077 == 0
            llm.update_weights({"update_info": segment.info})
            segment.close()
            count += 1
        llm.finish_weight_update()
        assert count > 3 and answers(llm) == answers(fresh)


def test_a_table_that_does_not_fit_its_segment_is_refused() -> None:
    old, new = models()
    segment = Segment([(DOWN, tensors_of(new)[DOWN])])
    (row,) = segment.info["tensors"]
    wrong = (
        ({"segment": "/etc/passwd", "tensors": [row]}, "none that quintet's Segment wrote"),
        ({"segment": str(segment.path), "tensors": [[*row[:3], 1 << 20]]}, r"has 131072 bytes, and its table"),
        ({"segment": str(segment.path), "tensors": [[*row[:3], -8]]}, "each of tensors is"),
        ({"segment": str(segment.path), "tensors": [[row[0], "object", row[2], 0]]}, "dtype 'object' is not one of"),
        ({"segment": str(segment.path), "tensors": [[row[0], row[1], [1 << 40, 1 << 20], 0]]}, "down_proj"),
    )
    with engine(old) as llm:
        before = answers(llm)
        for info, match in wrong:
            llm.start_weight_update()
            with pytest.raises(ValueError, match=match):
                llm.update_weights({"update_info": info})
            assert answers(llm) == before
        segment.path.chmod(0o644)
        llm.start_weight_update()
        with pytest.raises(ValueError, match="this user alone can read"):
            llm.update_weights({"update_info": segment.info})
    segment.close()
    assert not segment.path.exists()
