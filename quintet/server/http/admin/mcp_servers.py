"""/v1/tool_servers, with --tool-server: which tools the operator's tool servers have, and one call, for the page."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.sampling_params import ParameterError
from quintet.server.http.inputs.body import Body, read_body
from quintet.server.http.openapi import documents_route
from quintet.server.http.respond import app_state_of, json_response, while_connected
from quintet.server.mcp.server import ToolServer, ToolServerUnavailable

logger = logging.getLogger(__name__)
router = APIRouter()


class OfferedTool(msgspec.Struct, kw_only=True):
    """A tool of a tool server."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema


class OfferedServer(msgspec.Struct, kw_only=True):
    """A tool server; `error` says why its tools are not known now."""

    name: str
    tools: list[OfferedTool] = []
    error: str | None = None


class OfferedServers(msgspec.Struct, kw_only=True):
    """All tool servers that the operator named."""

    object: str = "list"
    data: list[OfferedServer]


class ToolCall(Body):
    """One call of a tool."""

    server: str = Field(max_length=256, description="its name in the list")
    name: str = Field(max_length=256, description="the tool's")
    arguments: dict[str, Any] = Field(default_factory=dict)


class ToolOutput(msgspec.Struct, kw_only=True):
    """Result of a tool call; if the call failed, `output` has the reason."""

    output: str
    failed: bool


@router.get("/v1/tool_servers")
@documents_route(answer=OfferedServers)
async def tool_servers(http: HttpRequest) -> Response:
    """Lists the tools that are available now."""
    servers = app_state_of(http).tool_servers
    return json_response(
        OfferedServers(data=list(await asyncio.gather(*(_server_entry(each) for each in servers.servers))))
    )


@router.post("/v1/tool_servers/call")
@documents_route(body=ToolCall, answer=ToolOutput)
async def call_tool(http: HttpRequest) -> Response:
    """Has a tool server carry out one call; it ends when its caller hangs up."""
    body = await read_body(http, ToolCall)
    server = await app_state_of(http).tool_servers.server_named(body.server)
    if server is None:
        raise ParameterError("server", f"names no tool server: {body.server[:80]!r}")
    result = await while_connected(http, server.call(body.name, body.arguments))
    return json_response(ToolOutput(output=result.text, failed=result.failed))


async def _server_entry(server: ToolServer) -> OfferedServer:
    try:
        tools = await server.tools()
    except ToolServerUnavailable as error:  # its message has the server's address
        logger.warning("%s", error)
        return OfferedServer(name=server.name or "?", error="it does not answer; the server's log says why")
    offered = [OfferedTool(name=each.name, description=each.description, parameters=each.schema) for each in tools]
    return OfferedServer(name=server.name or "?", tools=offered)
