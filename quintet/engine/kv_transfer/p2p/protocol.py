"""Protocol of a connection that carries pages between two engines: messages and their limits.

A message is msgpack in one frame of distributed/connection.py, which authenticates both ends and all frames. Nothing is
encrypted: anyone who reads the network traffic reads pages.
"""

import contextlib
import os
import select
import socket
import time
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from quintet.distributed.connection import (
    AuthenticationFailed,
    Connection,
    authenticate_client,
    authenticate_server,
    wait_ready,
)

PROTOCOL = b"quintet pages 4"  # its number is raised with any change of the messages
KEY_HELP = "; give all engines the same QUINTET_KV_TRANSFER_KEY"
MAX_CONTROL_FRAME = 2**17  # bytes of a message without a page, and of what surrounds a page
MAX_KEYS = 1024  # of one PageRequest
MAX_PARTS = 4096  # byte ranges of a row, in one PageRequest
MAX_RANKS = 256  # processes of one engine

Key = Annotated[bytes, Meta(min_length=1, max_length=32)]
Text = Annotated[str, Meta(max_length=256)]
UInt31 = Annotated[int, Meta(ge=0, le=2**31 - 1)]
T = TypeVar("T")


class ProtocolError(Exception):
    """The connection failed: the other side is gone, silent, or breaks the protocol; the message says which."""


class PagePart(Struct, array_like=True, frozen=True):
    """Part of every page that one process has: that of its ranks, which share each layer's heads, of its stage's
    layers."""

    first: UInt31 = 0  # of its ranks
    count: UInt31 = 1
    size: UInt31 = 1  # ranks of its stage
    layers: tuple[UInt31, UInt31] = (0, 0)  # the first and the one after the last; (0, 0): all


class PageFormat(Struct, array_like=True, frozen=True):
    """All that a page's content depends on, except its tokens, and its layout in a producer's row."""

    checkpoint: Text
    dtype: Text  # of the cache
    page_size: UInt31
    shapes: Annotated[tuple[Annotated[tuple[UInt31, ...], Meta(max_length=8)], ...], Meta(max_length=4096)]
    part: PagePart = PagePart()  # the producer's; the consumer sends the part of the producer that it asks

    def mismatch(self, given: "PageFormat") -> str:
        """Returns why an engine with these facts cannot use pages with the facts `given`; empty: it can."""
        if self.page_size != given.page_size:
            return f"pages of {given.page_size} tokens are given, and of {self.page_size} wanted"
        if self.shapes != given.shapes:
            theirs, ours = _describe_shapes(given.shapes), _describe_shapes(self.shapes)
            return f"pages of another shape are given ({theirs}) than wanted ({ours})"
        if self.dtype != given.dtype:
            return f"pages in {given.dtype} are given, and in {self.dtype} wanted"
        if self.part != given.part:
            theirs, ours = _describe_part(given.part), _describe_part(self.part)
            return f"another part of pages is given ({theirs}) than wanted ({ours})"
        return "" if self.checkpoint == given.checkpoint else "one runs another model, or other weights of it"


def _describe_shapes(shapes: tuple[tuple[int, ...], ...]) -> str:
    return f"{len(shapes)} of {'x'.join(map(str, shapes[0]))}" if shapes else "nothing"


def _describe_part(part: PagePart) -> str:
    ranks = f"{part.first}-{part.first + part.count - 1}" if part.count > 1 else f"{part.first}"
    return f"rank {ranks} of {part.size}" + (
        f", layers {part.layers[0]}-{part.layers[1] - 1}" * (part.layers != (0, 0))
    )


class ConsumerHello(Struct, tag=True, array_like=True):
    """First message of the consumer."""

    page_format: PageFormat
    transport: Text = ""  # transport of pages; empty: frames


class ConsumerAccepted(Struct, tag=True, array_like=True):
    """Answer of the producer: pages may be requested."""


class ConsumerRefused(Struct, tag=True, array_like=True):
    """Refusal of a connection, which then ends."""

    reason: Annotated[str, Meta(max_length=1024)]


class PageRequest(Struct, tag=True, array_like=True):
    """Request for these pages of a loan, each of which is answered once, in any order."""

    lease: Text
    keys: Annotated[list[Key], Meta(min_length=1, max_length=MAX_KEYS)]
    parts: Annotated[list[tuple[UInt31, UInt31]], Meta(max_length=MAX_PARTS)] = []  # first byte, bytes; none: all


class Page(Struct, tag=True, array_like=True):
    """One page of the last PageRequest."""

    index: UInt31
    row: bytes


class PageOffer(Struct, tag=True, array_like=True):
    """One page of the last PageRequest: a row of the producer's shared memory, until the consumer has copied it."""

    index: UInt31
    row: UInt31


class PagesCopied(Struct, tag=True, array_like=True):
    """Report that the consumer has copied all shared rows of the last PageRequest."""


class RowsUnchanged(Struct, tag=True, array_like=True):
    """Confirmation that the rows were unchanged until now: the consumer has copied the right pages."""


class RegionAddress(Struct, tag=True, array_like=True):
    """Address of the producer's rows, for a transfer library that reads them."""

    metadata: Annotated[bytes, Meta(max_length=2**16)]  # connection data of the producer, for the library
    address: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    rows: UInt31


class MissingPages(Struct, tag=True, array_like=True):
    """Pages that are not there."""

    indices: Annotated[list[UInt31], Meta(max_length=MAX_KEYS)]
    reason: Annotated[str, Meta(max_length=1024)]


class LeaseDone(Struct, tag=True, array_like=True):
    """Report of a reader that it will not ask for this loan again."""

    lease: Text
    readers: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1  # number of readers
    reader: Annotated[int, Meta(ge=0, lt=MAX_RANKS)] = 0


_encode = msgspec.msgpack.Encoder().encode
_CONSUMER_HELLO = msgspec.msgpack.Decoder(ConsumerHello)
_REPLY = msgspec.msgpack.Decoder(ConsumerAccepted | ConsumerRefused)
REQUEST: "msgspec.msgpack.Decoder[PageRequest | LeaseDone]" = msgspec.msgpack.Decoder(PageRequest | LeaseDone)
RESPONSE: "msgspec.msgpack.Decoder[Page | PageOffer | MissingPages]" = msgspec.msgpack.Decoder(
    Page | PageOffer | MissingPages
)
COPIED, UNCHANGED = msgspec.msgpack.Decoder(PagesCopied), msgspec.msgpack.Decoder(RowsUnchanged)
REGION = msgspec.msgpack.Decoder(RegionAddress)


class PeerChannel:
    """One end of a connection. Every call ends within `patience` seconds, with success or ProtocolError."""

    def __init__(self, connection: socket.socket, patience: float, longest: int) -> None:
        """longest: bytes of a page's row."""
        self._socket, self._patience, self._longest = connection, patience, MAX_CONTROL_FRAME + longest
        self._connection: Connection | None = None  # once both ends have authenticated
        self.authenticated = False  # both ends have authenticated, and their pages fit

    def with_timeout(self, patience: float) -> "PeerChannel":
        """Returns the same channel, with other patience."""
        self._patience = patience
        return self

    def send(self, message: Any) -> None:
        with _as_protocol_error():
            self._authenticated.send(0, _encode(message), time.monotonic() + self._patience)

    def receive(self, decoder: "msgspec.msgpack.Decoder[T]", patience: float | None = None) -> T:
        until = time.monotonic() + (self._patience if patience is None else patience)
        with _as_protocol_error():
            content = self._authenticated.receive(until, self._longest).payload
        try:
            return decoder.decode(content)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"a frame that is none of the protocol: {error}") from None

    @property
    def _authenticated(self) -> Connection:
        assert self._connection is not None, "greet or claim comes first"
        return self._connection

    def check_open(self) -> None:
        """Raises ProtocolError where the other side has closed the connection; reads nothing."""
        if self._authenticated.is_closed:
            raise ProtocolError("the connection was closed")

    def accept_consumer(self, key: bytes, facts: PageFormat, way: str = "") -> None:
        """Runs the producer's half of the handshake. way: transport of pages, if not frames: the same on both sides."""
        with _as_protocol_error(KEY_HELP):
            until = time.monotonic() + self._patience
            self._connection = authenticate_client(self._socket, key, PROTOCOL, until)
        claim = self.receive(_CONSUMER_HELLO)
        why = claim.page_format.mismatch(facts)
        if claim.transport != way:
            why = f"pages are given by {way or 'TCP'}, and wanted by {claim.transport or 'TCP'}"
        self.send(ConsumerRefused(why) if why else ConsumerAccepted())
        if why:
            raise ProtocolError(why)
        self.authenticated = True

    def connect_producer(self, key: bytes, facts: PageFormat, way: str = "") -> None:
        """Runs the consumer's half of the handshake."""
        with _as_protocol_error(KEY_HELP):
            until = time.monotonic() + self._patience
            self._connection = authenticate_server(self._socket, key, PROTOCOL, until)
        self.send(ConsumerHello(facts, way))
        reply = self.receive(_REPLY)
        if isinstance(reply, ConsumerRefused):
            raise ProtocolError(reply.reason)
        self.authenticated = True

    def send_descriptor(self, descriptor: int) -> None:
        """Sends a file descriptor, which lets the other process read the file; only after authentication."""
        with _as_protocol_error():
            socket.send_fds(self._socket, [b"m"], [descriptor])

    def receive_descriptor(self) -> int:
        """Receives the descriptor of a file that the other process lets this one read."""
        wait_ready(self._socket.fileno(), select.POLLIN, self._patience)
        try:
            _, (descriptor, *more), _, _ = socket.recv_fds(self._socket, 1, 1)
        except (OSError, ValueError) as error:
            raise ProtocolError(f"no memory was shared: {error}") from None
        for each in more:
            os.close(each)
        return descriptor

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def _as_protocol_error(remedy: str = "") -> Iterator[None]:
    """Turns errors of a connection into ProtocolError. remedy: what to do where the other end cannot authenticate."""
    try:
        yield
    except TimeoutError:
        raise ProtocolError("nothing came in time") from None
    except OSError as error:
        why = error.strerror or str(error)
        raise ProtocolError(why + remedy if isinstance(error, AuthenticationFailed) else why) from None
