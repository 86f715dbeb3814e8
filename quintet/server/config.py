"""Settings of a server besides its engine: listen address, access, limits, logging."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from quintet.common.value_parsers import boolean, count, json_object, list_of, one_of, optional, text
from quintet.config import normalize_fields, option
from quintet.server.hosts import allowed_host
from quintet.server.lora_modules import LoRAModule, parse_lora_modules
from quintet.server.setting_parsers import client_cert_mode, effort_map, port_number, seconds, url_paths

PORT = 8000


PROBE_PATHS = ("/live", "/health", "/ready", "/readyz", "/ping", "/load", "/metrics", "/version")
UPLOAD_PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")  # their bodies may have max_upload_bytes
# chats, whose bodies may have as many where the model takes images, video or audio
MEDIA_PATHS = (
    "/v1/chat/completions", "/v1/chat/completions/batch", "/invocations", "/v1/responses",
    "/v1/responses/input_tokens", "/v1/messages", "/v1/messages/count_tokens",
    "/api/chat", "/api/generate", "/tokenize", "/v1/embeddings", "/pooling", "/classify",
)  # fmt: skip
_UVICORN_LEVELS = ("trace", "debug", "info", "warning", "error", "critical")


class BodyBytes(NamedTuple):
    """Largest body of a request to a route."""

    bytes: int
    flag: str  # that sets it


@dataclass(frozen=True)
class ServerConfig:
    """Settings of the server without its engine. Checked on creation; vLLM's names where the meaning is the same."""

    host: str = option("127.0.0.1", text, "address to listen on; 0.0.0.0 lets other machines in", group="server")
    port: int = option(PORT, port_number, "port to listen on; 0: one that is free", group="server")
    headless: bool = option(
        False, boolean, "serve no HTTP: this machine's ranks follow those of machine 0 (--node-rank 1 and up)",
        group="server",
    )  # fmt: skip
    uds: str | None = option(
        None, optional(text), "Unix socket to listen on, instead of a port", group="server", metavar="PATH"
    )
    served_model_name: tuple[str, ...] = option(
        (), list_of(text), "names of the model in the API; if not given its hub id, or the last part of its path",
        group="server", nargs="+", metavar="NAME",
    )  # fmt: skip
    root_path: str = option("", str, "prefix that a proxy strips from the path", group="server", metavar="PATH")
    api_workers: int = option(
        1, count(), "processes that speak HTTP, in front of the one that runs the model", group="server",
        aliases=("api_server_count",),
    )  # fmt: skip
    chat_template: str | None = option(
        None, optional(text), "Jinja file, or text, instead of the model's own chat template", group="server"
    )
    default_chat_template_kwargs: dict[str, Any] | None = option(
        None, optional(json_object), 'variables for the chat template that a request does not set, such as '
        '{"enable_thinking": false}', group="server",
    )  # fmt: skip
    reasoning_effort_map: dict[str, Any] | None = option(
        None, optional(effort_map), "efforts that the chat template gets in place of those of requests, such as "
        '{"xhigh": "max"}', group="server",
    )  # fmt: skip
    anthropic_disabled_thinking_effort: str = option(
        "auto", one_of("auto", "none", "low"), "effort of /v1/messages whose thinking is disabled: none turns it off, "
        "low is for models that always think; auto: none if the chat template can turn it off", group="server",
        choices=("auto", "none", "low"),
    )  # fmt: skip
    tool_strict_level: str = option(
        "auto", one_of("auto", "function", "parameter"), "what of tool calls is enforced: those of strict tools; all "
        "in form and name; their arguments too", group="server",
        choices=("auto", "function", "parameter"),
    )  # fmt: skip
    tool_call_parser: str | None = option(
        None, optional(text), "how the model writes calls (docs/tools.md has the names); found by its chat template if "
        "not given, none: calls are text", group="server", metavar="NAME",
    )  # fmt: skip
    reasoning_parser: str | None = option(
        None, optional(text), "how the model marks its thoughts; found, or none, in the same way", group="server",
        metavar="NAME",
    )  # fmt: skip
    tool_parser_plugin: str | None = option(
        None, optional(text), "Python file that registers tool parsers; it is run in every API process", group="server",
        metavar="FILE",
    )  # fmt: skip
    reasoning_parser_plugin: str | None = option(
        None, optional(text), "the same for reasoning parsers", group="server", metavar="FILE"
    )
    enable_auto_tool_choice: bool = option(
        True, boolean, "let the model decide whether it calls a tool, where a request leaves that open", group="server"
    )
    exclude_tools_when_tool_choice_none: bool = option(
        False, boolean, 'leave tools out of the prompt where tool_choice is "none"', group="server"
    )
    tool_server: tuple[str, ...] = option(
        (), list_of(text), "MCP server whose tools /v1/responses may call: host:port, [NAME=]URL, or a .json file with "
        "mcpServers; commas between several (docs/tools.md)", group="server", metavar="WHERE",
    )  # fmt: skip
    trust_request_chat_template: bool = option(
        False, boolean, "let a request bring a chat template of its own (it runs sandboxed)", group="server"
    )
    return_tokens_as_token_ids: bool = option(
        False, boolean, "name tokens of log-probabilities token_id:ID, where a request leaves that open", group="server"
    )
    enable_force_include_usage: bool = option(
        False, boolean, "end every stream of completions and chats with its usage", group="server"
    )
    enable_per_request_metrics: bool = option(
        False, boolean, "add the times of a request to its answer, as metrics, if it has one output", group="server"
    )
    sse_keep_alive_interval: float = option(
        0.0, seconds(), "seconds without an event after which a stream gets a comment, for proxies; 0: never",
        group="server", metavar="SECONDS",
    )  # fmt: skip
    fingerprint_mode: str = option(
        "full", one_of("full", "hash", "custom", "none"), "system_fingerprint of answers: with the version of weights "
        "that came while the server runs, without it, fingerprint_value, or none", group="server",
        choices=("full", "hash", "custom", "none"),
    )  # fmt: skip
    fingerprint_value: str | None = option(
        None, optional(text), "system_fingerprint with --fingerprint-mode custom", group="server", metavar="TEXT"
    )
    strict_requests: bool = option(
        False, boolean, "refuse requests with fields that are not known, which are otherwise left out and named in a "
        "header", group="server",
    )  # fmt: skip
    enable_sleep_mode: bool = option(
        False,
        boolean,
        "serve /sleep, /wake_up and /is_sleeping, which give the device's memory back and take it again",
        group="server",
    )
    enable_rl_routes: bool = option(
        False, boolean, "serve /pause, /resume, /update_weights and vLLM's other routes for trainers, who then decide "
        "which weights run; for the admin key alone, where there is one (docs/training.md)", group="server",
    )  # fmt: skip
    enable_server_load_tracking: bool = option(
        False, boolean, "serve /load, the number of calls that are under way", group="server"
    )
    enable_tokenizer_info_endpoint: bool = option(
        False, boolean, "serve /tokenizer_info: the tokenizer's settings and the chat template", group="server"
    )
    io_processor_plugin: str | None = option(
        None, optional(text), "IO processor that makes texts of the data of requests to /pooling, and answers of their "
        "numbers: the name that its package gives it, or package.module:Class", group="server", metavar="NAME",
    )  # fmt: skip
    middleware: tuple[str, ...] = option(
        (), list_of(text), "module.path of an ASGI class, or of an async function (request, call_next), that each "
        "request passes through; the last is met first", group="server", metavar="PATH",
    )  # fmt: skip
    endpoint_plugins: tuple[str, ...] = option(
        (), list_of(text), "installed plug-ins whose routes are added, by the names that their packages give them",
        group="server", metavar="NAME",
    )  # fmt: skip
    playground: bool = option(True, boolean, "serve the page at /", group="server")

    lora_modules: tuple[LoRAModule, ...] = option(
        (), parse_lora_modules, "adapters that requests may name as their model: name=path, or JSON with name, path "
        "and base_model_name; needs --enable-lora", group="lora", nargs="+", metavar="NAME=PATH",
    )  # fmt: skip
    allow_runtime_lora: bool = option(
        False, boolean, "serve /v1/load_lora_adapter and /v1/unload_lora_adapter, and ask resolvers for unknown "
        "adapters; who may call them chooses which files are read", group="lora",
    )  # fmt: skip
    lora_cache_dir: str | None = option(
        None, optional(text), "folder of adapters: a request that names one of its folders has it loaded; needs "
        "--allow-runtime-lora", group="lora", metavar="FOLDER",
    )  # fmt: skip
    lora_hub_repos: tuple[str, ...] = option(
        (), list_of(text), "hub id of an adapter that is downloaded when a request names it; needs "
        "--allow-runtime-lora", group="lora", metavar="OWNER/NAME",
    )  # fmt: skip

    api_key: tuple[str, ...] = option(
        (), list_of(text), "key that requests must bring; QUINTET_API_KEY is one more", group="access", repr=False,
    )  # fmt: skip
    admin_api_key: str | None = option(
        None, optional(text), "key that alone may reset the prefix cache and put the engine to sleep; or "
        "QUINTET_ADMIN_API_KEY", group="access", repr=False,
    )  # fmt: skip
    ssl_certfile: str | None = option(None, optional(text), "TLS certificate (PEM)", group="access", metavar="FILE")
    ssl_keyfile: str | None = option(None, optional(text), "its private key (PEM)", group="access", metavar="FILE")
    ssl_ca_certs: str | None = option(
        None, optional(text), "authorities (PEM) whose certificates clients may show; needs --ssl-cert-reqs",
        group="access", metavar="FILE",
    )  # fmt: skip
    ssl_cert_reqs: int = option(
        0, client_cert_mode, "whether clients show a certificate: 0 no, 1 if they have one, 2 always", group="access",
        choices=("0", "1", "2"),
    )  # fmt: skip
    ssl_ciphers: str | None = option(
        None, optional(text), "ciphers of TLS 1.2 in OpenSSL's form; those of 1.3 are fixed", group="access",
        metavar="CIPHERS",
    )  # fmt: skip
    enable_ssl_refresh: bool = option(
        False, boolean, "use the files of TLS as they are now when they change, without a restart", group="access"
    )
    allowed_origins: tuple[str, ...] = option(
        (), list_of(text), "origin whose pages may call the API (CORS); * is all", group="access", metavar="ORIGIN"
    )

    allowed_hosts: tuple[str, ...] = option(
        (), list_of(allowed_host), "name that the server answers to (Host) besides this machine's own, *.example.com "
        "or * for any; if not given, any, but on a loopback address none", group="access", metavar="HOST",
    )  # fmt: skip

    max_queued_requests: int = option(
        1024, count(), "completions that may run or wait; further ones get HTTP 429", group="limits"
    )
    max_queued_tokens: int = option(
        4 * 2**20, count(), "tokens of prompts that may run or wait", group="limits", metavar="TOKENS"
    )
    max_queued_logprobs: int = option(
        4 * 2**20, count(), "log-probabilities of answers that are not streamed, until those are sent",
        group="limits", metavar="NUMBER",
    )  # fmt: skip
    max_queued_characters: int = option(
        16 * 2**20, count(), "characters that may wait to be tokenized", group="limits", metavar="CHARACTERS"
    )
    max_queued_bytes: int = option(
        64 * 2**20, count(), "bytes of the bodies of all requests that are read, run or wait", group="limits",
        metavar="BYTES",
    )  # fmt: skip
    max_body_bytes: int = option(4 * 2**20, count(), "largest request body (4M)", group="limits", metavar="BYTES")
    max_upload_bytes: int = option(
        25 * 2**20, count(), "largest request body of routes that take files, such as /v1/audio/transcriptions, and "
        "of chats where the model takes images, video or audio (25M)", group="limits", metavar="BYTES",
    )  # fmt: skip
    max_audio_seconds: float = option(
        2 * 3600.0, seconds(0.1), "longest audio of one request; decoded it takes 64 kB of temporary file a second",
        group="limits", metavar="SECONDS",
    )  # fmt: skip
    max_header_bytes: int = option(
        64 * 2**10, count(1024), "largest request line and headers together", group="limits", metavar="BYTES"
    )
    max_prompts: int = option(256, count(), "prompts in one request to /v1/completions", group="limits")
    max_inputs: int = option(
        2048, count(), "texts in one request to /v1/embeddings and other routes that answer with numbers",
        group="limits",
    )  # fmt: skip
    max_n: int = option(16, count(), "completions of one prompt (n)", group="limits")
    max_connections: int = option(4096, count(), "open connections; more are refused (503)", group="limits")
    request_timeout: float = option(
        3600.0, seconds(0.001), "seconds that a request may take; header X-Request-Timeout asks for less",
        group="limits", metavar="SECONDS",
    )  # fmt: skip
    tool_timeout: float = option(
        60.0, seconds(0.001), "seconds that one call of a tool server's tool may take", group="limits",
        metavar="SECONDS",
    )  # fmt: skip
    max_tool_result_bytes: int = option(
        256 * 2**10, count(), "bytes of its result (256K); for a longer one the model gets an error with the limit",
        group="limits", metavar="BYTES",
    )  # fmt: skip
    drain_timeout: float = option(
        30.0, seconds(), "seconds that running requests get at SIGTERM", group="limits", metavar="SECONDS"
    )
    engine_timeout: float = option(
        30.0, seconds(1.0), "seconds without a sign of life, from the engine (the server ends) or an API process",
        group="limits", metavar="SECONDS",
    )  # fmt: skip
    step_timeout: float = option(
        300.0, seconds(1.0), "seconds that one step of the engine may take before it counts as hung",
        group="limits", metavar="SECONDS",
    )  # fmt: skip

    access_log: bool = option(True, boolean, "log each request with its tokens and times", group="logging")
    disable_uvicorn_access_log: bool = option(False, boolean, "vLLM's name for --no-access-log", group="logging")
    disable_access_log_for_endpoints: tuple[str, ...] = option(
        PROBE_PATHS,
        url_paths,
        "paths, with commas between them, whose requests are not logged; '' for none",
        group="logging",
        metavar="PATHS",
    )
    log_error_stack: bool = option(
        False, boolean, "log where each error response comes from, with its stack", group="logging"
    )
    log_format: str = option(
        "text", one_of("text", "json"), "lines of time, level and message, or JSON objects", group="logging",
        choices=("text", "json"),
    )  # fmt: skip
    uvicorn_log_level: str = option(
        "warning", one_of(*_UVICORN_LEVELS), "what the HTTP library logs", group="logging", choices=_UVICORN_LEVELS
    )
    log_level: str = option(
        "info", one_of("debug", "info", "warning", "error"), "what the server logs", group="logging",
        choices=("debug", "info", "warning", "error"),
    )  # fmt: skip
    otlp_traces_endpoint: str | None = option(
        None, optional(text), "OpenTelemetry collector (OTLP over HTTP) that gets a span for each request",
        group="logging", metavar="URL",
    )  # fmt: skip

    def __post_init__(self) -> None:
        normalize_fields(self)
        if self.disable_uvicorn_access_log:
            object.__setattr__(self, "access_log", False)
        if self.admin_api_key in self.api_key:
            raise ValueError("admin_api_key is an api_key too; give the administrator a key of its own")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile belong together; give both or neither")
        more = self.ssl_ca_certs or self.ssl_cert_reqs or self.enable_ssl_refresh or self.ssl_ciphers
        if self.ssl_certfile is None and more:
            raise ValueError(
                "ssl_ca_certs, ssl_cert_reqs, ssl_ciphers and enable_ssl_refresh are about TLS; give ssl_certfile and "
                "ssl_keyfile"
            )
        if (self.fingerprint_value is None) == (self.fingerprint_mode == "custom"):
            raise ValueError("fingerprint_value belongs to fingerprint_mode custom; give both or neither")
        if (self.ssl_ca_certs is None) != (self.ssl_cert_reqs == 0):
            raise ValueError(
                "ssl_ca_certs and ssl_cert_reqs belong together: the authorities of clients, and 1 or 2 to ask for "
                "their certificates; give both or neither"
            )
        if (self.lora_cache_dir or self.lora_hub_repos) and not self.allow_runtime_lora:
            raise ValueError(
                "lora_cache_dir and lora_hub_repos have adapters loaded by requests; set allow_runtime_lora, or leave "
                "them out"
            )
        if self.uds and self.ssl_certfile:
            raise ValueError(
                f"uds={self.uds!r} is a Unix socket, which takes no TLS; leave ssl_certfile and ssl_keyfile out"
            )

    @property
    def url(self) -> str:
        """URL at which clients reach the server."""
        if self.uds:
            return f"unix:{self.uds}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.ssl_certfile else 'http'}://{host}:{self.port}"

    def body_limit(self, path: str, media: bool = False) -> BodyBytes:
        """Returns the limit of requests to a path, which has no root_path. `media`: the model takes images, video or
        audio, which chats may have in their bodies."""
        path = path.rstrip("/")
        if path in UPLOAD_PATHS or (media and path in MEDIA_PATHS):
            return BodyBytes(max(self.max_upload_bytes, self.max_body_bytes), "--max-upload-bytes")
        return BodyBytes(self.max_body_bytes, "--max-body-bytes")


def check_adapters(served: ServerConfig, enabled: bool, names: Collection[str]) -> None:
    """Raises ValueError for settings of adapters (LoRA) where these are off, and for an adapter with one of the model's
    own `names`."""
    given = [name for name in ("lora_modules", "allow_runtime_lora") if getattr(served, name)]
    if given and not enabled:
        raise ValueError(f"{given[0]} needs enable_lora=True; set it, or leave {given[0]} out")
    if taken := next((each.name for each in served.lora_modules if each.name in names), None):
        raise ValueError(f"lora_modules has {taken!r}, which is the model's own name; give the adapter another")
