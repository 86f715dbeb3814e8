"""What --tool-server may say."""

import json
from pathlib import Path

import pytest

from quintet.server.mcp.addresses import McpAddress, read_addresses


def test_a_bare_host_and_port_is_meant_as_vllm_means_it() -> None:
    assert read_addresses(["localhost:8888,[::1]:9"]) == (
        McpAddress(None, "http://localhost:8888/sse", True),
        McpAddress(None, "http://[::1]:9/sse", True),
    )


def test_a_url_says_where_and_may_have_a_name() -> None:
    assert read_addresses(["sums=http://h:1/mcp", "https://h/a/sse"]) == (
        McpAddress("sums", "http://h:1/mcp"),
        McpAddress(None, "https://h/a/sse", True),
    )


def test_commands_and_headers_stand_in_a_file(tmp_path: Path) -> None:
    servers = {
        "files": {"command": "python", "args": ["-m", "files; rm -rf /"], "env": {"KEY": "a"}},
        "far": {"type": "http", "url": "https://h/mcp", "headers": {"Authorization": "Bearer secret"}},
    }
    (tmp_path / "s.json").write_text(json.dumps({"mcpServers": servers}))
    files, far = read_addresses([str(tmp_path / "s.json")])
    assert (files.name, files.command, files.env) == ("files", ("python", "-m", "files; rm -rf /"), {"KEY": "a"})
    assert (far.url, far.sse, far.headers) == ("https://h/mcp", False, {"Authorization": "Bearer secret"})
    assert "secret" not in f"{far} {far!r}"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("demo", "demo is not there"),
        ("nonsense", "must be host:port"),
        ("", "must be host:port"),
        ("python server.py", "must be host:port"),
        ("ftp://h/x", "must be host:port"),
        ("http://h:99999/mcp", "leads nowhere"),
        ("http://u:p@h/mcp", "put headers into a .json file"),
        ("a=h:1,a=h:2", "two servers of the name 'a'"),
        ("/nowhere/s.json", "the file cannot be used"),
    ],
)
def test_what_it_may_not_say(given: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        read_addresses([given])
    assert str(refused.value).startswith("tool_server ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"command": "a", "url": "http://h/mcp"}, "must have either url or command"),
        ({}, "must have either url or command"),
        ({"command": "a", "arg": []}, "unknown key of s 'arg'; did you mean 'args'"),
        ({"command": ["a", "b"]}, "s.command must be text"),
        ({"command": "a", "args": "b"}, "s.args must be a list of texts"),
        ({"command": "a", "headers": {}}, "headers means nothing beside command"),
        ({"url": "http://h/mcp", "headers": {"a": 1}}, "s.headers must be an object of texts"),
        ({"url": "http://h/mcp", "type": "carrier pigeon"}, "s.type must be one of"),
        ({"url": 3}, "s.url must be text"),
        ([], "must be a name, and an object"),
    ],
)
def test_what_a_file_may_not_say(tmp_path: Path, entry: object, says: str) -> None:
    (tmp_path / "s.json").write_text(json.dumps({"mcpServers": {"s": entry}}))
    with pytest.raises(ValueError, match=says):
        read_addresses([str(tmp_path / "s.json")])
