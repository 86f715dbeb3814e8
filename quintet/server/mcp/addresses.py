"""Parses `--tool-server`: host:port, URLs, or a .json file that may hold commands and secrets."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quintet.common.suggestions import refuse_unknown

_FORMS = "host:port (MCP over SSE, as vLLM's), an http or https URL such as http://host:port/mcp, or a .json file"
_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64})=(.+)")
_HOST = re.compile(r"[^\s/:@=?#]+:\d{1,5}|\[[0-9a-fA-F:]+\]:\d{1,5}")
_KEYS = ("type", "url", "headers", "command", "args", "env", "cwd")
_URL_KEYS, _COMMAND_KEYS = ("url", "headers"), ("command", "args", "env", "cwd")
_TYPES = {"http": False, "streamable-http": False, "streamable_http": False, "sse": True}  # whether it is SSE
_MAX_BYTES = 2**20  # most bytes of a file; normal ones have a page


@dataclass(frozen=True)
class McpAddress:
    """Address of a tool server: a URL, or a command that speaks over its standard streams."""

    name: str | None  # name in requests; None: the server's own name
    url: str = ""
    sse: bool = False  # the older transport, which vLLM uses
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    command: tuple[str, ...] = ()  # program and arguments; not run by a shell
    env: Mapping[str, str] = field(default_factory=dict, repr=False)  # in addition to PATH, HOME and similar
    cwd: str | None = None

    def __str__(self) -> str:
        """Returns text for messages, without query and arguments, which may hold secrets."""
        where = self.command[0] if self.command else self._shown
        return where if self.name is None else f"{self.name} ({where})"

    @property
    def _shown(self) -> str:
        return urlsplit(self.url)._replace(query="", fragment="").geturl()

    def without_query(self, message: str) -> str:
        """Returns an error text with the query removed from the URL."""
        return message.replace(self.url, self._shown) if self.url else message


def read_addresses(given: Iterable[str]) -> tuple[McpAddress, ...]:
    """Parses the flag, comma-separated or repeated. Raises ValueError that begins with tool_server."""
    parts = [part.strip() for text in given for part in text.split(",")]
    found = [address for part in parts for address in _read(part)]
    names = [each.name for each in found if each.name is not None]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"tool_server has two servers of the name {twice!r}; give each its own")
    return tuple(found)


def _read(part: str) -> list[McpAddress]:
    if part == "demo":
        raise ValueError(
            "tool_server demo is not there: vLLM's own browser and Python tools are no part of this server; name an "
            f"MCP server, as {_FORMS}"
        )
    named = _NAMED.fullmatch(part)
    name, where = named.groups() if named else (None, part)
    if where.startswith(("http://", "https://")):
        return [_at_url(name, where, urlsplit(where).path.rstrip("/").endswith("/sse"))]
    if where.endswith(".json") and name is None:
        return _read_file(where)
    if _HOST.fullmatch(where):
        return [_at_url(name, f"http://{where}/sse", True)]
    raise ValueError(f"tool_server must be {_FORMS}, with NAME= before the first two if you like, not {part[:200]!r}")


def _at_url(name: str | None, url: str, sse: bool, headers: Mapping[str, str] | None = None) -> McpAddress:
    if not _has_host(url):
        raise ValueError(f"tool_server has a URL that leads nowhere: {url[:200]!r}; write http://host:port/mcp")
    if "@" in urlsplit(url).netloc:
        raise ValueError("tool_server has a password in a URL, which process lists show; put headers into a .json file")
    return McpAddress(name, url, sse, headers or {})


def _has_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port
        return False


# ----------------------------------------------------------------------------------------------------------- files


def _read_file(path: str) -> list[McpAddress]:
    """Reads the common MCP file: {"mcpServers": {NAME: {"command": ..., "args": [...]} or {"url": ...}}}."""
    try:
        text = Path(path).read_bytes()
        if len(text) > _MAX_BYTES:
            raise ValueError(f"it has {len(text)} bytes, and {_MAX_BYTES} is the most")
        found = json.loads(text)
        servers = found.get("mcpServers") if isinstance(found, dict) else None
        if not isinstance(servers, dict) or not servers:
            raise ValueError('it must be {"mcpServers": {"NAME": {...}}}')
        return [_entry(name, entry) for name, entry in servers.items()]
    except (ValueError, OSError) as error:
        raise ValueError(f"tool_server {path}: the file cannot be used: {' '.join(str(error).split())}") from None


def _entry(name: str, entry: Any) -> McpAddress:
    if not name.strip() or not isinstance(entry, dict):
        raise ValueError(f"{name!r} must be a name, and an object with url or command")
    refuse_unknown(f"key of {name}", entry, _KEYS)
    if ("url" in entry) == ("command" in entry):
        raise ValueError(f"{name} must have either url or command")
    wrong = [key for key in entry if key in (_COMMAND_KEYS if "url" in entry else _URL_KEYS)]
    if wrong:
        raise ValueError(f"{name}: {wrong[0]} means nothing beside {'url' if 'url' in entry else 'command'}")
    return _url_entry(name, entry) if "url" in entry else _command_entry(name, entry)


def _url_entry(name: str, entry: Mapping[str, Any]) -> McpAddress:
    url, kind = entry["url"], entry.get("type")
    if not isinstance(url, str):
        raise ValueError(f"{name}.url must be text")
    if kind is not None and kind not in _TYPES:
        raise ValueError(f"{name}.type must be one of {', '.join(_TYPES)} beside url, not {kind!r}")
    sse = urlsplit(url).path.rstrip("/").endswith("/sse") if kind is None else _TYPES[kind]
    return _at_url(name, url, sse, _texts(name, entry, "headers"))


def _command_entry(name: str, entry: Mapping[str, Any]) -> McpAddress:
    command, args, cwd = entry["command"], entry.get("args", []), entry.get("cwd")
    if entry.get("type", "stdio") != "stdio":
        raise ValueError(f"{name}.type must be stdio beside command")
    if not isinstance(command, str) or not command:
        raise ValueError(f"{name}.command must be text, one program; its arguments are args")
    if not isinstance(args, list) or not all(isinstance(each, str) for each in args):
        raise ValueError(f"{name}.args must be a list of texts")
    if cwd is not None and not isinstance(cwd, str):
        raise ValueError(f"{name}.cwd must be text")
    return McpAddress(name, command=(command, *args), env=_texts(name, entry, "env"), cwd=cwd)


def _texts(name: str, entry: Mapping[str, Any], key: str) -> dict[str, str]:
    given = entry.get(key, {})
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise ValueError(f"{name}.{key} must be an object of texts")
    return given
