"""A real server that writes a trace: any API process begins and ends it, and names its file alone."""

import gzip
import json
from pathlib import Path

import httpx

from tests.helpers.serving import NULL, Server, until


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
