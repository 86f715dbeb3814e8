"""`quintet serve --tool-server`: what it costs, how it starts and how it ends."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quintet.server.config import ServerConfig
from quintet.server.mcp.servers import ToolServers
from tests.helpers.servers.serving import NULL, Server

ROOT = Path(__file__).parents[3]
IDLE = """
import sys
from quintet.server.processes import api_process
from quintet.server.config import ServerConfig
from quintet.server.mcp.servers import ToolServers

assert not ToolServers(ServerConfig())
print([name for name in ("mcp", "mcp_types", "httpx2", "jsonschema") if name in sys.modules])
"""


def test_nothing_of_the_client_is_imported_without_the_flag() -> None:
    found = subprocess.run([sys.executable, "-c", IDLE], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_without_the_client_the_flag_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ValueError, match=r"^tool_server needs the MCP client .*; run: pip install '.*\[mcp\]'$"):
        ToolServers(ServerConfig(tool_server=("localhost:1",)))


@pytest.mark.slow
def test_a_command_ends_with_the_server(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="needs the extra mcp")
    entry = {"command": sys.executable, "args": ["-m", "tests.helpers.servers.tool_server", "stdio"], "cwd": str(ROOT)}
    (tmp_path / "s.json").write_text(json.dumps({"mcpServers": {"sums": entry}}))
    with Server(*NULL, "--tool-server", str(tmp_path / "s.json")) as server:
        assert "tool server sums (" in server.output
        assert any("tests.helpers.servers.tool_server" in each.cmdline() for each in server.children())
        assert server.stop() == 0
        assert server.leftovers() == []


@pytest.mark.slow
def test_a_server_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="needs the extra mcp")
    with Server(*NULL, "--tool-server", "127.0.0.1:1", wait=False) as server:
        assert server.process.wait(60) == 1
        last = server.output.splitlines()[-1]
        assert last.startswith("quintet serve: error: tool server http://127.0.0.1:1/sse cannot be used: ")
        assert "Traceback" not in server.output
        assert server.leftovers() == []
