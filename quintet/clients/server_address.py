"""Server that a command uses: its URL or Unix socket, and its API key."""

import argparse
import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from quintet.clients.http_client import ServerAddress
from quintet.common.value_parsers import optional, text
from quintet.config import EngineConfig, option, read_environment
from quintet.config.schema import flags
from quintet.config.schema.typed_flags import as_typed

DEFAULT_URL = "http://127.0.0.1:8000"


def server_url(value: Any) -> str:
    """An http:// or https:// address without its last "/v1", which every path brings along."""
    url = text(value).strip()
    if not (url.isascii() and url.isprintable()) or " " in url:
        raise ValueError(f"must be an address in plain ASCII such as {DEFAULT_URL}, not {value!r}")
    if "://" not in url:
        raise ValueError(f"must begin with http:// or https://, not {value!r}; did you mean 'http://{url}'?")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"must be an address such as {DEFAULT_URL}, not {value!r}")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError("must hold no user, query or fragment; a key goes to --api-key")
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError(f"must have a port from 1 to 65535, not {value!r}")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def server_key(value: Any) -> str:
    """It becomes a header: a line break in it would be another one."""
    key = text(value).strip()
    if not (key.isascii() and key.isprintable()):
        raise ValueError("must be one line of printable ASCII")
    return key


@dataclass(frozen=True)
class ServerTarget:
    """A server, from flags and the environment."""

    url: str | None = option(
        None, optional(server_url), f"ask the OpenAI-compatible server at this address, such as {DEFAULT_URL}",
        group="server", metavar="URL", aliases=("base_url",),
    )  # fmt: skip
    uds: str | None = option(None, optional(text), "ask the server on this Unix socket", group="server", metavar="PATH")
    api_key: str | None = option(
        None, optional(server_key), "the key to show to it; OPENAI_API_KEY if not given", group="server", repr=False,
        metavar="KEY",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.url and self.uds and self.url.startswith("https:"):
            raise ValueError("--uds speaks http, and --url says https; leave one of them out")

    @property
    def is_given(self) -> bool:
        """True if the user named a server."""
        return bool(self.url or self.uds)

    @property
    def display_name(self) -> str:
        """The server's name in messages."""
        return self.uds or self.url or DEFAULT_URL

    @property
    def address(self) -> ServerAddress:
        """Address to connect to."""
        parts = urlsplit(self.url or DEFAULT_URL)
        tls = parts.scheme == "https"
        return ServerAddress(parts.hostname or "", parts.port or (443 if tls else 80), tls, self.uds, parts.path)

    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--url, --uds and --api-key."""
    flags.add_arguments(parser, ServerTarget)


def target(arguments: argparse.Namespace, host: str | None = None, port: int | None = None) -> ServerTarget:
    """Returns the server that the flags name; its key is from the environment if no flag has it.

    `host` and `port` are those of vLLM's flags. ValueError if they are given beside a URL.
    """
    wanted = flags.from_arguments(arguments, ServerTarget)
    if host is not None or port is not None:
        if wanted.is_given:
            raise ValueError(f"--host and --port, and {wanted.display_name!r}; give one address")
        name = host or "127.0.0.1"
        name = f"[{name}]" if ":" in name and name[0] != "[" else name
        wanted = dataclasses.replace(wanted, url=server_url(f"http://{name}:{port or 8000}"))
    key = wanted.api_key or read_environment().openai_api_key
    return dataclasses.replace(wanted, api_key=key and server_key(key))


def refuse_engine_flags(arguments: argparse.Namespace, but: Collection[str] = ()) -> None:
    """A server has its own engine: what sets one up here would be without effect."""
    if (model := getattr(arguments, "MODEL", None)) is not None:
        raise ValueError(f"{model!r}: the server that --url or --uds names has its own model; leave it out")
    useless = [name for name in flags.given_settings(arguments, EngineConfig) if name not in but]
    if useless:
        typed = {name: as_typed(arguments.typed, f"EngineConfig.{name}", name) for name in useless}
        names = " and ".join(flag if flag[0] == "-" else "--" + flag.replace("_", "-") for flag in typed.values())
        raise ValueError(
            f"{names}: an engine flag has no effect on the server that --url or --uds names; "
            "leave it out here and give it to the server"
        )
