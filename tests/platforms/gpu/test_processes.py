"""Ranks that are processes, each with a fake device of its own: tokens, sleep, and what others hear of one's end."""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from quintet.config import EngineConfig
from quintet.distributed.rendezvous import listen_on
from quintet.engine.client import EngineClient
from quintet.engine.startup import prepare
from quintet.interface.platform import DeviceLost
from quintet.interface.types import RankInfo
from quintet.platforms.cuda import PLATFORM as CUDA
from quintet.platforms.gpu import processes
from quintet.platforms.rocm import PLATFORM as ROCm
from quintet.platforms.xpu import PLATFORM as XPU
from quintet_tools.checkpoints.tiny import PLAIN, make
from tests.platforms.gpu.fake_processes import Apart, install
from tests.platforms.gpu.test_comm import each_rank
from tests.platforms.gpu.test_sleep import SETTINGS, tokens

TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
Make = Callable[..., EngineClient]


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes engines, which end with the test."""
    install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[EngineClient] = []

    def make_one(**settings: Any) -> EngineClient:
        tiny = make("llama", {**PLAIN, "num_attention_heads": 4, "num_key_value_heads": 2})
        config = EngineConfig.from_kwargs(
            model=str(tiny.folder), device="apart", skip_tokenizer_init=True, dtype="float32",
            **{**SETTINGS, **settings},
        )  # fmt: skip
        made.append(EngineClient(config, progress=False))
        return made[-1]

    yield make_one
    for each in made:
        if each.engine_plan.ranks.remote_ranks is not None:
            each.engine_plan.ranks.remote_ranks.close()


@pytest.mark.slow
def test_two_processes_give_the_tokens_of_one_rank(client: Make, caplog: pytest.LogCaptureFixture) -> None:
    alone = client()
    wanted, captures = tokens(alone), Apart._fake.captures
    with caplog.at_level("INFO", logger="quintet"):
        engine = client(**TWO)
    others = engine.engine_plan.ranks.remote_ranks
    assert others is not None and len(others.pids) == 1 and others.pids[0] != os.getpid()
    assert "2 ranks: processes of this machine; communicator: GroupCommunicator" in caplog.text
    assert tokens(engine) == wanted and Apart._fake.captures > captures
    engine.engine.sleep(1)
    engine.wake_up()
    assert tokens(engine) == wanted
    ours = engine.engine.stats()
    assert ours.steps.num_steps and ours.scheduler.num_running == 0


def test_without_a_word_ranks_are_threads(client: Make) -> None:
    engine = client(tensor_parallel_size=2)
    assert engine.engine_plan.ranks.remote_ranks is None and len(engine.engine_plan.ranks.workers) == 2


@pytest.mark.slow
def test_an_engine_whose_rank_is_killed_ends_with_the_reason(client: Make) -> None:
    engine = client(**TWO)
    others = engine.engine_plan.ranks.remote_ranks
    assert others is not None
    os.kill(others.pids[0], signal.SIGKILL)
    with pytest.raises(DeviceLost, match="rank 1 of 2"):
        for _ in range(20):
            tokens(engine)


@pytest.mark.slow
def test_no_process_and_no_folder_is_left(client: Make) -> None:
    before = set(Path(tempfile.gettempdir()).glob("quintet-ranks-*"))
    engine = client(**TWO)
    others = engine.engine_plan.ranks.remote_ranks
    assert others is not None and len(set(Path(tempfile.gettempdir()).glob("quintet-ranks-*")) - before) == 1
    pids = others.pids
    others.close()
    until = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({**TWO, "data_parallel_size": 2}, "data_parallel_size must be 1"),
        ({**TWO, "pipeline_parallel_size": 2}, "pipeline_parallel_size must be 1"),
        ({**TWO, "distributed_executor_backend": "ray"}, "ranks are threads of one process"),
    ],
)
def test_what_needs_more_than_that_is_refused(settings: dict[str, Any], said: str, client: Make) -> None:
    with pytest.raises(ValueError, match=said):
        client(**settings)


def test_explain_starts_no_process(client: Make) -> None:
    tiny = make("llama", {**PLAIN, "num_attention_heads": 4, "num_key_value_heads": 2})
    config = EngineConfig.from_kwargs(
        model=str(tiny.folder), device="apart", skip_tokenizer_init=True, dtype="float32", **SETTINGS, **TWO
    )
    prepared = prepare(config, met=False)
    comm = prepared.ranks.workers[0].comm
    assert prepared.ranks.remote_ranks is None and (comm.rank, comm.size, comm.channel) == (0, 2, None)


def test_a_group_is_aborted_once_a_rank_is_gone() -> None:
    """Else the others would stand in their collectives: NCCL's wait on the device without end."""
    listener = listen_on("127.0.0.1", 0)
    endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}?key=x"
    aborted: list[int] = []

    class Group:
        def __init__(self, rank: int) -> None:
            self._rank = rank

        def abort(self) -> None:
            aborted.append(self._rank)

    def work(rank: int) -> processes.ProcessRendezvous:
        mine = f"{endpoint}&listener={listener.detach()}" if rank == 0 else endpoint
        found = processes.rendezvous(RankInfo(rank, 2, mine), EngineConfig())
        found.abort_when_stopped(Group(rank))
        found.abort_when_stopped(object())  # a library without it
        return found

    both = each_rank(2, work)
    assert {each.rank_info.endpoint for each in both} == {both[0].rank_info.endpoint}, "known to both by the same name"
    both[1].channel.abort("rank 1 broke")
    until = time.monotonic() + 5
    while len(aborted) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    assert sorted(aborted) == [0, 1]
    with pytest.raises(DeviceLost, match="rank 1 broke"):
        both[0].channel.exchange(b"")
    folder = Path(both[0].rank_info.endpoint.removeprefix("file://")).parent
    assert folder.is_dir()
    both[0].close()
    assert not folder.exists()


def test_cuda_has_them_if_they_are_asked_for() -> None:
    assert CUDA._mp and not ROCm._mp and not XPU._mp
