"""Settings of a router besides its HTTP server: the servers behind it, routing, health checks, limits and timeouts."""

import re
from dataclasses import dataclass, fields
from typing import Any

from quintet.clients.server_address import server_key, server_url
from quintet.common.value_parsers import count, list_of, one_of, optional, text
from quintet.config import normalize_fields, option
from quintet.config.schema.fields import choice_field
from quintet.server.config import ServerConfig
from quintet.server.setting_parsers import seconds

PORT = 8001  # a server beside it has 8000
POLICIES = ("prefix", "least_loaded", "round_robin", "random", "power_of_two", "session")
SYNONYMS = {  # words of vLLM's production-stack, of vllm-router and of SGLang's router
    "cache_aware": "prefix", "prefixaware": "prefix", "roundrobin": "round_robin", "consistent_hash": "session",
    "consistent_hashing": "session",
}  # fmt: skip
SERVER_FIELDS = frozenset({
    "host", "port", "uds", "api_key", "admin_api_key", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs",
    "enable_ssl_refresh", "allowed_origins", "allowed_hosts", "max_queued_bytes", "max_body_bytes", "max_upload_bytes",
    "max_header_bytes", "max_connections",
    "drain_timeout", "access_log", "disable_uvicorn_access_log", "disable_access_log_for_endpoints",
    "log_format", "uvicorn_log_level", "log_level",
})  # fmt: skip
EXCLUDED_SERVER_FIELDS = frozenset(each.name for each in fields(ServerConfig)) - SERVER_FIELDS
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")  # RFC 9110, 5.6.2


def _urls(value: Any) -> tuple[str, ...]:
    """A list of words, each with one URL or several with commas between them."""
    words = [value] if isinstance(value, str) else list_of(text)(value)
    return tuple(server_url(each) for word in words for each in word.split(","))


def _header(value: Any) -> str:
    if not isinstance(value, str) or not _TOKEN.fullmatch(value):
        raise ValueError(f"must be the name of a header such as X-Session-Id, not {value!r}")
    return value.lower()


def _policy(default: str, help: str, aliases: tuple[str, ...] = ()) -> Any:
    return option(
        default, one_of(*POLICIES, **SYNONYMS), help, group="routing", aliases=aliases, choices=POLICIES
    )  # fmt: skip


@dataclass(frozen=True)
class RouterConfig:
    """Checked when it is made. Names are those of vLLM's production-stack or of SGLang's router, where there is one."""

    backend: tuple[str, ...] = option(
        (), _urls, "servers that each answer whole requests, such as http://10.0.0.1:8000", group="servers",
        aliases=("worker_urls", "static_backends"), metavar="URL", nargs="+",
    )  # fmt: skip
    prefill: tuple[str, ...] = option(
        (), _urls, "servers that compute prompts alone, for those in --decode", group="servers", metavar="URL",
        nargs="+",
    )  # fmt: skip
    decode: tuple[str, ...] = option(
        (), _urls, "servers that take prompts over from those in --prefill and answer", group="servers", metavar="URL",
        nargs="+",
    )  # fmt: skip
    encode: tuple[str, ...] = option(
        (), _urls, "servers that encode images, videos and sound of chats ahead (ec_role ec_producer), for those that "
        "answer", group="servers", metavar="URL", nargs="+",
    )  # fmt: skip
    backend_api_key: str | None = option(
        None, optional(server_key), "key that servers are shown instead of the caller's", group="servers", repr=False,
        metavar="KEY",
    )  # fmt: skip
    backend_ca_certs: str | None = option(
        None, optional(text), "authorities (PEM) by which https servers are known, instead of the system's",
        group="servers", metavar="FILE",
    )  # fmt: skip

    policy: str = _policy("prefix", "who gets a request", aliases=("routing_logic",))
    prefill_policy: str = _policy("prefix", "who gets a prompt to compute, of --prefill")
    decode_policy: str = _policy("least_loaded", "who gets a request, of --decode")
    balance_abs_threshold: int = option(
        4, count(0), "requests that a server may have more than the one with the fewest, or a quarter more, and still "
        "be chosen for a beginning or a session that it knows", group="routing",
    )  # fmt: skip
    session_header: str = option(
        "x-session-id", _header, "header that names a session; the body's user does where there is none",
        group="routing", aliases=("session_key",), metavar="NAME",
    )  # fmt: skip
    prefill_failure: str = choice_field(
        "recompute", "recompute", "fail", group="routing",
        help="where no server of --prefill computes a prompt: the one of --decode does, or the request fails",
    )  # fmt: skip
    max_retries: int = option(
        2, count(0), "other servers that are asked where one has not begun to answer", group="routing",
        aliases=("retry_max_retries",),
    )  # fmt: skip

    health_check_interval: float = option(
        5.0, seconds(0.05), "seconds between two looks at a server; those that are down are looked at each second",
        group="health", aliases=("health_check_interval_secs",), metavar="SECONDS",
    )  # fmt: skip
    health_check_timeout: float = option(
        5.0, seconds(0.05), "seconds that a server has to say how it is", group="health",
        aliases=("health_check_timeout_secs",), metavar="SECONDS",
    )  # fmt: skip
    health_failure_threshold: int = option(3, count(), "bad looks in a row that take a server out", group="health")
    health_success_threshold: int = option(
        2, count(), "good looks in a row that bring it back; the first one of all is enough", group="health"
    )

    max_concurrent_requests: int = option(2048, count(), "requests that are under way at once", group="limits")
    max_backend_requests: int = option(
        0, count(0), "requests that one server is given at once; 0: any number", group="limits"
    )
    queue_size: int = option(
        1024, count(0), "requests that may wait for a place; further ones get HTTP 429", group="limits"
    )
    queue_timeout: float = option(
        60.0, seconds(), "seconds that one waits for it", group="limits", aliases=("queue_timeout_secs",),
        metavar="SECONDS",
    )  # fmt: skip
    connect_timeout: float = option(
        5.0, seconds(0.01), "seconds until a server takes a connection", group="limits", metavar="SECONDS"
    )
    first_byte_timeout: float = option(
        3600.0, seconds(0.01), "seconds until a server begins to answer; a whole answer begins when it is done",
        group="limits", aliases=("request_timeout_secs",), metavar="SECONDS",
    )  # fmt: skip
    idle_timeout: float = option(
        300.0, seconds(0.01), "seconds without a byte of an answer that has begun", group="limits", metavar="SECONDS"
    )

    def __post_init__(self) -> None:
        normalize_fields(self)
        if not (self.backend or self.prefill or self.decode):
            raise ValueError("there is no server to send requests to; name some with --backend, or with --prefill and "
                             "--decode")  # fmt: skip
        if bool(self.prefill) != bool(self.decode):
            raise ValueError("prefill and decode belong together: one computes prompts, the other answers; give both")
        if self.backend and self.prefill:
            raise ValueError("backend names servers that do all by themselves, and prefill those that do not; run a "
                             "router for each")  # fmt: skip
        every = self.all_urls
        if twice := {each for each in every if every.count(each) > 1}:
            raise ValueError(f"the server {min(twice)} is named twice; name it once")

    @property
    def all_urls(self) -> tuple[str, ...]:
        """Returns the servers of all roles."""
        return (*self.backend, *self.prefill, *self.decode, *self.encode)

    @property
    def disaggregated(self) -> bool:
        """True if prompts and answers are computed by different servers (--prefill, --decode)."""
        return bool(self.prefill)
