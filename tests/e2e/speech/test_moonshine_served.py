"""`quintet serve` and `quintet transcribe` of a small Moonshine model: windows of long audio, each as transformers."""

import base64
import json
import math
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from quintet.cli import main as cli
from quintet.media.audio.silence import speech_windows
from quintet.transcription.transcriber import default_finder
from tests.helpers.checkpoints.moonshine import greedy, small_moonshine
from tests.helpers.checkpoints.whisper_served import said
from tests.helpers.servers.serving import PATIENCE, Server
from tests.media.audio.test_decode import wav

PATH = "/v1/audio/transcriptions"
PAUSE = np.zeros(16 * 16_000, np.float32)
AUDIO = np.concatenate([said(3, 120), PAUSE, said(20, 180), PAUSE, said(2, 240)])
SECONDS = 193 / 13  # of a window: its text always fits
FILE = ("a.wav", wav(AUDIO, 16_000), "audio/wav")
HEARD = np.round(AUDIO * 2**15).clip(-(2**15), 2**15 - 1).astype(np.float32) / 2**15  # of 16 bits


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(str(small_moonshine()[0]), "--device", "cpu", "--dtype", "float32") as made:
        yield made


@pytest.fixture(scope="module")
def expected() -> list[tuple[float, float, str]]:
    """Start, end and text of each window, by transformers."""
    folder, model = small_moonshine()
    from transformers import AutoTokenizer

    tokenizer, found = AutoTokenizer.from_pretrained(folder), []
    for span in speech_windows(HEARD, SECONDS, default_finder(), SECONDS / 6):
        tokens = greedy(model, HEARD[span.start : span.end], min(193, math.ceil(13 * span.seconds) + 2))
        text = tokenizer.decode(tokens, skip_special_tokens=True).strip()
        found.append((span.start / 16_000, span.end / 16_000, text))
    assert len(found) >= 4 and all(text for _, _, text in found)
    return found


def ask(server: Server, path: str = PATH, **fields: str) -> httpx.Response:
    return httpx.post(server.url + path, data=fields, files={"file": FILE}, timeout=PATIENCE)


def test_segments_are_windows(server: Server, expected: list[tuple[float, float, str]]) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as ai:
        name = ai.models.list().data[0].id
        answer = ai.audio.transcriptions.create(model=name, file=FILE, response_format="verbose_json", language="en")
    found = [(each.start, each.end, each.text.strip()) for each in answer.segments]
    assert found == [(pytest.approx(start), pytest.approx(end), text) for start, end, text in expected]
    assert answer.language == "english" and all(each.temperature == 0 for each in answer.segments)


def test_every_format_has_the_text(server: Server, expected: list[tuple[float, float, str]]) -> None:
    texts = [text for _, _, text in expected]
    assert ask(server).json()["text"] == " ".join(texts)
    assert ask(server, response_format="text").text == " ".join(texts) + "\n"
    for shape in ("srt", "vtt"):
        lines = ask(server, response_format=shape).text.splitlines()
        assert [lines[at + 1] for at, line in enumerate(lines) if " --> " in line] == texts
    stream = ask(server, stream="true").text
    assert stream.count("transcript.text.delta") == len(texts)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (PATH, {"response_format": "verbose_json", "timestamp_granularities[]": "word"}, "timestamp_granularities"),
        (PATH, {"prompt": "Quintet"}, "prompt"),
        (PATH, {"condition_on_previous_text": "true"}, "condition_on_previous_text"),
        (PATH, {"language": "klingon"}, "language"),
        ("/v1/audio/translations", {}, None),
    ],
)
def test_what_it_does_not_have_is_refused(server: Server, path: str, fields: dict[str, str], param: str | None) -> None:
    answer = ask(server, path, **fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert "Whisper" in answer.json()["error"]["message"]


def test_text_comes_while_it_is_spoken(server: Server) -> None:
    client = pytest.importorskip("websockets.sync.client", reason="needs the extra audio")
    url = server.url.replace("http", "ws") + "/v1/realtime"
    with client.connect(url, open_timeout=PATIENCE, proxy=None) as wire:
        assert json.loads(wire.recv(PATIENCE))["type"] == "session.created"
        wire.send(json.dumps({"type": "session.update", "prompt": "Quintet"}))
        assert "reads no text" in json.loads(wire.recv(PATIENCE))["error"]
        pcm = (said(3, 120) * 2**15).astype("<i2").tobytes()
        wire.send(json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(pcm).decode()}))
        wire.send(json.dumps({"type": "input_audio_buffer.commit", "final": True}))
        delta, done = (json.loads(wire.recv(PATIENCE)) for _ in range(2))
        assert delta["delta"] and (done["type"], done["text"]) == ("transcription.done", delta["delta"])


def test_the_command_writes_the_same(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], expected: list[tuple[float, float, str]]
) -> None:
    file = tmp_path / "a.wav"
    file.write_bytes(FILE[1])
    words = ["transcribe", str(file), "--model", str(small_moonshine()[0]), "--device", "cpu", "--dtype", "float32"]
    assert cli.main([*words, "--quiet"]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == " ".join(text for _, _, text in expected)
    assert cli.main([*words, "--translate", "--quiet"]) != 0
