"""/v1/realtime by a WebSocket client: text at each pause, and sessions that are wrong, closed or too long."""

import asyncio
import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from quintet.server.http.errors import ApiError
from tests.server.fakes import FakeBackend
from tests.server.http.audio.whisper import silence, tokens, voice, whisper_backend
from tests.server.http.serving import WAIT, Live, serving

client = pytest.importorskip("websockets.sync.client", reason="needs the extra audio")
exceptions = pytest.importorskip("websockets.exceptions", reason="needs the extra audio")
UTTERANCE = np.concatenate([voice(2), silence(1.2)])


@pytest.fixture
def live() -> Iterator[Live]:
    with serving(whisper_backend(), max_audio_seconds=60) as server:
        yield server


def connect(live: Live, **headers: str) -> Any:
    url = live.url.replace("http", "ws") + "/v1/realtime"
    return client.connect(url, additional_headers=headers, open_timeout=WAIT, proxy=None)


def append(samples: Any) -> str:
    raw = (np.asarray(samples) * 32767).astype("<i2").tobytes()
    return json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(raw).decode()})


def commit(final: bool) -> str:
    return json.dumps({"type": "input_audio_buffer.commit", "final": final})


def read(wire: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(wire.recv(WAIT))
    return found


def test_text_comes_at_each_pause(live: Live) -> None:
    with connect(live) as wire:
        created = read(wire)
        assert created["type"] == "session.created" and created["id"].startswith("sess-")
        wire.send(commit(False))
        for _ in range(2):
            for first in range(0, len(UTTERANCE), 3200):  # 200 ms
                wire.send(append(UTTERANCE[first : first + 3200]))
        assert read(wire) == {"type": "transcription.delta", "delta": "Hello there."}
        assert read(wire) == {"type": "transcription.delta", "delta": " Hello there."}
        wire.send(append(voice(1)))
        wire.send(commit(True))
        assert read(wire)["delta"] == " Hello there."
        done = read(wire)
        assert (done["type"], done["text"]) == ("transcription.done", "Hello there. Hello there. Hello there.")
        assert done["usage"]["completion_tokens"] > 0
        wire.send(append(silence(3)))
        wire.send(commit(True))
        assert read(wire)["text"] == ""


def test_a_session_has_a_language_and_a_prompt(live: Live) -> None:
    with connect(live) as wire:
        read(wire)
        wire.send(json.dumps({"type": "session.update", "model": "fake/model", "language": "de", "prompt": "so"}))
        wire.send(append(voice(1)))
        wire.send(commit(False))
        assert read(wire)["type"] == "transcription.delta"
    ids = tokens()
    prompts = [each.prompt.token_ids for each in live.backend.submitted]
    assert any(each[0] == ids.start_of_prev and ids.languages["de"] in each for each in prompts)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("nonsense", "is no event"),
        ("[]", "is no event"),
        (b"\x00\x01", "is binary"),
        (json.dumps({"type": "response.create"}), "not known here"),
        (json.dumps({"type": "input_audio_buffer.append", "audio": "?"}), "no base64"),
        (json.dumps({"type": "input_audio_buffer.append", "audio": "AAAA"}), "3 bytes"),
        (json.dumps({"type": "session.update", "model": "other"}), "is not here"),
        (json.dumps({"type": "session.update", "language": "klingon"}), "none of Whisper's"),
    ],
)
def test_a_wrong_event_is_an_error_and_the_session_goes_on(live: Live, message: Any, reason: str) -> None:
    with connect(live) as wire:
        read(wire)
        wire.send(message)
        error = read(wire)
        assert error["type"] == "error" and reason in error["error"], error
        wire.send(append(voice(1)))
        wire.send(commit(True))
        assert read(wire)["delta"] == "Hello there."


def test_what_is_too_long_ends_the_session(live: Live) -> None:
    with connect(live) as wire:
        read(wire)
        for _ in range(7):
            wire.send(append(silence(9)))
        assert read(wire)["code"] == "audio_too_long"
        with pytest.raises(exceptions.ConnectionClosed):
            wire.recv(WAIT)
    with connect(live) as wire:
        read(wire)
        with pytest.raises(exceptions.ConnectionClosed):
            wire.send("x" * 2**21)
            wire.recv(WAIT)


def test_who_leaves_ends_the_requests() -> None:
    with serving(whisper_backend(hang=8)) as live:
        with connect(live) as wire:
            read(wire)
            wire.send(append(voice(1)))
            wire.send(commit(False))

            async def hangs() -> None:
                while not live.backend.hanging:
                    await asyncio.sleep(0.01)

            live.run(hangs())

        async def gone() -> None:
            while live.backend.running or live.service.calls:
                await asyncio.sleep(0.01)

        live.run(gone())
        assert len(live.backend.aborted) == 1 and live.service.capacity.held.completions == 0


def test_the_servers_end_ends_a_session(live: Live) -> None:
    with connect(live) as wire:
        read(wire)

        async def end() -> None:
            for call in list(live.service.calls):
                call.fail(ApiError(503, "the server is shutting down", code="shutting_down"))

        live.run(end())
        assert read(wire)["code"] == "shutting_down"
        with pytest.raises(exceptions.ConnectionClosed):
            wire.recv(WAIT)


def _status(live: Live, **headers: str) -> int:
    with pytest.raises(exceptions.InvalidStatus) as caught:
        connect(live, **headers)
    status: int = caught.value.response.status_code
    return status


def test_keys_origins_and_models_are_checked_before_it_opens() -> None:
    with serving(whisper_backend(), api_key=("secret",)) as live:
        assert _status(live) == 401
        assert _status(live, **{"x-api-key": "secret", "Origin": "https://evil.example"}) == 403
        with connect(live, Authorization="Bearer secret") as wire:
            assert read(wire)["type"] == "session.created"
    with serving(FakeBackend()) as live:
        assert _status(live) == 400
        answer = httpx.get(live.url + "/v1/realtime")
        assert answer.status_code == 404 and "open a WebSocket" in answer.json()["error"]["message"]
    with serving(whisper_backend(), max_queued_requests=1) as live, connect(live) as wire:
        read(wire)
        assert _status(live) == 429


def test_other_paths_have_no_socket(live: Live) -> None:
    with pytest.raises(exceptions.InvalidStatus) as caught:
        client.connect(live.url.replace("http", "ws") + "/v1/models", open_timeout=WAIT, proxy=None)
    assert caught.value.response.status_code == 200
