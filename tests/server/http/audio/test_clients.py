"""OpenAI's own client against a server that listens; who hangs up; hostile files beside a stream."""

import asyncio
import io
import random
import socket
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest

from tests.media.audio.test_decode import wav
from tests.server.fakes import MODEL
from tests.server.http.audio.whisper import PATH, file_of, speech, voice, whisper_backend
from tests.server.http.serving import Live, serving

SPEECH = ("speech.wav", wav(speech(2, 2), 16_000), "audio/wav")
TEXT = "Hello there. Hello there."


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(whisper_backend(), api_key=("secret",)) as server:
        yield server


@pytest.fixture
def ai(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="secret", max_retries=0) as made:
        yield made


def test_transcriptions(ai: openai.OpenAI) -> None:
    assert ai.audio.transcriptions.create(model=MODEL, file=SPEECH).text == TEXT
    answer = ai.audio.transcriptions.create(
        model=MODEL, file=SPEECH, response_format="verbose_json", timestamp_granularities=["segment"], language="en",
        temperature=0.2, prompt="names",
    )  # fmt: skip
    assert answer.segments and [each.text for each in answer.segments] == [" Hello there."] * 2
    assert answer.duration == 39.0 and answer.language == "english" and answer.usage and answer.usage.seconds == 39
    srt = ai.audio.transcriptions.create(model=MODEL, file=SPEECH, response_format="srt")
    assert str(srt).startswith("1\n00:00:00,000 --> ")


def test_translations(ai: openai.OpenAI) -> None:
    assert ai.audio.translations.create(model=MODEL, file=SPEECH).text == TEXT
    answer = ai.audio.translations.create(model=MODEL, file=SPEECH, response_format="verbose_json")
    assert answer.segments and len(answer.segments) == 2


def test_a_stream(ai: openai.OpenAI) -> None:
    *deltas, done = list(ai.audio.transcriptions.create(model=MODEL, file=SPEECH, stream=True))
    assert "".join(each.delta for each in deltas if each.type == "transcript.text.delta") == TEXT
    assert done.type == "transcript.text.done" and done.text == TEXT


def test_an_error_names_the_field(ai: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ai.audio.transcriptions.create(model=MODEL, file=SPEECH, language="klingon")
    assert caught.value.param == "language"
    with pytest.raises(openai.BadRequestError) as caught:
        ai.audio.transcriptions.create(model=MODEL, file=("a.wav", b"no sound"))
    assert caught.value.param == "file"
    with pytest.raises(openai.NotFoundError):
        ai.audio.transcriptions.create(model="other", file=SPEECH)


@pytest.mark.parametrize("stream", [False, True])
def test_who_hangs_up_leaves_nothing_running(stream: bool) -> None:
    fake = whisper_backend(hang=8)
    with serving(fake) as live:
        request = httpx.Request("POST", live.url + PATH, data={"stream": str(stream).lower()}, files={"file": SPEECH})
        wire = socket.create_connection(("127.0.0.1", live.port))
        head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        wire.sendall(f"POST {PATH} HTTP/1.1\r\n{head}\r\n".encode() + request.read())

        async def both_hang() -> None:
            while fake.hanging < 2:
                await asyncio.sleep(0.01)

        live.run(both_hang())
        wire.close()

        async def nothing_runs() -> None:
            while fake.running or live.service.calls:
                await asyncio.sleep(0.01)

        live.run(nothing_runs())
        assert len(fake.aborted) == 2


def _mutated(r: random.Random) -> bytes:
    raw = bytearray(wav(voice(0.3), 16_000))
    for _ in range(r.randrange(1, 30)):
        raw[r.randrange(60)] = r.randrange(256)
    return bytes(raw)


HOSTILE: list[Callable[[random.Random], bytes]] = [
    lambda r: b"",
    lambda r: r.randbytes(r.randrange(1, 2000)),
    lambda r: b"RIFF" + r.randbytes(4) + b"WAVE" + r.randbytes(r.randrange(300)),
    lambda r: b"OggS" + r.randbytes(r.randrange(2000)),
    lambda r: b"ID3" + r.randbytes(r.randrange(2000)),
    lambda r: b"fLaC" + r.randbytes(r.randrange(2000)),
    lambda r: r.randbytes(4) + b"ftyp" + r.randbytes(r.randrange(2000)),
    lambda r: b"\x1aE\xdf\xa3" + r.randbytes(r.randrange(2000)),
    lambda r: b"#EXTM3U\nfile:///etc/passwd\n",
    lambda r: wav(voice(0.2), 16_000)[: r.randrange(100)],
    _mutated,
]


def _bombard(live: Live, count: int, clients: int) -> list[int]:
    """Sends hostile files from several clients -> the statuses."""
    statuses: list[int] = []

    async def send(http: httpx.AsyncClient, number: int) -> None:
        r = random.Random(number)
        content = HOSTILE[number % len(HOSTILE)](r)
        answer = await http.post(PATH, files={"file": ("a.wav", content)}, timeout=120)
        statuses.append(answer.status_code)

    async def all_of_them() -> None:
        async with httpx.AsyncClient(base_url=live.url) as http:
            waiting = iter(range(count))

            async def client() -> None:
                for number in waiting:
                    await send(http, number)

            await asyncio.gather(*(client() for _ in range(clients)))

    asyncio.run(all_of_them())
    return statuses


def _steady(live: Live) -> str:
    """A stream of a transcript."""
    content = io.BytesIO(wav(speech(*[1.0] * 6, pause=31.0), 16_000))
    return httpx.post(live.url + PATH, files={"file": content}, data={"stream": "true"}, timeout=120).text


async def _ended(condition: Callable[[], bool]) -> None:
    while not condition():  # pytest's timeout ends it
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("count", [11, pytest.param(2000, marks=[pytest.mark.sweep, pytest.mark.timeout(3600)])])
def test_hostile_files_are_refused_beside_a_stream_that_stays_the_same(count: int) -> None:
    fake = whisper_backend()
    with serving(fake) as live:
        alone = _steady(live)

        async def beside() -> tuple[list[int], list[str]]:
            bad = asyncio.create_task(asyncio.to_thread(_bombard, live, count, 4))
            streams = [await asyncio.to_thread(_steady, live)]
            while not bad.done():
                streams.append(await asyncio.to_thread(_steady, live))
            return await bad, streams

        statuses, streams = asyncio.run(beside())
        assert set(streams) == {alone} and alone.count("delta") >= 6
        # a changed byte may leave a file that is one
        assert len(statuses) == count and set(statuses) <= {200, 400} and statuses.count(400) > count * 0.75
        asyncio.run(_ended(lambda: not fake.running and not live.service.calls))  # the last answers have come
        assert httpx.post(live.url + PATH, files=file_of(voice(1)), timeout=60).json()["text"] == "Hello there."
