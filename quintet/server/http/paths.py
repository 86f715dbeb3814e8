"""Paths as clients write them: with a slash at the end, or beside the place that they mean."""

import re
from collections.abc import Iterable

from starlette.types import Receive, Scope, Send

from quintet.server.http.asgi import Http, route_path

_MODELS = "/v1/models/"  # what follows is a name, and may end with a slash
_FLAGS = {
    "/sleep": "--enable-sleep-mode",
    "/wake_up": "--enable-sleep-mode",
    "/is_sleeping": "--enable-sleep-mode",
    "/start_profile": "--profiler-config",
    "/stop_profile": "--profiler-config",
    "/load": "--enable-server-load-tracking",
    "/tokenizer_info": "--enable-tokenizer-info-endpoint",
}  # routes that are there on request


class Slashes(Http):
    """Takes a slash at the end away: clients join URLs so that one is left over, and a redirect would lose the body.

    To be met before all that looks at the path, so that what is checked is what is routed.
    """

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope)
        if len(path) > 1 and path.endswith("/") and (path == _MODELS or not path.startswith(_MODELS)):
            scope["path"] = scope["path"][:-1]  # in place: those who log and count see what is routed
        await self._app(scope, receive, send)


def where_to_look(path: str, known: Iterable[str]) -> str:
    """What to do about a path at which there is nothing. `known`: templates of all routes."""
    if path in _FLAGS:
        return f"start the server with {_FLAGS[path]}"
    there = set(known)
    single = re.sub("/+", "/", path)
    bare = re.sub("^(/v1)+", "", single)
    for each in (single, "/v1" + bare, bare):
        if each in there:
            return f"did you mean {each!r}?"
    return "/openapi.json lists what there is"
