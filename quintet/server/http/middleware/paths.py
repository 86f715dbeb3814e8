"""Normalizes request paths with a trailing slash, and suggests routes for unknown paths."""

import re
from collections.abc import Iterable

from starlette.types import Receive, Scope, Send

from quintet.common.distribution import install_hint
from quintet.config.schema.unsupported import ROUTES
from quintet.server.http.middleware.base import HttpMiddleware, route_path
from quintet.server.http.middleware.slow_clients import REALTIME

_MODELS = "/v1/models/"  # followed by a model name, which may end with a slash
_FLAGS = {
    "/sleep": "--enable-sleep-mode",
    "/wake_up": "--enable-sleep-mode",
    "/is_sleeping": "--enable-sleep-mode",
    "/release_kv_cache_memory": "--enable-sleep-mode",
    "/start_profile": "--profiler-config",
    "/stop_profile": "--profiler-config",
    "/load": "--enable-server-load-tracking",
    "/tokenizer_info": "--enable-tokenizer-info-endpoint",
}  # routes that exist only with a flag
# Chats and completions of LM Studio, text-generation-inference, KoboldCpp, text-generation-webui and Triton.
_OTHER_ENGINES = re.compile(r"/(api/(v[0-9]+|extra)/.+|api/chat/.+|generate|generate_stream|v2/models/.+)")


class TrailingSlash(HttpMiddleware):
    """Removes a trailing slash: clients that join URLs leave one, and a redirect would lose the body.

    Must be outermost, so that the other middlewares check the path that is routed.
    """

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope)
        if len(path) > 1 and path.endswith("/") and (path == _MODELS or not path.startswith(_MODELS)):
            scope["path"] = scope["path"][:-1]  # in place: logs and metrics see the routed path
        await self._app(scope, receive, send)


def path_suggestion(path: str, known: Iterable[str]) -> str:
    """Returns a remedy for an unknown path. `known`: templates of all routes."""
    if path in _FLAGS:
        return f"start the server with {_FLAGS[path]}"
    if path in ROUTES:
        return ROUTES[path]
    if path == REALTIME:
        return f"open a WebSocket there; the server speaks those with {install_hint('audio')}"
    there = set(known)
    single = re.sub("/+", "/", path)
    bare = re.sub("^(/v1)+", "", single)
    for each in (single, "/v1" + bare, bare):
        if each in there:
            return f"did you mean {each!r}?"
    if _OTHER_ENGINES.fullmatch(path):
        return "chats are at /v1/chat/completions (OpenAI), /v1/messages (Anthropic) and /api/chat (Ollama)"
    return "/openapi.json lists what there is"
