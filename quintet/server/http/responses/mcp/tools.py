"""Tools of type mcp: a request names one of the operator's tool servers; its tools become functions for the model."""

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quintet.chat.validation import kind_of, list_of, object_of, one_of, refuse_fields, text_of
from quintet.sampling_params import ParameterError
from quintet.server.http.app_state import AppState
from quintet.server.http.errors import ApiError
from quintet.server.http.responses.mcp.items import ToolList
from quintet.server.http.responses.tools import leaves_out
from quintet.server.mcp.server import ServedTool, ToolServer, ToolServerUnavailable

logger = logging.getLogger(__name__)

_KEYS = ("type", "server_label", "server_description", "allowed_tools", "require_approval")
_OPERATOR = "the operator alone names tool servers and their settings (--tool-server); leave it out"
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {  # OpenAI's fields that are not served -> accepted no-op values
    "server_url": (None,),
    "connector_id": (None,),
    "tunnel_id": (None,),
    "authorization": (None,),
    "headers": (None, {}),
    "defer_loading": (None, False),
    "allowed_callers": (None, ["direct"]),
}
_FILTER = ("tool_names", "read_only")

Function = dict[str, Any]  # {"type": "function", "name": ..., "description": ..., "parameters": ...}


@dataclass(frozen=True)
class ServedTools:
    """Tools of one request; tools of tool servers are converted to functions."""

    functions: list[Function] | None  # all of them
    positions: Mapping[str, int] = field(default_factory=dict)  # by name, where a tool stands in the request
    servers: Mapping[str, ToolServer] = field(default_factory=dict)  # by the names of their tools
    tool_lists: Sequence[ToolList] = ()

    @property
    def labels(self) -> dict[str, str]:
        """Server labels by tool name."""
        return {tool.name: each.label for each in self.tool_lists for tool in each.tools}

    @property
    def needs_approval(self) -> frozenset[str]:
        """Names of tools that need approval."""
        return frozenset().union(*(each.needs_approval for each in self.tool_lists))


async def resolve_tools(service: AppState, tools: Sequence[Any] | None) -> ServedTools:
    """Resolves a request's tools. Raises ParameterError with the field, or ApiError 424 if a tool server fails."""
    asked = {place: each for place, each in enumerate(tools or ()) if _is_mcp_tool(each)}
    _check_labels(asked)
    found = dict(
        zip(asked, await asyncio.gather(*(_resolve_tool(service, *each) for each in asked.items())), strict=True)
    )
    functions: list[Function] = []
    places: dict[str, int] = {}
    servers: dict[str, ToolServer] = {}
    for place, each in enumerate(tools or ()):
        if place not in found and leaves_out(each, f"tools[{place}]"):
            continue
        made = [_function(tool) for tool in found[place][1].tools] if place in found else [each]
        functions += made
        places.update((one["name"], place) for one in made if _has_name(one))
        if place in found:
            servers.update((one["name"], found[place][0]) for one in made)
    if found:
        _check_names(functions, places)
    return ServedTools(None if tools is None else functions, places, servers, [listed for _, listed in found.values()])


def choice_of(choice: Any, served: ServedTools) -> Any:
    """Returns `tool_choice` with mcp tools replaced by the functions that the model sees."""
    if not _is_mcp_tool(choice):
        if isinstance(choice, dict) and isinstance(choice.get("tools"), list):
            tools = [tool for each in choice["tools"] for tool in _named(each, served)]
            left = [not leaves_out(tool, f"tool_choice.tools[{place}]") for place, tool in enumerate(tools)]
            return {**choice, "tools": list(itertools.compress(tools, left))}
        return choice
    names = _named(choice, served)
    return names[0] if "name" in choice else {"type": "allowed_tools", "mode": "required", "tools": names}


def _named(given: Any, served: ServedTools) -> list[Any]:
    """Converts {"type": "mcp", "server_label": ..., "name": ...} to functions; without a name, all of the server."""
    if not _is_mcp_tool(given):
        return [given]
    names = [name for name, label in served.labels.items() if label == given.get("server_label")]
    if "name" in given:
        names = [name for name in names if name == given["name"]]
    if not names:
        raise ParameterError("tool_choice", "must name a tool server of the request's tools, and a tool that it has")
    return [{"type": "function", "name": name} for name in names]


def _is_mcp_tool(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") == "mcp"


def _has_name(tool: Any) -> bool:
    return isinstance(tool, dict) and isinstance(tool.get("name"), str)


async def _resolve_tool(service: AppState, place: int, tool: dict[str, Any]) -> tuple[ToolServer, ToolList]:
    where = f"tools[{place}]"
    for name, harmless in _UNSUPPORTED.items():
        if tool.get(name) not in harmless:
            raise ParameterError(f"{where}.{name}", f"is not served: {_OPERATOR}")
    refuse_fields(tool, (*_KEYS, *_UNSUPPORTED), where)
    label = text_of(tool.get("server_label"), f"{where}.server_label")
    server = await service.tool_servers.server_named(label)
    if server is None:
        there = ", ".join(service.tool_servers.names) or "none (--tool-server names some)"
        raise ParameterError(f"{where}.server_label", f"{label[:80]!r} is no tool server here; there are: {there}")
    try:
        tools = await server.tools()
    except ToolServerUnavailable as error:  # its message has the server's address; only log it
        logger.warning("%s", error)
        raise ApiError(
            424, f"the tool server {label!r} does not answer as it should; the server's log says why", param=where,
            code="tool_server_unavailable",
        ) from None  # fmt: skip
    asks = _need_approval(tools, tool.get("require_approval"), f"{where}.require_approval")
    tools = _allowed(tools, tool.get("allowed_tools"), f"{where}.allowed_tools")
    return server, ToolList(label, tools, asks)


def _function(tool: ServedTool) -> Function:
    made = {"type": "function", "name": tool.name, "parameters": dict(tool.schema)}
    return {**made, "description": tool.description} if tool.description else made


def _check_labels(asked: Mapping[int, Mapping[str, Any]]) -> None:
    """Refuses a server that is named twice: its tools would be listed twice."""
    seen: list[Any] = []
    for place, each in asked.items():
        if (label := each.get("server_label")) in seen:
            raise ParameterError(f"tools[{place}].server_label", f"names {str(label)[:80]!r} twice; name it once")
        seen.append(label)


def _check_names(functions: Sequence[Any], places: Mapping[str, int]) -> None:
    names = [each["name"] for each in functions if _has_name(each)]
    twice = next((name for name in places if names.count(name) > 1), None)
    if twice is not None:
        raise ParameterError("tools", f"have the name {twice[:80]!r} twice; choose with allowed_tools of a server")


def _allowed(tools: list[ServedTool], given: Any, where: str) -> list[ServedTool]:
    """Applies allowed_tools: a list of names, or a filter."""
    if given is None:
        return tools
    chosen = _filter(given if isinstance(given, dict) else {"tool_names": given}, where, tools)
    return [each for each in tools if chosen.matches(each)]


@dataclass(frozen=True)
class _Filter:
    """Selects tools by name and by their readOnlyHint."""

    names: tuple[str, ...] | None = None
    read_only: bool | None = None

    def matches(self, tool: ServedTool) -> bool:
        named = self.names is None or tool.name in self.names
        return named and self.read_only in (None, bool(tool.annotations.get("readOnlyHint")))


def _filter(given: Any, where: str, tools: Sequence[ServedTool]) -> _Filter:
    """Reads a filter object. `tools`: all tools of the server."""
    object_of(given, where, _FILTER)
    names, read_only = given.get("tool_names"), given.get("read_only")
    if names is not None:
        names = tuple(text_of(each, where) for each in list_of(names, where, "a list of names that is not empty"))
        _check_known(names, where, tools)
    if not isinstance(read_only, bool | None):
        raise ParameterError(f"{where}.read_only", f"must be true or false, not {kind_of(read_only)}")
    return _Filter(names, read_only)


def _check_known(names: Sequence[str], where: str, tools: Sequence[ServedTool]) -> None:
    known = {each.name: None for each in tools}
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        there = ", ".join(known)
        raise ParameterError(where, f"names {unknown[:80]!r}, which the server does not have; it has: {there[:500]}")


def _need_approval(tools: Sequence[ServedTool], given: Any, where: str) -> frozenset[str]:
    """Returns names of tools that need approval. A missing require_approval means "always", as in OpenAI's API."""
    if not isinstance(given, dict):
        word = "always" if given is None else one_of(given, where, ("always", "never"))
        return frozenset(each.name for each in tools if word == "always")
    object_of(given, where, ("always", "never"))
    never = None if given.get("never") is None else _filter(given["never"], f"{where}.never", tools)
    always = None if given.get("always") is None else _filter(given["always"], f"{where}.always", tools)
    return frozenset(each.name for each in tools if not _runs_without_approval(each, never, always))


def _runs_without_approval(tool: ServedTool, never: _Filter | None, always: _Filter | None) -> bool:
    """True if the tool runs without approval. A tool in both filters needs approval; a tool in neither does if `never`
    is given. An empty `never` filter, for example with a misspelt key, matches no tool."""
    if always is not None and always.matches(tool):
        return False
    return always is not None if never is None else never != _Filter() and never.matches(tool)
