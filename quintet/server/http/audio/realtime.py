"""WebSocket /v1/realtime: sound in as it is spoken, text out at each pause; vLLM's events.

Source: vLLM's entrypoints/speech_to_text/realtime: session.update, input_audio_buffer.append and .commit in;
session.created, transcription.delta, transcription.done and error out.
"""

import asyncio
import base64
import binascii
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.websockets import WebSocket, WebSocketDisconnect

from quintet.media.audio import SAMPLE_RATE
from quintet.media.audio.live import LiveCutter
from quintet.media.audio.resample import Samples
from quintet.media.lazy_numpy import np
from quintet.server.http.app_state import AppState, caller_of
from quintet.server.http.audio.speech import CallEngine, need_speech, placeholders
from quintet.server.http.engine_call import EngineCall
from quintet.server.http.errors import ApiError, ClientGone, as_api_error
from quintet.server.http.ids import new_id
from quintet.server.http.middleware.slow_clients import REALTIME
from quintet.server.http.sse import encode
from quintet.server.http.usage import usage_of
from quintet.transcription.formats import to_text
from quintet.transcription.model import UnsupportedOption
from quintet.transcription.transcriber import Transcriber, TranscriptionOptions

router = APIRouter()
_ORDERS = 16  # events that wait while a chunk is transcribed; the client waits then, too
_POLICY, _FAILED = 1008, 1011  # close codes. Source: RFC 6455, 7.4.1


class ClientEvent(msgspec.Struct):
    """Event of a client, with the fields of all types."""

    type: str
    audio: str = ""  # base64 of PCM: 16 bits, little-endian, mono, 16 kHz
    final: bool = False  # of a commit: nothing follows for this text
    model: str | None = None
    language: str | None = None
    prompt: str | None = None


_decode = msgspec.json.Decoder(ClientEvent).decode


@router.websocket(REALTIME)
async def realtime(socket: WebSocket) -> None:
    """Transcribes sound that arrives in events."""
    service: AppState = socket.app.state.service
    service.check_ready()
    need_speech(service)
    call = service.call(None, placeholders(1), caller=caller_of(socket), waits=True)
    async with call:
        await socket.accept()
        session = _Session(service, socket, call)
        try:
            await call.run_between(session.run())
        except (ClientGone, WebSocketDisconnect):
            return
        except Exception as error:
            failure = as_api_error(error)
            await session.send_error(failure)
            await socket.close(_POLICY if failure.status < 500 else _FAILED, failure.message[:100])


class _Session:
    """One connection. Events are read while a chunk is transcribed; chunks are transcribed one after the other."""

    def __init__(self, service: AppState, socket: WebSocket, call: EngineCall) -> None:
        self._service, self._socket = service, socket
        self._engine, self._model = CallEngine(service, socket, call), need_speech(service)
        self._options = TranscriptionOptions(windows_at_once=1)
        self._transcriber = Transcriber(self._engine, self._model, self._options)
        self._cutter = LiveCutter(longest=self._model.seconds)
        self._orders: asyncio.Queue[Samples | ClientEvent] = asyncio.Queue(_ORDERS)
        self._samples = 0  # that came
        self._text = ""  # since the last final commit

    async def run(self) -> None:
        """Works until the client leaves, which raises WebSocketDisconnect."""
        await self._send(type="session.created", id=f"sess-{new_id()}", created=int(time.time()))
        tasks = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._work())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def send_error(self, error: ApiError) -> None:
        await self._send(type="error", error=error.message, code=error.code or error.type)

    async def _send(self, **event: Any) -> None:
        await self._socket.send_text(encode(event).decode())

    async def _read(self) -> None:
        """Reads events. One that is wrong is answered with an error, and the session goes on."""
        while True:
            try:
                event = _event(await self._socket.receive_text())
                await self._take(event)
            except ApiError as error:
                if error.status >= 500 or error.code == "audio_too_long":
                    raise
                await self.send_error(error)
            except KeyError:
                await self.send_error(_wrong("a message is binary; send events as JSON text"))

    async def _take(self, event: ClientEvent) -> None:
        if event.type == "input_audio_buffer.append":
            samples = _pcm(event.audio)
            self._samples += len(samples)
            most = self._service.settings.max_audio_seconds
            if self._samples > most * SAMPLE_RATE:
                raise ApiError(
                    400, f"the session has more than {most:g} s of audio; open another", code="audio_too_long"
                )
            await self._orders.put(samples)
        elif event.type == "input_audio_buffer.commit":
            await self._orders.put(event)
        elif event.type == "session.update":
            await self._update(event)
        else:
            raise _wrong(
                f"the event {event.type[:60]!r} is not known here; send session.update, input_audio_buffer.append or "
                "input_audio_buffer.commit"
            )

    async def _update(self, event: ClientEvent) -> None:
        await self._service.choose_model(self._socket, event.model)
        try:
            options = TranscriptionOptions(language=event.language, prompt=event.prompt or "", windows_at_once=1)
            self._transcriber = Transcriber(self._engine, self._model, options)
        except UnsupportedOption as error:
            raise _wrong(str(error)) from None
        except ValueError as error:
            raise _wrong(f"language: {error}") from None

    async def _work(self) -> None:
        while True:
            order = await self._orders.get()
            if not isinstance(order, ClientEvent):
                await self._transcribe(self._cutter.feed(order))
                continue
            rest = self._cutter.flush()
            await self._transcribe([] if rest is None else [rest])
            if order.final:
                await self._send(type="transcription.done", text=self._text, usage=usage_of(self._socket).usage())
                self._text = ""

    async def _transcribe(self, chunks: Sequence[Samples]) -> None:
        for chunk in chunks:
            text = to_text((await self._transcriber.transcript(chunk)).segments)
            if text:
                delta = f" {text}" if self._text else text
                self._text += delta
                await self._send(type="transcription.delta", delta=delta)


def _event(text: str) -> ClientEvent:
    """ApiError 400 for what is no event."""
    try:
        return _decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise _wrong(f"a message is no event: {str(error)[:200]}") from None


def _pcm(audio: str) -> Samples:
    """Returns samples from -1 to 1. ApiError 400 for anything but PCM in base64."""
    try:
        raw = base64.b64decode(audio, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _wrong(f"audio is no base64: {str(error)[:80]}") from None
    if len(raw) % 2:
        raise _wrong(f"audio has {len(raw)} bytes; send PCM of 16 bits, mono, {SAMPLE_RATE} samples a second")
    return np.frombuffer(raw, "<i2").astype(np.float32) / np.float32(2**15)


def _wrong(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_event")
