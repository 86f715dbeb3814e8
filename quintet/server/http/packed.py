"""Bodies that come packed (Content-Encoding, RFC 9110 8.4): unpacked in pieces, as they are asked for."""

import asyncio
import zlib

from starlette.datastructures import Headers
from starlette.types import Message, Receive

from quintet.server.http.errors import ApiError

PIECE = 2**16  # bytes that are unpacked at once, however much a packed byte stands for
_WINDOW = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # zlib's wbits; deflate is zlib's format, not what is within it
_TAKEN = "gzip, deflate"
_SHOWN = 80  # characters of a header that go into a message


def coding_of(headers: Headers) -> str | None:
    """How the body is packed; None: it is not. Raises ApiError 415 for what is not taken here."""
    names = ",".join(headers.getlist("content-encoding")).split(",")
    codings = [name for each in names if (name := each.strip().lower()) not in ("", "identity")]
    if not codings:
        return None
    if len(codings) > 1 or codings[0] not in _WINDOW:
        raise ApiError(
            415, f"the body is packed with {', '.join(codings)[:_SHOWN]!r}; pack it once, with gzip or deflate, or "
            "send it as it is", code="unsupported_encoding", headers={"Accept-Encoding": _TAKEN},
        )  # fmt: skip
    return codings[0]


class Unpacked:
    """Takes the place of `receive`. Raises ApiError 400 for what is damaged, ends early, or goes on after its end."""

    def __init__(self, receive: Receive, coding: str) -> None:
        self._receive, self._coding = receive, coding
        self._pack = zlib.decompressobj(_WINDOW[coding])
        self._rest = b""  # came, and is not unpacked yet
        self._full = False  # the last piece was a whole one: another may be there without anything that comes
        self._more = True  # is to come
        self._over = False

    async def __call__(self) -> Message:
        """The next piece of the body; after its end, and where the client leaves, what comes."""
        while not self._over:
            if self._rest or self._full:
                await asyncio.sleep(0)  # others' turn: a small body may stand for much
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
            piece = self._pack.decompress(self._rest, PIECE)
        except zlib.error as error:
            raise self._damaged(f"cannot be unpacked ({str(error)[:_SHOWN]})") from None
        if self._pack.unused_data:  # a second member, too: thousands of empty ones would cost time for nothing
            raise self._damaged("goes on after the end of what is packed")
        self._rest, self._full = self._pack.unconsumed_tail, len(piece) == PIECE
        return piece

    def _damaged(self, what: str) -> ApiError:
        return ApiError(400, f"the body says that it is {self._coding}, and {what}", code="invalid_encoding")
