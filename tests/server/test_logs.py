"""What a server's log looks like, which requests it leaves out, and how it tells of the end."""

import json
import re
import signal

import httpx
import pytest

from quintet.server.config import PROBE_PATHS, ServerConfig
from tests.helpers.servers.serving import ENDLESS, LONG, NULL, PATIENCE, Server, until

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d{4} (DEBUG|INFO|WARNING|ERROR) +\S.*")


@pytest.mark.slow
def test_every_line_has_its_time_and_level_and_probes_have_none() -> None:
    with Server(*NULL, "--api-workers", "2", "--uvicorn-log-level", "info") as server:
        for path in PROBE_PATHS:
            httpx.get(server.url + path, timeout=PATIENCE)
        httpx.get(server.url + "/v1/models", timeout=PATIENCE)
        assert server.stop(signal.SIGINT) == 0
        lines = server.output.splitlines()
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    assert server_line(lines, "Started server process")  # uvicorn's
    assert [line.split()[4] for line in lines if " GET " in line] == ["/v1/models"]
    assert server_line(lines, "SIGINT: ").endswith("INFO    SIGINT: the server ends; nothing runs")
    assert re.search(r"ended after \d+\.\d s \(SIGINT\); no request was running$", lines[-1])


def server_line(lines: list[str], said: str) -> str:
    (found, *_) = [line for line in lines if said in line]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_end_tells_what_it_waited_for(number: signal.Signals) -> None:
    body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with Server(*NULL) as server:
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=PATIENCE) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(number)
            assert list(lines)[-2] == "data: [DONE]"
        assert server.process.wait(PATIENCE) == 0
        said = server.output
    assert f"{number.name}: the server ends; 1 requests run, and get up to 30 s" in said
    assert f"({number.name}); of 1 running requests 1 finished, 0 were cut short" in said and "Traceback" not in said


@pytest.mark.slow
def test_the_end_tells_what_it_cut_short() -> None:
    with Server(*NULL, *ENDLESS, "--drain-timeout", "0") as server:
        with httpx.stream("POST", server.url + "/v1/completions", json=LONG, timeout=PATIENCE) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(PATIENCE) == 0
        assert "(SIGTERM); of 1 running requests 0 finished, 1 were cut short" in server.output


@pytest.mark.slow
def test_lines_may_be_json() -> None:
    with Server(*NULL, "--log-format", "json", "--disable-access-log-for-endpoints", "", wait=False) as server:
        assert until(lambda: '"message": "ready: ' in server.output)
        url = re.findall(r"ready: .* at (\S+)\"", server.output)[0]
        httpx.get(url + "/health", timeout=PATIENCE)
        assert server.stop() == 0
        found = [json.loads(line) for line in server.output.splitlines()]
    assert all(list(each) == ["time", "level", "logger", "message"] for each in found)
    (health,) = [each for each in found if each["logger"] == "quintet.access"]
    assert health["level"] == "INFO" and " GET /health 200 " in health["message"]


def test_vllms_names_of_the_access_log() -> None:
    assert ServerConfig(disable_uvicorn_access_log=True).access_log is False
    given = ServerConfig(disable_access_log_for_endpoints="/health, /x,")  # type: ignore[arg-type]
    assert given.disable_access_log_for_endpoints == ("/health", "/x")
    with pytest.raises(
        ValueError, match="disable_access_log_for_endpoints must be paths such as /health, not 'health'"
    ):
        ServerConfig(disable_access_log_for_endpoints="health")  # type: ignore[arg-type]
