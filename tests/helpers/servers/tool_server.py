"""A real MCP server, made with the `mcp` package: within the test's loop over HTTP, or as a command.

python -m tests.helpers.servers.tool_server stdio
python -m tests.helpers.servers.tool_server http [TOOL]
"""

import asyncio
import contextlib
import os
import socket
import sys
from types import TracebackType
from typing import Any

import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError


class Tools:
    """What its tools saw, and what they wait for."""

    def __init__(self, only: str = "") -> None:
        self.only = only
        self.calls: list[str] = []
        self.begun, self.ended, self.go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def server(self, name: str = "sums") -> MCPServer:
        made = MCPServer(name)

        @made.tool()
        def add(a: int, b: int) -> int:
            """The sum of two numbers."""
            self.calls.append(f"add {a} {b}")
            return a + b

        @made.tool()
        def fail(why: str) -> str:
            """Fails."""
            raise ToolError(why)

        @made.tool()
        def long(size: int) -> str:
            """So many characters."""
            return "x" * size

        @made.tool()
        async def wait() -> str:
            """Until it is told to go on."""
            self.begun.set()
            try:
                await self.go_on.wait()
            finally:
                self.ended.set()
            return "done"

        @made.tool()
        def die() -> str:
            """The process ends."""
            os._exit(3)

        for name in ("add", "fail", "long", "wait", "die"):
            if self.only not in ("", name):
                made.remove_tool(name)
        return made


class Served:
    """async with Served(Tools()) as there: there.url"""

    def __init__(self, tools: Tools, name: str = "sums", port: int = 0, sse: bool = False, **how: Any) -> None:
        self.tools = tools
        server = tools.server(name)
        app = server.sse_app() if sse else server.streamable_http_app(**how)
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", port))
        self.port = self._listener.getsockname()[1]
        self.where = f"127.0.0.1:{self.port}"
        self.url = f"http://{self.where}/{'sse' if sse else 'mcp'}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=0))
        self._server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]  # the loop is the test's

    async def __aenter__(self) -> "Served":
        self._task = asyncio.get_running_loop().create_task(self._server.serve([self._listener]))
        while not self._server.started:
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        await self._task


async def main(transport: str, only: str = "") -> None:
    """`only`: the one tool that it has, if not all."""
    if transport == "stdio":
        await Tools().server().run_stdio_async()
        return
    async with Served(Tools(only)) as there:
        print(there.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
