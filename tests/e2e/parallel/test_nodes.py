"""Ranks of several machines: they say what one process says, are named when they are lost, and end together."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from quintet import LLM, SamplingParams
from quintet.api.explain import explain
from quintet.config import EngineConfig
from tests.helpers.processes import killed_while_it_starts
from tests.helpers.servers.serving import LONG, Server

pytest.importorskip("quintet._cpu", reason="ranks on the CPU meet by the compiled extension")

PROMPTS = ["Once upon a time", "The dog and the cat", "One day"]
QUINTET = (sys.executable, "-m", "quintet.cli.main")


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUINTET_RANKS_KEY", "of these tests alone")


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def flags(port: int, ranks: int, address: str = "127.0.0.1") -> list[str]:
    return [
        "bundled", "--device", "cpu", "--nnodes", "2", "--tensor-parallel-size", str(ranks), "--kv-cache-memory-bytes",
        "16M", "--max-model-len", "256", "--master-addr", address, "--master-port", str(port),
    ]  # fmt: skip


@contextmanager
def following(*words: str, before: tuple[str, ...] = ()) -> Iterator["subprocess.Popen[str]"]:
    """A machine beside machine 0; none of its processes is left behind."""
    said = (*before, *QUINTET, "serve", *words, "--headless", "--node-rank", "1")
    process = subprocess.Popen(
        said, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def engine(**settings: Any) -> LLM:
    return LLM("bundled", device="cpu", kv_cache_memory_bytes="16M", max_model_len=256, use_tqdm=False, **settings)


def led(port: int, ranks: int, **settings: Any) -> LLM:
    return engine(nnodes=2, tensor_parallel_size=ranks, master_port=port, **settings)


def answers(llm: LLM) -> list[str]:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return [each.outputs[0].text for each in llm.generate(PROMPTS, greedy, use_tqdm=False)]


@pytest.fixture(scope="module")
def want() -> list[str]:
    with engine() as alone:
        return answers(alone)


@pytest.mark.slow
def test_two_machines_live_as_one(want: list[str]) -> None:
    """With two ranks on each: steps that are recorded, that fail on one rank, what all do together, and the end."""
    port = free_port()
    with following(*flags(port, 4)) as other:
        with led(port, 4) as llm:
            assert any("4 ranks on 2 machines" in each for each in llm._client.engine_plan.reasons)
            assert [answers(llm) for _ in range(3)] == [want] * 3
            worker = llm._client.engine_plan.ranks.workers[0]
            run = worker.run

            def broken(*arguments: Any) -> Any:
                worker.run = run  # type: ignore[method-assign]
                raise MemoryError("no room for activations")

            worker.run = broken  # type: ignore[method-assign,assignment]
            prompts: Any = [{"prompt_token_ids": [5, 6, 7]}]
            [output] = llm.generate(prompts, use_tqdm=False)
            assert output.outputs[0].error == "RankFailed: rank 0 of 4: MemoryError: no room for activations"
            assert answers(llm) == want
            llm.sleep(2)
            llm.wake_up()
            assert answers(llm) == want
        assert other.wait(30) == 0  # rank 0 has closed its engine


def test_a_machine_that_is_lost_is_named_and_all_end() -> None:
    port = free_port()
    with following(*flags(port, 2)) as other:
        llm = led(port, 2)
        answers(llm)
        other.send_signal(signal.SIGKILL)
        with pytest.raises(RuntimeError, match="rank 1 of 2 is lost: (its connection was closed|Connection reset)"):
            for _ in range(200):
                answers(llm)
        llm.close()


@pytest.mark.slow
def test_a_server_that_is_told_to_end_ends_the_other_machine_in_good_order() -> None:
    words = flags(free_port(), 2)
    with following(*words) as other, Server(*words) as server:
        with httpx.stream(
            "POST", server.url + "/v1/completions", json={**LONG, "max_tokens": 200}, timeout=60
        ) as asked:
            assert next(asked.iter_lines())
            assert server.stop() == 0
        assert other.wait(30) == 0
        assert other.stdout is not None
        said = other.stdout.read()
        assert "rank 0 has closed its engine: the ranks of this machine end" in said and "Traceback" not in said
        assert "Traceback" not in server.output and not server.leftovers()


@pytest.mark.slow
def test_machines_that_were_started_otherwise_say_what_differs() -> None:
    port = free_port()
    with following(*flags(port, 2), "--max-num-seqs", "3") as other:
        with pytest.raises(ValueError, match=r"rank 1 was started with other settings .*: max_num_seqs=\d+ on rank 0"):
            led(port, 2)
        assert other.wait(30)
        assert other.stdout is not None and "max_num_seqs=3 on rank 1" in other.stdout.read()


@pytest.mark.slow
def test_a_rank_of_this_machine_that_dies_while_others_are_awaited_ends_the_start() -> None:
    error = killed_while_it_starts(lambda: led(free_port(), 4).close())
    assert isinstance(error, ValueError) and "rank 1 of 4 has ended: it was killed by SIGKILL" in str(error)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"nnodes": 2, "tensor_parallel_size": 3}, "cannot be shared out over 2 machines"),
        ({"nnodes": 2, "node_rank": 2, "tensor_parallel_size": 2}, "node_rank 2 is none of 2 machines"),
        ({"nnodes": 2, "node_rank": 1, "tensor_parallel_size": 2}, "start it by quintet serve --headless"),
        ({"nnodes": 2, "data_parallel_size": 2, "tensor_parallel_size": 2}, "engines are of one machine each"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "master_addr": "192.0.2.1"}, "rank 0 cannot listen on 192.0.2.1"),
    ],
)
def test_what_cannot_be_says_why(settings: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LLM("bundled", **{"device": "cpu", "use_tqdm": False, **settings})


def test_headless_is_for_the_other_machines() -> None:
    done = subprocess.run([*QUINTET, "serve", "bundled", "--headless"], capture_output=True, text=True, timeout=120)
    assert done.returncode and "machine 0 takes the requests" in done.stderr


def test_explain_says_how_the_machines_meet_and_waits_for_none() -> None:
    page = str(explain(EngineConfig(model="bundled", device="cpu", tensor_parallel_size=4, nnodes=2)))
    assert "4 ranks on 2 machines: a process each" in page
    assert "that meet at 127.0.0.1:29501; communicator: TCP, sums in rank order" in page
