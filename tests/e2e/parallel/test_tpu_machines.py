"""JAX's runtime over two machines, made of two processes on JAX's CPU devices: one process's tokens, and a named end.

Every start compiles, so that these tests are slow.
"""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from quintet import LLM, SamplingParams
from quintet.api.explain import explain
from quintet.config import EngineConfig
from tests.e2e.parallel.test_nodes import PROMPTS, QUINTET, following, free_port
from tests.helpers.platforms import tpu
from tests.helpers.processes import gone
from tests.helpers.servers.serving import until

pytestmark = tpu.needs_jax

SMALL: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16, "num_pages": 32,
}  # fmt: skip
ASKED: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "logprobs": 2}


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUINTET_RANKS_KEY", "of these tests alone")


def flags() -> list[str]:
    small = [word for name, value in SMALL.items() for word in ("--" + name.replace("_", "-"), str(value))]
    cache = ["--compilation-cache-dir", tpu.programs().name]
    return [
        "bundled",
        "--device",
        "tpu",
        "-tp",
        "4",
        "--nnodes",
        "2",
        "--master-port",
        str(free_port()),
        *small,
        *cache,
    ]


@contextmanager
def serving(words: list[str], folder: Path) -> Iterator[tuple["subprocess.Popen[bytes]", Path, httpx.Client]]:
    """Machine 0, once it serves; what it says; and a client of it."""
    log, address = folder / "machine-0.log", str(folder / "served")
    with open(log, "w") as out:
        served = subprocess.Popen([*QUINTET, "serve", *words, "--uds", address], stdout=out, stderr=out)
        try:
            assert until(lambda: "ready: " in log.read_text() or served.poll() is not None, 300), log.read_text()
            with httpx.Client(transport=httpx.HTTPTransport(uds=address), timeout=120) as client:
                yield served, log, client
        finally:
            served.kill()
            served.wait()


def over_http(client: httpx.Client, temperature: float) -> list[tuple[str, list[float]]]:
    body = {"prompt": PROMPTS, "temperature": temperature, "seed": 7, **ASKED}
    answer = client.post("http://quintet/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    choices = sorted(answer.json()["choices"], key=lambda each: int(each["index"]))
    return [(each["text"], each["logprobs"]["token_logprobs"]) for each in choices]


def here(llm: LLM, temperature: float) -> list[tuple[str, list[float]]]:
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=temperature, seed=7, **ASKED), use_tqdm=False)
    first = [each.outputs[0] for each in outputs]
    return [(o.text, [at[t].logprob for at, t in zip(o.logprobs or [], o.token_ids, strict=True)]) for o in first]


@pytest.mark.slow
def test_two_machines_serve_what_one_process_says_and_a_lost_one_is_named(tmp_path: Path) -> None:
    cache = {"compilation_cache_dir": tpu.programs().name}
    with LLM("bundled", device="tpu", tensor_parallel_size=4, use_tqdm=False, **cache, **SMALL) as alone:
        want = [here(alone, temperature) for temperature in (0.0, 1.0)]
    words = flags()
    with following(*words) as other, serving(words, tmp_path) as (served, log, client):
        for _ in range(2):  # the second finds its prompts in the prefix cache
            for temperature, each in zip((0.0, 1.0), want, strict=True):
                got = over_http(client, temperature)
                assert [text for text, _ in got] == [text for text, _ in each]
                for (_, ours), (_, theirs) in zip(got, each, strict=True):
                    assert ours == pytest.approx(theirs, abs=1e-3)
        (rank,) = psutil.Process(other.pid).children()
        rank.kill()
        assert other.wait(60) == 1
        assert other.stdout is not None and "rank 1 of 2 has ended: it was killed by SIGKILL" in other.stdout.read()
        assert served.wait(60) == 1
        assert "rank 1 of 2 is lost" in log.read_text()
    assert gone(rank.pid)


@pytest.mark.sweep
@pytest.mark.parametrize("asked", [False, True], ids=["idle", "in the midst of an answer"])
def test_a_server_that_is_told_to_end_ends_the_other_machine_in_good_order(asked: bool, tmp_path: Path) -> None:
    """JAX's coordinator is in machine 0's engine, and ends by SIGABRT whoever loses it: the other goes first."""
    words = [*flags(), "--drain-timeout", "0"]
    with following(*words) as other, serving(words, tmp_path) as (served, log, client):
        (rank,) = psutil.Process(other.pid).children()
        if asked:
            body = {"prompt": PROMPTS[0], "max_tokens": 50, "ignore_eos": True, "stream": True}
            with client.stream("POST", "http://quintet/v1/completions", json=body) as answer:
                assert next(answer.iter_lines())
                served.send_signal(signal.SIGTERM)
        else:
            served.send_signal(signal.SIGTERM)
        assert served.wait(60) == 0, log.read_text()
        code, said = other.wait(60), other.stdout.read() if other.stdout is not None else ""
        assert code == 0, said
        assert "rank 0 has closed its engine: the ranks of this machine end" in said and "SIGABRT" not in said, said
    assert gone(rank.pid) and "Traceback" not in log.read_text() + said


@pytest.mark.sweep
def test_where_machine_0_is_lost_the_other_ends(tmp_path: Path) -> None:
    words = flags()
    with following(*words) as other, serving(words, tmp_path) as (served, _, _):
        (rank,) = psutil.Process(other.pid).children()
        for each in (*psutil.Process(served.pid).children(recursive=True), psutil.Process(served.pid)):
            each.kill()
        assert other.wait(60) == 1
        assert other.stdout is not None
        said = other.stdout.read()
        assert "rank 0 of 2 is lost" in said or "rank 1 of 2 has ended: it was killed by SIGABRT" in said, said
    assert gone(rank.pid)


def test_explain_says_how_machines_drive_their_devices_and_waits_for_none() -> None:
    page = str(explain(EngineConfig(model="bundled", device="tpu", tensor_parallel_size=4, nnodes=2)))
    assert "4 devices of 2 machines: a process on each drives its own" in page


def test_more_devices_than_a_machine_has_are_refused() -> None:
    with pytest.raises(ValueError, match="needs as many devices, 32 on each of 2 machines, 8 here"):
        LLM("bundled", device="tpu", nnodes=2, tensor_parallel_size=64)


def test_a_machine_that_follows_takes_no_requests() -> None:
    with pytest.raises(ValueError, match="start it by quintet serve --headless"):
        LLM("bundled", device="tpu", nnodes=2, node_rank=1, tensor_parallel_size=4)
