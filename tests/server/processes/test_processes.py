"""The server's processes: who notices whose end, and what is said of it; nothing is left behind."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.helpers.servers.serving import ENDLESS, LONG, NULL, PATIENCE, Server, until

PATIENT = ("--engine-timeout", "600", "--drain-timeout", "600")  # seconds: what a test does comes before


def ready(url: str) -> tuple[int, str]:
    """Status and text of /ready; 0 where nobody answers."""
    try:
        answer = httpx.get(url + "/ready", timeout=PATIENCE)
    except httpx.HTTPError:
        return 0, ""
    return answer.status_code, answer.text


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(*NULL, *ENDLESS, *PATIENT) as made:
        yield made


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A socket's name has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="q") as made:
        yield Path(made)


def test_answers_and_leaves_nothing(server: Server) -> None:
    assert server.complete().json()["usage"]["completion_tokens"] == 8
    folders = {Path(each.laddr).parent for each in server.find("engine_process").net_connections("unix") if each.laddr}
    sockets = {folder for folder in folders if folder.name.startswith("quintet-")}
    assert len(sockets) == 1 and next(iter(sockets)).stat().st_mode & 0o777 == 0o700
    assert server.stop() == 0
    assert server.leftovers() == []
    assert not any(folder.exists() for folder in sockets)


def test_a_killed_engine_ends_the_server_with_a_reason(server: Server) -> None:
    server.find("engine_process").kill()
    assert server.process.wait(PATIENCE) == 1
    assert "the engine has ended: it was killed by SIGKILL" in server.output
    assert server.leftovers() == []


def test_a_killed_server_takes_its_engine_along(server: Server) -> None:
    server.children()
    server.process.kill()
    server.process.wait()
    assert server.leftovers() == []


@pytest.mark.slow
def test_a_stopped_engine_is_ended_with_the_reason() -> None:
    with Server(*NULL, "--engine-timeout", "15") as server:
        server.find("engine_process").suspend()
        assert server.process.wait(PATIENCE) == 1
        assert "no sign of life" in server.output
        assert server.leftovers() == []


@pytest.mark.slow
def test_a_stopped_engine_is_not_ready_and_one_that_goes_on_is_again(server: Server) -> None:
    before = server.complete().json()["choices"]
    engine = server.find("engine_process")
    engine.suspend()
    assert until(lambda: ready(server.url)[0] == 503)
    assert httpx.get(server.url + "/live", timeout=PATIENCE).status_code == 200
    assert "no sign of life" in server.complete().json()["error"]["message"]
    engine.resume()
    assert until(lambda: ready(server.url)[0] == 200)
    assert server.complete().json()["choices"] == before


class Callers:
    """Of every API process: one who reads a stream, and one who waits for a whole answer."""

    def __init__(self, server: Server, stack: contextlib.ExitStack) -> None:
        self._threads, self._read, self.waiting = stack.enter_context(ThreadPoolExecutor()), [], []
        for each in server.api_processes():
            client = stack.enter_context(server.only(each))
            self._read.append(stack.enter_context(client.stream("POST", "/v1/completions", json=LONG)).iter_lines())
            client = stack.enter_context(server.only(each))
            whole = {**LONG, "stream": False}
            self.waiting.append(self._threads.submit(client.post, "/v1/completions", json=whole))
        assert all(next(lines).startswith("data: ") for lines in self._read)
        assert until(lambda: server.metrics()["vllm:num_requests_running"] == 2 * len(self.waiting))

    def told(self) -> list[tuple[int, Any]]:
        """Status and body that each got in the end; of a stream 0, and its last event."""
        answers = [each.result(PATIENCE) for each in self.waiting]
        lasts = [[line for line in lines if line.startswith("data: {")][-1] for lines in self._read]
        return [*((0, json.loads(line[6:])) for line in lasts), *((each.status_code, each.json()) for each in answers)]


@pytest.mark.slow
def test_callers_of_every_process_are_told_when_the_engine_dies() -> None:
    with Server(*NULL, *ENDLESS, *PATIENT, "--api-workers", "2") as server, contextlib.ExitStack() as stack:
        assert until(server.all_there)
        callers = Callers(server, stack)
        server.find("engine_process").kill()
        why = "the engine has ended: it was killed by SIGKILL; the system may have run out of memory"
        error = {"message": why, "type": "service_unavailable", "param": None, "code": "engine_dead"}
        told = callers.told()
        assert told == [(status, {"error": error}) for status in (0, 0, 503, 503)]
        assert all(each.result().headers["retry-after"] for each in callers.waiting)
        assert server.process.wait(PATIENCE) == 1
        assert server.leftovers() == []
        assert "Traceback" not in server.output


def test_sigterm_lets_running_requests_end(server: Server) -> None:
    body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "n": 8, "stream": True}
    options = {"stream_options": {"include_usage": True}}
    with httpx.stream("POST", server.url + "/v1/completions", json={**body, **options}, timeout=PATIENCE) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        assert until(lambda: ready(server.url)[0] in (503, 0))
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["usage"]["completion_tokens"] == 8 * 900
    assert server.process.wait(PATIENCE) == 0
    assert server.leftovers() == []


@pytest.mark.slow
def test_a_second_sigterm_ends_it_at_once(server: Server) -> None:
    engine = server.find("engine_process")
    with httpx.stream("POST", server.url + "/v1/completions", json=LONG, timeout=PATIENCE) as response:
        lines = response.iter_lines()  # held: without it the response would be closed
        next(lines)
        engine.suspend()  # so the request never ends
        server.process.send_signal(signal.SIGTERM)
        assert until(lambda: "shutting down" in ready(server.url)[1])
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
    assert server.leftovers() == []


@pytest.mark.slow
def test_an_engine_that_dies_while_others_end_their_requests_is_told_of() -> None:
    with Server(*NULL, *ENDLESS, *PATIENT, "--api-workers", "2") as server:
        assert until(server.all_there)
        engine, (own, worker) = server.find("engine_process"), server.api_processes()
        with server.only(worker) as client, client.stream("POST", "/v1/completions", json=LONG) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            assert until(lambda: not serves(own))
            engine.kill()
            rest = [line for line in lines if line]
            assert any("the engine has ended: it was killed by SIGKILL" in line for line in rest), rest[-3:]
        assert server.process.wait(PATIENCE) == 1
        assert server.leftovers() == []


def serves(process: psutil.Process) -> bool:
    """Whether it listens, or has connections."""
    return any(each.laddr for each in process.net_connections("tcp"))


@pytest.mark.slow
def test_a_second_sigterm_ends_the_other_processes_too(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(short_folder))
    with Server(*NULL, *ENDLESS, *PATIENT, "--api-workers", "2") as server:
        assert until(server.all_there)
        engine, (own, worker) = server.find("engine_process"), server.api_processes()
        with server.only(worker) as client, client.stream("POST", "/v1/completions", json=LONG) as response:
            lines = response.iter_lines()
            next(lines)
            engine.suspend()  # so the request never ends
            server.process.send_signal(signal.SIGTERM)
            assert until(lambda: not serves(own))  # it only waits by now
            server.process.send_signal(signal.SIGTERM)
            assert '"shutting_down"' in [line for line in lines if line][-2]
            assert server.process.wait(PATIENCE) == 0
        assert server.leftovers() == []
        assert list(short_folder.iterdir()) == []
        assert "Traceback" not in server.output


@pytest.mark.slow
def test_a_second_sigterm_tells_every_caller_why() -> None:
    with Server(*NULL, *ENDLESS, *PATIENT, "--api-workers", "2") as server, contextlib.ExitStack() as stack:
        assert until(server.all_there)
        callers = Callers(server, stack)
        server.find("engine_process").suspend()
        server.process.send_signal(signal.SIGTERM)
        assert until(lambda: "shutting down" in ready(server.url)[1])
        server.process.send_signal(signal.SIGTERM)
        told = callers.told()
        assert [(status, body["error"]["code"]) for status, body in told] == [
            (status, "shutting_down") for status in (0, 0, 503, 503)
        ]
        assert server.process.wait(PATIENCE) == 0
        assert server.leftovers() == []
        assert "Traceback" not in server.output


@pytest.mark.slow
def test_a_stopped_api_process_is_replaced_and_is_woken_to_end() -> None:
    """While the server lives nobody waits for long; when it ends, what was stopped finishes what it has."""
    with Server(*NULL, "--engine-timeout", "5", "--api-workers", "2") as server:
        assert until(server.all_there)
        stopped = server.find("api_process")
        stopped.suspend()
        assert until(lambda: "API process 1 has ended: it gave no sign of life for" in server.output)
        assert until(lambda: [each for each in server.those("api_process") if each != stopped] != [])
        assert until(server.all_there)
        heir, body = server.find("api_process"), {**LONG, "max_tokens": 900, "n": 8}
        with server.only(heir) as client, client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            heir.suspend()
            server.process.send_signal(signal.SIGTERM)
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            assert sum(choice["finish_reason"] == "length" for each in events for choice in each["choices"]) == 8
        assert server.process.wait(PATIENCE) == 0
        assert server.leftovers() == []


@pytest.mark.slow
def test_sigterm_while_it_starts_leaves_nothing(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(short_folder))
    with Server(*NULL, wait=False) as server:
        assert until(lambda: server.those("engine_process"))
        assert server.stop() == 0
        assert server.leftovers() == []
        assert list(short_folder.iterdir()) == []


@pytest.mark.slow
def test_a_signal_to_every_process_lets_requests_end_too() -> None:
    """As Ctrl-C in a terminal, and as service managers do it."""
    with Server(*NULL, *PATIENT, "--api-workers", "2") as server:
        body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "n": 8, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=PATIENCE) as response:
            assert response.status_code == 200
            lines = response.iter_lines()
            next(lines)
            for each in server.children():
                each.terminate()
            server.process.terminate()
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert not any("error" in event for event in events)
        reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
        assert reasons.count("length") == 8
        assert server.process.wait(PATIENCE) == 0
        assert server.leftovers() == []


@pytest.mark.slow
def test_ctrl_c_is_a_sigterm(server: Server) -> None:
    assert server.stop(signal.SIGINT) == 0
    assert server.leftovers() == []


@pytest.mark.slow
def test_a_model_that_is_not_there_ends_with_the_reason() -> None:
    with Server("/nowhere/at-all", *NULL, wait=False) as server:
        assert server.process.wait(PATIENCE) == 1
        assert "/nowhere/at-all" in server.output
        assert server.leftovers() == []


def test_a_taken_port_is_said_before_anything_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "quintet.cli.main", "serve", *NULL, "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert f"port {port} on 127.0.0.1 is taken" in done.stderr and "--port" in done.stderr


@pytest.mark.slow
def test_a_unix_socket_is_private_and_goes_with_the_server(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with Server(*NULL, "--uds", str(path)) as server:
        assert path.stat().st_mode & 0o777 == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://here") as client:
            assert client.get("/ready").status_code == 200
        assert server.stop() == 0
        assert not path.exists()


def test_a_dead_servers_socket_file_is_replaced_a_living_ones_is_not(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with Server(*NULL, "--uds", str(path)):
        command = [sys.executable, "-m", "quintet.cli.main", "serve", *NULL, "--uds", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 1 and "a server listens there" in done.stderr
        assert path.exists()


def test_several_api_processes_serve_one_engine() -> None:
    with Server(*NULL, "--api-workers", "3", wait=False) as server:
        assert until(lambda: len(server.those("api_process")) == 2)
        for each in server.children():
            each.terminate()  # what signals mean is the parent's to say, from their first instant on
        server.wait_ready()
        assert until(server.all_there)
        assert len(server.those("engine_process")) == 1 and len(server.api_processes()) == 3
        answers = {text_of(server, each) for each in server.api_processes()}
        assert len(answers) == 1
        dead = server.find("api_process")
        dead.kill()
        assert until(lambda: "another is started" in server.output)
        assert until(lambda: len([each for each in server.those("api_process") if each != dead]) == 2)
        assert until(server.all_there)
        assert {text_of(server, each) for each in server.api_processes()} == answers
        assert server.stop() == 0
        assert server.leftovers() == []


@pytest.mark.slow
def test_nobody_takes_a_dead_ones_place_while_the_server_ends() -> None:
    with Server(*NULL, *ENDLESS, *PATIENT, "--api-workers", "2") as server:
        assert until(server.all_there)
        own, worker = server.api_processes()
        with server.only(own) as client, client.stream("POST", "/v1/completions", json=LONG) as response:
            lines = response.iter_lines()
            next(lines)
            worker.kill()
            assert until(lambda: "another is started" in server.output)
            server.process.send_signal(signal.SIGTERM)
            assert until(lambda: "shutting down" in ready(server.url)[1])
            time.sleep(1.2)  # an heir's time comes after a second; one that came before is told to end
            assert until(lambda: server.those("api_process") == [])
        assert server.process.wait(PATIENCE) == 0
        assert server.leftovers() == []


def text_of(server: Server, process: psutil.Process) -> str:
    """What that API process gives."""
    with server.only(process) as client:
        assert until(lambda: client.get("/ready").status_code == 200)  # after a stop it has to hear the engine anew
        return str(client.post("/v1/completions", json={"prompt": "a", "seed": 1}).json()["choices"][0]["text"])


@pytest.mark.slow
def test_an_api_process_takes_no_connection_before_it_knows_the_model() -> None:
    with Server(*NULL, *PATIENT, "--api-workers", "2") as server:
        server.find("engine_process").suspend()  # it greets nobody
        dead = server.find("api_process")
        dead.kill()
        assert until(lambda: any(each != dead for each in server.those("api_process")))
        assert until(server.all_there)  # the heir listens to the others; what it does of itself it does at once
        assert until(lambda: "no sign of life" in ready(server.url)[1])
        said = [ready(server.url)[1] for _ in range(50)]
        assert "another is started" in server.output
        assert all("no sign of life" in each for each in said), said


@pytest.mark.slow
def test_a_dead_api_process_leaves_no_pages_behind() -> None:
    with Server(*NULL, *ENDLESS, "--api-workers", "2") as server:
        assert until(server.all_there)
        worker = server.find("api_process")
        with server.only(worker) as client, client.stream("POST", "/v1/completions", json=LONG) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            worker.kill()
            assert until(lambda: 0 < freed_after(server) < LONG["max_tokens"])


def freed_after(server: Server) -> float:
    """How many tokens were made before nothing ran and no page was held; 0 while that is not so."""
    found = server.metrics()  # of one moment, which may have been before the request
    busy = found["vllm:num_requests_running"] or found["vllm:kv_cache_usage_perc"]
    return 0 if busy else found["vllm:generation_tokens_total"]
