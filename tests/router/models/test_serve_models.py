"""`quintet serve --models` with real engines: three models with room for two, under load, kills and at its end."""

import json
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks import several_models
from tests.helpers.processes import gone
from tests.helpers.servers.serving import Server, until, words_of

BUDGET = 950 * 2**20  # two of them fit: each is planned with 0.40 to 0.45 GiB, most of it for its two processes
FILE = """
plain:
  model: bundled
  aliases: ["claude-*"]
  num_pages: 130
other:
  model: bundled
  num_pages: 130
  hf_overrides: {rope_theta: 50}
vectors:
  model: bundled-embed
"""
PROMPT = "Once upon a time"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    file = tmp_path / "models.yaml"
    file.write_text(FILE)
    with Server("--models", str(file), "--memory-budget", str(BUDGET), "--max-num-batched-tokens", "256") as made:
        yield made


def ask(url: str, model: str, stream: bool = False) -> tuple[int, Any]:
    """Status and content; of a stream, its text."""
    if model == "vectors":
        answer = httpx.post(f"{url}/v1/embeddings", json={"model": model, "input": PROMPT}, timeout=280)
        return answer.status_code, answer.json().get("data", answer.text)
    body = {"model": model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "stream": stream}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=280)
    if answer.status_code != 200:
        return answer.status_code, answer.json()["error"]["message"]
    if not stream:
        return answer.status_code, answer.json()["choices"][0]["text"]
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    broken = any("error" in json.loads(each) for each in events)
    return 502 if broken else 200, "".join(json.loads(each)["choices"][0]["text"] for each in events if not broken)


def engines(server: Server) -> list[psutil.Process]:
    return [each for each in server.children() if "quintet.engine.processes.engine_process" in words_of(each)]


def held(server: Server) -> int:
    """Bytes of all child processes."""
    total = 0
    for each in server.children():
        try:
            total += each.memory_full_info().pss
        except psutil.Error:
            continue
    return total


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_models_with_room_for_two_answer_under_load_and_kills(server: Server) -> None:
    url, rng, peak = server.url, random.Random(7), 0
    expected = {model: ask(url, model) for model in ("plain", "other", "vectors")}
    assert [status for status, _ in expected.values()] == [200, 200, 200], expected
    assert expected["plain"] != expected["other"]
    assert f"ready: 3 models, page at {url}/, API at {url}" in server.output
    assert "loading plain" in server.output
    asked = [rng.choice(["plain", "claude-x", "other", "vectors"]) for _ in range(16)]
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, url, name, rng.random() < 0.5) for name in asked]
        until(lambda: sum(each.done() for each in answers) >= 4, 240)
        killed = engines(server)[:1]
        for each in killed:
            each.kill()
        while not all(each.done() for each in answers):
            peak = max(peak, held(server))
            memory = httpx.get(f"{url}/models/loaded", timeout=60).json()["memory"]
            assert memory["planned"] <= memory["budget"] == BUDGET
            until(lambda: all(each.done() for each in answers), 1.0)
    wrong = []
    for name, answer in zip(asked, answers, strict=True):
        model = "plain" if name == "claude-x" else name
        status, content = answer.result()
        if status == 200 and content != expected[model][1]:
            wrong.append((name, content))
        assert status in (200, 502, 503), (name, content)
    assert wrong == [], "no answer is another model's"
    assert sum(each.result()[0] == 200 for each in answers) >= 8, server.output
    assert 0 < peak <= BUDGET
    shown = httpx.get(f"{url}/metrics").text
    assert 'quintet:model_unloads_total{model="plain",reason="memory"}' in shown
    assert (
        sum(float(line.split()[-1]) for line in shown.splitlines() if line.startswith("quintet:model_loads_total")) >= 4
    )


@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_no_request_is_lost_or_answered_by_another_model_under_a_longer_load() -> None:
    figures = several_models.run(seconds=60.0, clients=4)
    assert figures["distinct_models"] == 3
    assert (figures["lost"], figures["wrong"], figures["examples"]) == (0, 0, [])
    assert figures["loads"] > 3 and figures["unloads_for_memory"] > 1
    assert figures["engines_ended_by_themselves"] == 0
    assert 0 < figures["peak_planned_mib"] <= figures["budget_mib"]
    assert 0 < figures["peak_memory_mib"] <= figures["budget_mib"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_no_engine_outlives_the_server(server: Server, by: signal.Signals) -> None:
    assert ask(server.url, "plain")[0] == 200
    children = [each.pid for each in server.children()]
    assert len(children) >= 2
    server.process.send_signal(by)
    assert until(lambda: gone(*children)), [psutil.Process(each) for each in children if psutil.pid_exists(each)]
    server.process.wait(60)
    assert server.process.returncode == (0 if by is signal.SIGTERM else -9)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("module", ["estimate_process", "engine_process"])
def test_ctrl_c_twice_while_a_model_is_planned_or_loads_leaves_no_process(server: Server, module: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, server.url, "plain")
        waits = 'quintet:model_waiting{model="plain"} 1.0'
        assert until(lambda: waits in httpx.get(f"{server.url}/metrics").text)
        assert until(lambda: any(f"quintet.router.models.{module}" in words_of(each) for each in server.children()))
        children = [each.pid for each in server.children()]
        server.process.send_signal(signal.SIGINT)
        assert until(lambda: "SIGINT: the server ends; 1 requests run" in server.output)
        server.process.send_signal(signal.SIGINT)
        assert asked.result() == (503, "the server is shutting down")
    assert server.process.wait(60) == 0
    assert until(lambda: gone(*children)), children
    assert "1 requests were cut short" in server.output and "Traceback" not in server.output


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_idle_model_sleeps_ends_and_answers_again(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(FILE)
    with Server("--models", str(file), "--memory-budget", str(BUDGET), "--keep-alive", "2") as server:
        first = ask(server.url, "plain")

        def state() -> str:
            listed = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
            return str(listed[0]["status"]["value"])

        assert until(lambda: state() == "sleeping")
        assert ask(server.url, "plain") == first, "a request wakes it"
        assert until(lambda: state() == "unloaded")
        assert until(lambda: not engines(server))
        assert ask(server.url, "plain") == first, "a request starts it again"
        assert "(idle)" in server.output
