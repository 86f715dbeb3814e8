"""Libraries that the processes of a server on CPUs load: none before a request needs it, for each takes memory."""

from pathlib import Path

import psutil
import pytest

from tests.helpers.servers.serving import Server

pytest.importorskip("llguidance", reason="structured outputs are an extra: pip install 'quintet-llm[structured]'")
MAPS = Path("/proc/self/maps")


def loaded(process: psutil.Process, *libraries: str) -> list[str]:
    """Those of the packages whose compiled modules a process has loaded."""
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    return [each for each in libraries if f"/site-packages/{each}/" in maps]


@pytest.mark.skipif(not MAPS.exists(), reason="the system has no /proc")
def test_the_engine_reads_no_vocabulary_before_a_request_asks_for_a_grammar() -> None:
    with Server("--device", "cpu") as server:
        api, engine = psutil.Process(server.process.pid), server.find("engine_process")
        assert server.complete().status_code == 200
        assert loaded(engine, "torch", "tokenizers", "llguidance") == ["torch"]
        assert loaded(api, "torch", "tokenizers", "llguidance") == ["tokenizers"]
        answer = server.complete(structured_outputs={"regex": "[ab]{3}"})
        assert answer.json()["choices"][0]["text"].strip("ab") == ""
        assert loaded(engine, "torch", "tokenizers", "llguidance") == ["torch", "tokenizers", "llguidance"]
