"""Paths of a router: whether a path is forwarded, to which servers, and whether it may be sent a second time."""

import re
from enum import Enum
from typing import NamedTuple

from quintet.server.http.errors import ApiError


class ApiDialect(Enum):
    """Format of the error event in a stream that broke off."""

    OPENAI = "openai"
    RESPONSES = "responses"
    ANTHROPIC = "anthropic"


class RouteInfo(NamedTuple):
    """A path that is passed on."""

    is_repeatable: bool = True  # sent twice, it does what it does once
    disaggregated: bool = False  # its prompt may be computed by a server of --prefill
    has_media: bool = False  # its media may be encoded by a server of --encode
    stores_response: bool = False  # what it makes is kept by the server that made it: responses
    continues_response: bool = False  # previous_response_id names one that a server keeps
    dialect: ApiDialect = ApiDialect.OPENAI


RESPONSES = "/v1/responses"
POSTS = {
    "/v1/chat/completions": RouteInfo(disaggregated=True, has_media=True),
    "/v1/completions": RouteInfo(disaggregated=True),
    RESPONSES: RouteInfo(stores_response=True, continues_response=True, dialect=ApiDialect.RESPONSES),
    "/v1/responses/input_tokens": RouteInfo(continues_response=True),
    "/v1/messages": RouteInfo(dialect=ApiDialect.ANTHROPIC),
    "/v1/messages/count_tokens": RouteInfo(dialect=ApiDialect.ANTHROPIC),
    **dict.fromkeys(
        ("/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank",
         "/v2/rerank", "/tokenize", "/detokenize"), RouteInfo(),
    ),
}  # fmt: skip
OTHER = RouteInfo(is_repeatable=False)  # POST below /v1 that is not known here

_STORED = re.compile(r"/v1/responses/([A-Za-z0-9_.-]{1,256})(/cancel|/input_items)?")
_PLAIN = re.compile(r"/v1(/[A-Za-z0-9_-]+)+")
_STATEFUL_REASON = "its server would keep what it makes, and no other would find it; ask that server itself"
_REFUSED = {
    "/v1/audio": "bodies of several parts are not read here; ask the server itself",
    "/v1/images": "bodies of several parts are not read here; ask the server itself",
    "/v1/files": _STATEFUL_REASON,
    "/v1/uploads": _STATEFUL_REASON,
    "/v1/batches": _STATEFUL_REASON,
    "/v1/conversations": _STATEFUL_REASON,
    "/v1/threads": _STATEFUL_REASON,
    "/v1/assistants": _STATEFUL_REASON,
    "/v1/vector_stores": _STATEFUL_REASON,
    "/v1/fine_tuning": _STATEFUL_REASON,
    "/v1/realtime": "a router speaks HTTP alone",
    "/v1/load_lora_adapter": "it changes one server; ask that server itself",
    "/v1/unload_lora_adapter": "it changes one server; ask that server itself",
    "/v1/tool_servers": "each server has its own; ask it itself",
}


def post_route(path: str) -> RouteInfo:
    """ApiError 404 for what is not passed on, with the reason."""
    found = POSTS.get(path)
    if found is not None:
        return found
    check_refused(path)
    if not _PLAIN.fullmatch(path):
        raise not_found_error(path)
    return OTHER


def stored_response_id(method: str, path: str) -> str | None:
    """The id of the response that is asked for; None if it is no such path."""
    found = _STORED.fullmatch(path)
    if found is None or path in POSTS or path == "/v1/responses/compact":
        return None
    what = {"": ("GET", "DELETE"), "/cancel": ("POST",), "/input_items": ("GET",)}[found[2] or ""]
    return found[1] if method in what else None


def check_refused(path: str) -> None:
    """Raises ApiError 404 for a path that has a reason of its own not to be passed on."""
    for stem, why in _REFUSED.items():
        if path == stem or path.startswith(stem + "/"):
            raise ApiError(404, f"{path[:200]} is not passed on by this router: {why}", code="not_passed_on")


def not_found_error(path: str) -> ApiError:
    return ApiError(
        404, f"there is nothing at {path[:200]!r}; a router passes on what asks a model (docs/router.md lists it), and "
        "what concerns one server is asked of that server", code="not_found",
    )  # fmt: skip
