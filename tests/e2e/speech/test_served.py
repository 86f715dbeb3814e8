"""`quintet serve` of a small Whisper model: OpenAI's client gets what the transcriber makes on the same engine."""

import asyncio
import base64
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from quintet import AsyncLLM
from quintet.api.speech import make_transcriber
from quintet.transcription.segments import Thresholds
from quintet.transcription.transcriber import Transcript, TranscriptionOptions
from tests.helpers.checkpoints.whisper_served import said, small_whisper
from tests.helpers.servers.serving import PATIENCE, Server, until
from tests.media.audio.test_decode import wav

PATH = "/v1/audio/transcriptions"
PAUSE = np.zeros(32 * 16_000, np.float32)
AUDIO = np.concatenate([said(3, 120), PAUSE, said(4, 180), PAUSE, said(2, 240)])
FILE = ("a.wav", wav(AUDIO, 16_000), "audio/wav")
FIXED = {"seed": 7}
FLAGS = ("--device", "cpu", "--dtype", "float32", "--served-model-name", "whisper", "--max-model-len", "64")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(str(small_whisper()), *FLAGS) as made:
        yield made


@pytest.fixture(scope="module")
def expected() -> Transcript:
    llm = AsyncLLM(str(small_whisper()), device="cpu", dtype="float32", max_model_len=64)
    options = TranscriptionOptions(
        thresholds=Thresholds(temperatures=(0.5,)), sampling=FIXED, word_timestamps=True
    )  # fmt: skip
    try:
        return asyncio.run(make_transcriber(llm, options).transcript(AUDIO))
    finally:
        llm.shutdown()


@pytest.fixture
def ai(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as made:
        yield made


def test_openais_client_gets_the_transcribers_words(ai: openai.OpenAI, expected: Transcript) -> None:
    answer = ai.audio.transcriptions.create(
        model="whisper", file=FILE, response_format="verbose_json", temperature=0.5, extra_body=FIXED,
        timestamp_granularities=["word", "segment"],
    )  # fmt: skip
    words = [word for segment in expected.segments for word in segment.words]
    assert len(words) >= len(expected.segments) >= 3
    found = [(each.word, each.start, each.end) for each in answer.words]
    assert found == [(each.text.strip(), each.start, each.end) for each in words]
    assert all(0 <= start <= end <= len(AUDIO) / 16_000 for _, start, end in found)


def test_openais_client_gets_the_transcribers_segments(ai: openai.OpenAI, expected: Transcript) -> None:
    answer = ai.audio.transcriptions.create(
        model="whisper", file=FILE, response_format="verbose_json", temperature=0.5, extra_body=FIXED
    )
    assert answer.segments and len(expected.segments) >= 3
    found = [(each.start, each.end, each.text, each.tokens) for each in answer.segments]
    assert found == [(each.start, each.end, each.text, list(each.tokens)) for each in expected.segments]
    assert [each.avg_logprob for each in answer.segments] == [each.avg_logprob for each in expected.segments]
    assert answer.text.strip() and answer.duration == pytest.approx(73)


def test_a_stream_has_the_same_text(ai: openai.OpenAI, expected: Transcript) -> None:
    events = list(
        ai.audio.transcriptions.create(model="whisper", file=FILE, stream=True, temperature=0.5, extra_body=FIXED)
    )
    text = "".join(each.text for each in expected.segments).strip()
    assert "".join(each.delta for each in events if each.type == "transcript.text.delta") == text
    assert events[-1].type == "transcript.text.done" and events[-1].text == text


def test_chats_are_refused_and_name_the_route(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE)
    assert answer.status_code == 400 and PATH in answer.json()["error"]["message"]


def test_who_hangs_up_leaves_nothing_running(server: Server) -> None:
    """One window after the other, so that most of them are still to come."""

    def ended() -> float:
        return server.metrics()["vllm:request_success_total"]

    def ended_with_one_more() -> float:
        assert httpx.post(server.url + PATH, files={"file": FILE}, timeout=PATIENCE).status_code == 200
        return ended()

    begun = ended()
    one = ended_with_one_more() - begun
    sound = wav(np.concatenate([said(20, hertz) for hertz in range(100, 480, 20)]), 16_000)
    fields = {"condition_on_previous_text": "true"}
    request = httpx.Request("POST", server.url + PATH, data=fields, files={"file": ("a.wav", sound)})
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port or 80)) as wire:
        head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        wire.sendall(f"POST {PATH} HTTP/1.1\r\n{head}\r\n".encode() + request.read())
        assert until(lambda: server.metrics()["vllm:num_requests_running"] > 0)
    names = ("vllm:num_requests_running", "quintet:open_connections")
    assert until(lambda: [server.metrics()[name] for name in names] == [0, 1])
    left = ended()
    assert left - begun - one < 3 * one  # 13 windows take more than four times what three take
    assert ended_with_one_more() == left + one


def test_a_batch_file(server: Server, tmp_path: Path, expected: Transcript) -> None:
    url = "data:audio/wav;base64," + base64.b64encode(FILE[1]).decode()
    body = {"model": "whisper", "file_url": url, "temperature": 0.5, **FIXED}
    lines = [{"custom_id": "1", "method": "POST", "url": PATH, "body": body}]
    lines.append({"custom_id": "2", "method": "POST", "url": PATH, "body": {"file_url": "https://example.com/a.wav"}})
    (tmp_path / "in").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    words = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--url", server.url]
    done = subprocess.run(
        [sys.executable, "-m", "quintet", "run-batch", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr  # the second line fails
    one, two = (json.loads(line) for line in (tmp_path / "out").read_text(encoding="utf-8").splitlines())
    assert one["response"]["body"]["text"] == "".join(each.text for each in expected.segments).strip()
    assert (
        two["response"]["status_code"] == 400 and "fetches no addresses" in two["response"]["body"]["error"]["message"]
    )
