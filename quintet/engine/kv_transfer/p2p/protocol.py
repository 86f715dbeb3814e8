"""Protocol of a connection that carries pages between two engines: frames, their limits, and authentication.

A frame is its length (4 bytes, little-endian), msgpack of one message, and an HMAC-SHA256 of direction, number and
message. Both ends first prove that they have the key, each over the other's nonce, so that nothing recorded can be
replayed; the frames of a connection have a key made of both nonces. Nothing is encrypted: anyone who reads the network
traffic reads pages.
"""

import hmac
import os
import socket
import struct
import time
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct

PROTOCOL = b"quintet pages 3"  # its number is raised with any change of the messages
VERSION = 3
NONCE = 32  # bytes
TAG = 32
SMALL = 2**17  # bytes of a message without a page, and of what surrounds a page
MOST_KEYS = 1024  # of one Ask
MOST_PARTS = 4096  # byte ranges of a row, in one Ask
MOST_RANKS = 256  # processes of one engine
HEAD = struct.Struct("<I")

Bytes32 = Annotated[bytes, Meta(min_length=32, max_length=32)]
Key = Annotated[bytes, Meta(min_length=1, max_length=32)]
Text = Annotated[str, Meta(max_length=256)]
Number = Annotated[int, Meta(ge=0, le=2**31 - 1)]
T = TypeVar("T")


class ProtocolError(Exception):
    """The connection failed: the other side is gone, silent, or breaks the protocol; the message says which."""


class Part(Struct, array_like=True, frozen=True):
    """Part of every page that one process has: that of its ranks, which share each layer's heads, of its stage's
    layers."""

    first: Number = 0  # of its ranks
    count: Number = 1
    size: Number = 1  # ranks of its stage
    layers: tuple[Number, Number] = (0, 0)  # the first and the one after the last; (0, 0): all


class Facts(Struct, array_like=True, frozen=True):
    """All that a page's content depends on, except its tokens, and its layout in a producer's row."""

    checkpoint: Text
    dtype: Text  # of the cache
    page_size: Number
    shapes: Annotated[tuple[Annotated[tuple[Number, ...], Meta(max_length=8)], ...], Meta(max_length=4096)]
    part: Part = Part()  # the producer's; the consumer sends the part of the producer that it asks

    def unlike(self, given: "Facts") -> str:
        """Returns why an engine with these facts cannot use pages with the facts `given`; empty: it can."""
        if self.page_size != given.page_size:
            return f"pages of {given.page_size} tokens are given, and of {self.page_size} wanted"
        if self.shapes != given.shapes:
            return f"pages of another shape are given ({_shown(given.shapes)}) than wanted ({_shown(self.shapes)})"
        if self.dtype != given.dtype:
            return f"pages in {given.dtype} are given, and in {self.dtype} wanted"
        if self.part != given.part:
            return f"another part of pages is given ({_said(given.part)}) than wanted ({_said(self.part)})"
        return "" if self.checkpoint == given.checkpoint else "one runs another model, or other weights of it"


def _shown(shapes: tuple[tuple[int, ...], ...]) -> str:
    return f"{len(shapes)} of {'x'.join(map(str, shapes[0]))}" if shapes else "nothing"


def _said(part: Part) -> str:
    ranks = f"{part.first}-{part.first + part.count - 1}" if part.count > 1 else f"{part.first}"
    return f"rank {ranks} of {part.size}" + (
        f", layers {part.layers[0]}-{part.layers[1] - 1}" * (part.layers != (0, 0))
    )


class Hello(Struct, tag=True, array_like=True):
    """First message of the producer."""

    version: Number
    nonce: Bytes32


class Claim(Struct, tag=True, array_like=True):
    """Answer of the consumer."""

    version: Number
    nonce: Bytes32
    facts: Facts
    proof: Bytes32
    way: Text = ""  # transport of pages; empty: frames


class Welcome(Struct, tag=True, array_like=True):
    proof: Bytes32


class Refusal(Struct, tag=True, array_like=True):
    """Refusal of a connection, which then ends."""

    why: Annotated[str, Meta(max_length=1024)]


class PageRequest(Struct, tag=True, array_like=True):
    """Request for these pages of a loan, each of which is answered once, in any order."""

    loan: Text
    keys: Annotated[list[Key], Meta(min_length=1, max_length=MOST_KEYS)]
    parts: Annotated[list[tuple[Number, Number]], Meta(max_length=MOST_PARTS)] = []  # first byte, bytes; none: all


class Page(Struct, tag=True, array_like=True):
    """One page of the last Ask."""

    place: Number
    row: bytes


class Offer(Struct, tag=True, array_like=True):
    """One page of the last Ask: a row of the memory that the producer shares, until the consumer has copied it."""

    place: Number
    row: Number


class Copied(Struct, tag=True, array_like=True):
    """Report that the consumer has copied all shared rows of the last Ask."""


class Kept(Struct, tag=True, array_like=True):
    """Confirmation that the rows were unchanged until now: the consumer has copied the right pages."""


class Memory(Struct, tag=True, array_like=True):
    """Address of the producer's rows, for a transfer library that reads them."""

    told: Annotated[bytes, Meta(max_length=2**16)]  # connection data of the producer, for the library
    address: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    rows: Number


class Missing(Struct, tag=True, array_like=True):
    """Pages that are not there."""

    places: Annotated[list[Number], Meta(max_length=MOST_KEYS)]
    why: Annotated[str, Meta(max_length=1024)]


class Done(Struct, tag=True, array_like=True):
    """Report of a reader that it will not ask for this loan again."""

    loan: Text
    readers: Annotated[int, Meta(ge=1, le=MOST_RANKS)] = 1  # number of readers
    reader: Annotated[int, Meta(ge=0, lt=MOST_RANKS)] = 0


_encode = msgspec.msgpack.Encoder().encode
_GREETING, _CLAIM = msgspec.msgpack.Decoder(Hello | Refusal), msgspec.msgpack.Decoder(Claim)
_REPLY = msgspec.msgpack.Decoder(Welcome | Refusal)
ASKED: "msgspec.msgpack.Decoder[PageRequest | Done]" = msgspec.msgpack.Decoder(PageRequest | Done)
ANSWERED: "msgspec.msgpack.Decoder[Page | Offer | Missing]" = msgspec.msgpack.Decoder(Page | Offer | Missing)
COPIED, KEPT = msgspec.msgpack.Decoder(Copied), msgspec.msgpack.Decoder(Kept)
MEMORY = msgspec.msgpack.Decoder(Memory)


class _Keys(NamedTuple):
    """Frame keys of one connection."""

    send: bytes
    receive: bytes


class Channel:
    """One end of a connection. Every call ends within `patience` seconds, with success or Broken."""

    def __init__(self, connection: socket.socket, patience: float, longest: int) -> None:
        """longest: bytes of a page's row."""
        self._connection, self._patience, self._longest = connection, patience, SMALL + longest
        self._keys = _Keys(b"", b"")
        self._sent = self._received = 0

    @property
    def greeted(self) -> bool:
        """Returns whether both ends have authenticated."""
        return bool(self._keys.send)

    def patient(self, patience: float) -> "Channel":
        """Returns the same channel, with other patience."""
        self._patience = patience
        return self

    def send(self, message: Any) -> None:
        content = _encode(message)
        tag = b""
        if self._keys.send:
            tag = _tag(self._keys.send, self._sent, content)
            self._sent += 1
        self._connection.settimeout(self._patience)
        try:
            self._connection.sendall(b"".join((HEAD.pack(len(content)), content, tag)))
        except OSError as error:
            raise ProtocolError(_why(error)) from None

    def receive(self, decoder: "msgspec.msgpack.Decoder[T]", patience: float | None = None) -> T:
        until = time.monotonic() + (self._patience if patience is None else patience)
        (length,) = HEAD.unpack(self._read(HEAD.size, until))
        if length > self._longest:
            raise ProtocolError(f"a frame of {length} bytes, where {self._longest} are the most")
        content = self._read(length, until)
        if self._keys.receive:
            if not hmac.compare_digest(self._read(TAG, until), _tag(self._keys.receive, self._received, content)):
                raise ProtocolError("a frame is not what was sent")
            self._received += 1
        try:
            return decoder.decode(content)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"a frame that is none of the protocol: {error}") from None

    def _read(self, count: int, until: float) -> bytearray:
        into = bytearray(count)
        view, got = memoryview(into), 0
        while got < count:
            left = until - time.monotonic()
            if left <= 0:
                raise ProtocolError("nothing came in time")
            self._connection.settimeout(left)
            try:
                more = self._connection.recv_into(view[got:])
            except OSError as error:
                raise ProtocolError(_why(error)) from None
            if more == 0:
                raise ProtocolError("the connection was closed" + (" within a frame" if got else ""))
            got += more
        return into

    def look(self) -> None:
        """Raises Broken where the other side has closed the connection; reads nothing."""
        self._connection.settimeout(0)
        try:
            if not self._connection.recv(1, socket.MSG_PEEK):
                raise ProtocolError("the connection was closed")
        except BlockingIOError:
            pass
        except OSError as error:
            raise ProtocolError(_why(error)) from None

    def greet(self, key: bytes, facts: Facts, way: str = "") -> None:
        """Runs the producer's half of the handshake. way: transport of pages, if not frames: the same on both sides."""
        ours = os.urandom(NONCE)
        self.send(Hello(VERSION, ours))
        claim = self.receive(_CLAIM)
        if claim.version != VERSION:
            self._refuse(f"this engine speaks version {VERSION}, and not {claim.version}; run the same quintet on both")
        if not hmac.compare_digest(claim.proof, _proof(key, b"taker", ours, claim.nonce, claim.facts)):
            self._refuse("the keys differ; give all engines the same QUINTET_KV_TRANSFER_KEY")
        if claim.way != way:
            self._refuse(f"pages are given by {way or 'TCP'}, and wanted by {claim.way or 'TCP'}")
        if why := claim.facts.unlike(facts):
            self._refuse(why)
        self.send(Welcome(_proof(key, b"giver", ours, claim.nonce, facts)))
        self._keys = _Keys(_key(key, b"giver", ours, claim.nonce), _key(key, b"taker", ours, claim.nonce))

    def claim(self, key: bytes, facts: Facts, way: str = "") -> None:
        """Runs the consumer's half of the handshake."""
        ours, hello = os.urandom(NONCE), self.receive(_GREETING)
        if isinstance(hello, Refusal):
            raise ProtocolError(hello.why)
        if hello.version != VERSION:
            raise ProtocolError(f"it speaks version {hello.version}, and not {VERSION}; run the same quintet on both")
        self.send(Claim(VERSION, ours, facts, _proof(key, b"taker", hello.nonce, ours, facts), way))
        reply = self.receive(_REPLY)
        if isinstance(reply, Refusal):
            raise ProtocolError(reply.why)
        if not hmac.compare_digest(reply.proof, _proof(key, b"giver", hello.nonce, ours, facts)):
            raise ProtocolError("it has another key, or none")
        self._keys = _Keys(_key(key, b"taker", hello.nonce, ours), _key(key, b"giver", hello.nonce, ours))

    def _refuse(self, why: str) -> None:
        self.send(Refusal(why))
        raise ProtocolError(why)

    def lend(self, descriptor: int) -> None:
        """Sends a file descriptor, which lets the other process read the file; only after authentication."""
        try:
            socket.send_fds(self._connection, [b"m"], [descriptor])
        except OSError as error:
            raise ProtocolError(_why(error)) from None

    def borrow(self) -> int:
        """Receives the descriptor of a file that the other process lets this one read."""
        self._connection.settimeout(self._patience)
        try:
            _, (descriptor, *more), _, _ = socket.recv_fds(self._connection, 1, 1)
        except (OSError, ValueError) as error:
            raise ProtocolError(f"no memory was shared: {error}") from None
        for each in more:
            os.close(each)
        return descriptor

    def close(self) -> None:
        self._connection.close()


def _proof(key: bytes, who: bytes, giver: bytes, taker: bytes, facts: Facts) -> bytes:
    return hmac.digest(key, b"\0".join((PROTOCOL, who, giver, taker, _encode(facts))), "sha256")


def _key(key: bytes, who: bytes, giver: bytes, taker: bytes) -> bytes:
    return hmac.digest(key, b"\0".join((PROTOCOL, b"frames of the " + who, giver, taker)), "sha256")


def _tag(key: bytes, number: int, content: bytes | bytearray) -> bytes:
    made = hmac.new(key, number.to_bytes(8, "little"), "sha256")
    made.update(content)
    return made.digest()


def _why(error: OSError) -> str:
    return "nothing came in time" if isinstance(error, TimeoutError) else f"{error.strerror or error}"
