"""The bundled model, a server as users start it, and a tool server in a process of its own, through OpenAI's client."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

pytest.importorskip("mcp", reason="needs the extra mcp")

from tests.helpers.servers.serving import PATIENCE, Server, until

ROOT = Path(__file__).parents[4]
ADD: Any = {"type": "mcp", "server_label": "sums", "require_approval": "never", "allowed_tools": ["add"]}
WAIT: Any = {**ADD, "allowed_tools": ["wait"]}
SUM = "What is 27 + 45?"


@pytest.fixture(scope="module")
def where() -> Iterator[str]:
    """A URL."""
    words = [sys.executable, "-m", "tests.helpers.servers.tool_server", "http"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()


@pytest.fixture
def server(where: str) -> Iterator[Server]:
    with Server("--device", "cpu", "--max-model-len", "512", "--num-pages", "200", "--tool-server", where) as made:
        yield made


@pytest.mark.slow
def test_the_bundled_model_has_a_sum_added(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as ai:
        asked: Any = {"model": "bundled", "input": SUM, "tools": [ADD], "temperature": 0, "max_output_tokens": 100}
        answer = ai.responses.create(**asked)
        [call] = [item for item in answer.output if item.type == "mcp_call"]
        assert (json.loads(call.arguments), call.output) == ({"a": 27, "b": 45}, "72")
        assert "72" in answer.output_text
        with ai.responses.stream(**asked) as events:
            final = events.get_final_response()
        assert [item.type for item in final.output] == [item.type for item in answer.output]
        assert final.output_text == answer.output_text
        ask: Any = {**ADD, "require_approval": "always"}
        first = ai.responses.create(**{**asked, "tools": [ask]})
        request = first.output[-1]
        assert request.type == "mcp_approval_request" and json.loads(request.arguments) == {"a": 27, "b": 45}
        yes: Any = {"type": "mcp_approval_response", "approval_request_id": request.id, "approve": True}
        approved = ai.responses.create(**{**asked, "tools": [ask], "input": [yes]}, previous_response_id=first.id)
        assert approved.output[0].type == "mcp_call" and approved.output[0].output == "72"
        assert approved.output_text == answer.output_text
        # and a server that is told to end does not wait for tools for longer than for anything else
        waiting = ai.responses.create(
            model="bundled", input="Wait.", tools=[WAIT], tool_choice={"type": "mcp", "server_label": "sums"},
            background=True,
        )  # fmt: skip
        assert until(lambda: any(item.type == "mcp_call" for item in ai.responses.retrieve(waiting.id).output))
    server.process.terminate()
    assert until(lambda: "SIGTERM: the server ends" in server.output)
    server.process.terminate()
    assert server.process.wait(PATIENCE) == 0
    assert server.leftovers() == []
