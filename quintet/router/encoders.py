"""Disaggregated encoders: servers that encode a chat's media ahead, for the server that answers it."""

import asyncio
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw

from quintet.clients.http_connection import ConnectionLost, HttpProtocolError, HttpTimeout
from quintet.router.backends import Pool, RouterBackend
from quintet.router.forward import BackendUnanswered, Forwarder
from quintet.router.request_info import RequestInfo
from quintet.server.http.errors import ApiError

logger = logging.getLogger(__name__)

MEDIA = ("image_url", "video_url", "audio_url", "input_audio")  # types of a message's parts
OPTIONS = ("model", "mm_processor_kwargs", "media_io_kwargs")
MAX_MEDIA = 64  # of a chat with more, none is encoded ahead
_AT_ONCE = 8  # media of one chat that are being encoded
_PATIENCE = 60.0  # seconds for all media of a chat
_MAX_ANSWER = 2**20  # bytes


class _Part(msgspec.Struct):
    type: str = ""


class _Message(msgspec.Struct):
    content: Raw = Raw(b"null")


class _Chat(msgspec.Struct):
    messages: list[_Message] = []


_CHAT, _PARTS = msgspec.json.Decoder(_Chat), msgspec.json.Decoder(list[Raw])
_PART, _FIELDS = msgspec.json.Decoder(_Part), msgspec.json.Decoder(dict[str, Raw])


def encode_bodies(body: bytes) -> Iterator[bytes]:
    """Yields a chat of one token for each medium of a chat. Nothing for a body that is none, which a server refuses,
    and for one with more than MAX_MEDIA."""
    try:
        media = list(itertools.islice(_media(body), MAX_MEDIA + 1))
        media = [] if len(media) > MAX_MEDIA else media
        fields = _FIELDS.decode(body) if media else {}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    options: dict[str, Any] = {name: fields[name] for name in OPTIONS if name in fields}
    for part in media:
        messages = [{"role": "user", "content": [part]}]
        yield msgspec.json.encode({**options, "messages": messages, "max_tokens": 1, "stream": False})


def _media(body: bytes) -> Iterator[Raw]:
    """Yields the parts of a chat's messages that are encoded."""
    for message in _CHAT.decode(body).messages:
        if bytes(message.content).lstrip().startswith(b"["):
            for part in _PARTS.decode(message.content):
                if _PART.decode(part).type in MEDIA:
                    yield part


class Encoders:
    """Has media encoded before a chat is forwarded. What no server of --encode does, the answering one does."""

    def __init__(self, forwarder: Forwarder) -> None:
        self._forwarder = forwarder

    async def encode(self, ask: RequestInfo) -> None:
        """Returns when all media of a chat are encoded, could not be, or take too long."""
        bodies = encode_bodies(ask.body)

        async def work() -> None:
            for body in bodies:  # the workers share them: a body is made when it is sent
                await self._encode(ask, body)

        try:
            await asyncio.wait_for(asyncio.gather(*(work() for _ in range(_AT_ONCE))), _PATIENCE)
        except asyncio.TimeoutError:
            logger.warning("media are not encoded within %g s (request %s)", _PATIENCE, ask.request_id)

    async def _encode(self, ask: RequestInfo, body: bytes) -> None:
        """Asks servers of --encode in turn until one has encoded a medium."""
        tried: list[RouterBackend] = []
        try:
            backend: RouterBackend | None = await self._forwarder.queue.acquire_backend(ask, Pool.ENCODE)
        except ApiError as error:
            logger.warning("a medium is not encoded ahead: %s", error.message)
            return
        while backend is not None:
            tried.append(backend)
            with self._forwarder.queue.releasing(backend):
                if await self._encoded_by(backend, ask, body):
                    return
                backend = self._forwarder.next_backend(ask, Pool.ENCODE, tried)

    async def _encoded_by(self, backend: RouterBackend, ask: RequestInfo, body: bytes) -> bool:
        """Returns whether a server has encoded a medium, or has refused it: the answering one then refuses it, too."""
        try:
            answer = await self._forwarder.send(backend, ask, body)
        except BackendUnanswered:
            return False
        status = answer.head.status
        try:
            await answer.exchange.body(_MAX_ANSWER)
        except (ConnectionLost, HttpProtocolError, HttpTimeout) as error:
            backend.counts.count_failure("mid_stream")
            logger.warning("%s: %s, in the middle of an answer (request %s)", backend.url, error, ask.request_id)
            return False
        finally:
            answer.exchange.close()
        backend.counts.count_status(status)
        if status >= 400:
            logger.warning("%s: it answers %d to a medium (request %s)", backend.url, status, ask.request_id)
        return status < 429 or status == 501
