"""Parts of a request that a router reads: the model, streaming, the user, and the beginning of the prompt."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from quintet.clients.http_connection import Header
from quintet.router.routes import RouteInfo
from quintet.server.http.errors import ApiError

CHUNK = 256  # bytes of a beginning that are one number of its chain: some sixty tokens
# Where chunks end. Behind the first 4 KiB they have 1 KiB: so little more or less of a long beginning costs little.
ENDS = (*range(CHUNK, 2**12 + 1, CHUNK), *range(2**12 + 2**10, 2**17 + 1, 2**10))
_NONE = Raw(b"")


class RequestFields(msgspec.Struct):
    """The fields of a body that matter here. Those that are Raw are not looked into."""

    model: str | None = None
    stream: bool | None = None
    user: str | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    kv_transfer_params: Raw | UnsetType = UNSET
    extra_args: Raw = _NONE
    vllm_xargs: Raw = _NONE
    n: int | None = None
    tools: Raw = _NONE
    system: Raw = _NONE
    instructions: Raw = _NONE
    messages: Raw = _NONE
    prompt: Raw = _NONE
    input: Raw = _NONE
    documents: Raw = _NONE
    query: Raw = _NONE


_DECODER = msgspec.json.Decoder(RequestFields)
_ENTRIES = msgspec.json.Decoder(dict[str, Raw])


@dataclass
class RequestInfo:
    """A request as it is sent to a server."""

    method: bytes
    target: bytes  # path and query
    headers: list[Header]  # those that are passed on
    body: bytes
    route: RouteInfo
    request_id: str
    fields: RequestFields = field(default_factory=RequestFields)
    session: str = ""
    owner: str = ""  # a name of the caller's key
    arrived: float = 0.0  # time.perf_counter() of its last byte; 0: it has waited, and nothing is measured by it

    @property
    def is_repeatable(self) -> bool:
        """True if two servers may do it without harm: a response that is stored would be stored twice."""
        if self.route.stores_response:
            return self.fields.store is False and not self.fields.background
        return self.route.is_repeatable

    def prefix_hashes(self) -> list[int]:
        """Numbers for the beginning of what the model will read, chunk by chunk; by the text as it was sent."""
        found, last = [], hash((self.fields.model, bytes(self.fields.tools)))
        for chunk in _chunks(self.fields):
            last = hash((last, chunk))
            found.append(last)
        return found


def _chunks(read: RequestFields) -> Iterator[bytes]:
    """Yields chunks of the prompt in the order in which templates write; tools are in the chain's root."""
    parts = (read.system, read.instructions, read.messages, read.prompt, read.query, read.input, read.documents)
    chunks = [bytes(each) for each in parts if each]
    text = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    start = 0
    for end in ENDS:
        if end > len(text):
            return
        yield text[start:end]
        start = end


def transfer_field(read: RequestFields) -> str | None:
    """Returns the field that has kv_transfer_params; None if none has."""
    if read.kv_transfer_params not in (UNSET, Raw(b"null")):
        return "kv_transfer_params"
    for name, content in (("extra_args", read.extra_args), ("vllm_xargs", read.vllm_xargs)):
        with contextlib.suppress(msgspec.MsgspecError, RecursionError):  # no object: a server refuses it
            if content and "kv_transfer_params" in _ENTRIES.decode(content):
                return name
    return None


def read_body(body: bytes) -> RequestFields:
    """ApiError 400 for what is no JSON object, or has a field of the wrong type that a router reads."""
    try:
        return _DECODER.decode(body)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"the body cannot be used: {error}", code="invalid_value") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body nests too deep", code="invalid_json") from None


# ------------------------------------------------------------------------------------------------ disaggregated prefill

_REMOTE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}  # vLLM's protocol between a proxy and its connectors (NixlConnector)
_NOT_FOR_PREFILL = ("stream_options", "min_tokens", "min_completion_tokens")


def prefill_body(body: bytes) -> bytes:
    """The request for the server that computes its prompt: one token, whole, and the pages kept for another."""
    found: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Raw])
    for name in _NOT_FOR_PREFILL:
        found.pop(name, None)
    found.update(kv_transfer_params=_REMOTE, stream=False, max_tokens=1)
    if "max_completion_tokens" in found:
        found["max_completion_tokens"] = 1
    return msgspec.json.encode(found)


def with_pages(body: bytes, params: bytes) -> bytes:
    """The request for the server that answers: as it came, and where the prompt's pages are."""
    start = body.rstrip()[:-1].rstrip()
    comma = b"" if start.endswith(b"{") else b","
    return b"".join((start, comma, b'"kv_transfer_params":', params, b"}"))
