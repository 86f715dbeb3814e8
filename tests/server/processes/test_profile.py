"""A real server that writes a trace: any API process begins and ends it, and names its file alone."""

import gzip
import json
from pathlib import Path

import httpx
import pytest

from quintet.cli import main as cli
from tests.helpers.servers.serving import NULL, Server, until


@pytest.mark.slow
def test_a_benchmark_has_its_timed_requests_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--num-prompts", "3", "--input-len", "4", "--output-len", "4", "--max-concurrency", "1", "--profile"]
    config = ("--profiler-config.profiler", "torch", "--profiler-config.torch_profiler_dir", str(tmp_path))
    with Server(*NULL, *config) as server:
        assert cli.main(["bench", "serve", "--url", server.url, *load]) == 0
        assert 'traced: {"file":' in capsys.readouterr().err
    with Server(*NULL) as server:
        assert cli.main(["bench", "serve", "--url", server.url, *load]) == 1
        assert "to /start_profile: " in (said := capsys.readouterr().err) and "run it with --profiler-config" in said
    (path,) = tmp_path.iterdir()
    trace = json.loads(gzip.decompress(path.read_bytes()))
    assert sum(each["name"] == "start" for each in trace["traceEvents"]) >= 12, "four steps of each, and no warm-up"


@pytest.mark.slow
def test_one_process_begins_a_trace_and_another_ends_it(tmp_path: Path) -> None:
    config = json.dumps({"profiler": "torch", "torch_profiler_dir": str(tmp_path)})
    with Server(*NULL, "--profiler-config", config, "--api-workers", "2") as server:
        assert until(server.all_there)
        one, other = server.api_processes()
        with server.only(one) as client:
            assert client.post("/start_profile").json() == {"status": "tracing"}
        with server.only(other) as client:
            refused = client.post("/start_profile")
            assert refused.status_code == 409 and "a trace runs already" in refused.json()["error"]["message"]
        assert server.complete().status_code == 200
        with server.only(other) as client:
            told = client.post("/stop_profile").json()
        assert httpx.post(server.url + "/stop_profile").status_code == 409
        assert server.stop() == 0
    (path,) = tmp_path.iterdir()
    assert path.name == told["file"] and told["ended"] == "it was stopped"
    names = [each["name"] for each in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]
    assert names.count("step") == told["steps"] > 0 and names.count("schedule") >= told["steps"]
