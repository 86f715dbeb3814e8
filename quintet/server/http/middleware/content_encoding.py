"""Decompresses request bodies (Content-Encoding, RFC 9110 8.4) in pieces, on demand."""

import asyncio
import zlib

from starlette.datastructures import Headers
from starlette.types import Message, Receive

from quintet.server.http.errors import ApiError

CHUNK_BYTES = 2**16  # most bytes that are decompressed at once, for any compression ratio
_WINDOW = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # zlib's wbits; deflate means the zlib format, not raw deflate
_SUPPORTED = "gzip, deflate"
_SHOWN = 80  # characters of a header in an error message


def coding_of(headers: Headers) -> str | None:
    """Returns the Content-Encoding; None if not compressed. Raises ApiError 415 for an unsupported one."""
    names = ",".join(headers.getlist("content-encoding")).split(",")
    codings = [name for each in names if (name := each.strip().lower()) not in ("", "identity")]
    if not codings:
        return None
    if len(codings) > 1 or codings[0] not in _WINDOW:
        raise ApiError(
            415, f"the body is packed with {', '.join(codings)[:_SHOWN]!r}; pack it once, with gzip or deflate, or "
            "send it as it is", code="unsupported_encoding", headers={"Accept-Encoding": _SUPPORTED},
        )  # fmt: skip
    return codings[0]


class DecompressedReceive:
    """Replacement for `receive`. Raises ApiError 400 for damaged, truncated or trailing data."""

    def __init__(self, receive: Receive, coding: str) -> None:
        self._receive, self._coding = receive, coding
        self._pack = zlib.decompressobj(_WINDOW[coding])
        self._rest = b""  # received, not decompressed yet
        self._full = False  # the last piece was full: more output may come without new input
        self._more = True  # more input is expected
        self._over = False

    async def __call__(self) -> Message:
        """Returns the next decompressed piece; after the end or a disconnect, the received message."""
        while not self._over:
            if self._rest or self._full:
                await asyncio.sleep(0)  # yields to other requests: a small body may decompress to much
            elif self._more:
                message = await self._receive()
                if message["type"] != "http.request":
                    return message
                self._rest, self._more = message.get("body", b""), message.get("more_body", False)
            piece = self._unpack()
            self._over = not (self._rest or self._full or self._more)
            if self._over and not self._pack.eof:
                raise self._damaged("ends early")
            if piece or self._over:
                return {"type": "http.request", "body": piece, "more_body": not self._over}
        return await self._receive()

    def _unpack(self) -> bytes:
        try:
            piece = self._pack.decompress(self._rest, CHUNK_BYTES)
        except zlib.error as error:
            raise self._damaged(f"cannot be unpacked ({str(error)[:_SHOWN]})") from None
        if self._pack.unused_data:  # refuses a second gzip member, too: thousands of empty ones would waste time
            raise self._damaged("goes on after the end of what is packed")
        self._rest, self._full = self._pack.unconsumed_tail, len(piece) == CHUNK_BYTES
        return piece

    def _damaged(self, what: str) -> ApiError:
        return ApiError(400, f"the body says that it is {self._coding}, and {what}", code="invalid_encoding")
