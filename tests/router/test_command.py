"""`quintet router` as it is started: before two servers of the bundled model, and at its end."""

import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from tests.helpers.servers.serving import PATIENCE, Server, until

_READY = re.compile(r"ready: .* at (\S+)\n")
PROMPTS = ["The sea is", "A router sends", "Tea at", "Once upon a time"]


class Router:
    """A process."""

    def __init__(self, *flags: str, before: tuple[str, ...] = ()) -> None:
        self.log = Path(tempfile.mkstemp(prefix="quintet-router-", suffix=".log")[1])
        port = () if "--uds" in flags else ("--port", "0")
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*before, sys.executable, "-m", "quintet.cli.main", "router", *port, *flags],
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        assert until(lambda: _READY.search(self.said) is not None or self.process.poll() is not None), self.said
        found = _READY.search(self.said)
        assert found is not None, self.said
        self.url = found[1]

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.unlink()


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    with Server("--max-model-len", "256", wait=False) as one, Server("--max-model-len", "256", wait=False) as two:
        for each in (one, two):
            each.wait_ready()
        yield [one, two]


@pytest.fixture
def router(servers: list[Server]) -> Iterator[Router]:
    made = Router("--backend", *(each.url for each in servers), "--policy", "round_robin")
    try:
        assert until(lambda: made.said.count("takes requests") == 2), made.said
        yield made
    finally:
        made.close()


def texts(url: str, stream: bool) -> list[str]:
    found = []
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        (model,) = [each.id for each in client.models.list()]
        for prompt in PROMPTS:
            asked = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 12}
            if stream:
                said = client.completions.create(**asked, stream=True)  # type: ignore[call-overload]
                found.append("".join(each.choices[0].text for each in said))
            else:
                found.append(client.completions.create(**asked).choices[0].text)  # type: ignore[call-overload]
    return found


def test_two_servers_say_what_one_says(servers: list[Server], router: Router) -> None:
    alone = texts(servers[0].url, stream=False)
    assert texts(router.url, stream=False) == texts(router.url, stream=True) == alone
    said = httpx.get(f"{router.url}/metrics").text
    counts = re.findall(r'router_requests_total\{.*status="200"\} (\S+)', said)
    assert [float(each) for each in counts] == [4.0, 4.0], said
    response = httpx.post(f"{router.url}/v1/responses", json={"input": "Hi", "max_output_tokens": 4}).json()
    again = httpx.get(f"{router.url}/v1/responses/{response['id']}").json()
    assert again["output"] == response["output"]


def test_sigterm_lets_a_stream_end(servers: list[Server], router: Router) -> None:
    asked = {"prompt": "Tea", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{router.url}/v1/completions", json=asked, timeout=PATIENCE) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        router.process.send_signal(signal.SIGTERM)
        assert [each for each in lines if each][-1] == "data: [DONE]"
    assert router.process.wait(PATIENCE) == 0
    assert "all requests finished" in router.said


@pytest.mark.slow
def test_nothing_heavy_is_loaded() -> None:
    code = (
        "import sys, quintet.cli.commands.router, quintet.router.server\n"
        "print([each for each in ('torch', 'transformers', 'numpy', 'tokenizers', 'fastapi') if each in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
