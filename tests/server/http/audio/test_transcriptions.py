"""The audio routes over a fake engine: formats, fields, streams, refusals, limits, and callers who leave."""

import asyncio
import base64
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from quintet.media.audio.encoder_input import SpeechInput
from quintet.server.http.errors import ApiError
from tests.media.audio.test_decode import wav
from tests.server.fakes import FakeBackend
from tests.server.http.audio.whisper import (
    ANY,
    PATH,
    PATHS,
    TRANSLATIONS,
    client,
    file_of,
    said,
    silence,
    speech,
    tokenizer,
    tokens,
    voice,
    whisper_backend,
)
from tests.server.http.serving import WAIT, chat, events

TWO = ((" Hello there.", 0.0, 2.0), (" And goodbye.", 2.5, 4.0))


async def ask(fake: FakeBackend, samples: Any, path: str = PATH, **fields: Any) -> httpx.Response:
    async with client(fake, samples) as http:
        return await http.post(path, data=fields, files=ANY)


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ("text", "Hello there. And goodbye.\n"),
        ("srt", "1\n00:00:00,000 --> 00:00:02,000\nHello there.\n\n2\n00:00:02,500 --> 00:00:04,000\nAnd goodbye.\n\n"),
        ("vtt", "WEBVTT\n\n00:00.000 --> 00:02.000\nHello there.\n\n00:02.500 --> 00:04.000\nAnd goodbye.\n\n"),
    ],
)
async def test_texts_and_subtitles(shape: str, text: str) -> None:
    answer = await ask(whisper_backend(*TWO), voice(4.2), response_format=shape)
    assert answer.text == text and answer.headers["content-type"] == "text/plain; charset=utf-8"


async def test_json_has_the_text_and_the_length() -> None:
    for fields in ({}, {"response_format": "json"}):
        answer = await ask(whisper_backend(*TWO), voice(4.2), **fields)
        assert answer.json() == {"text": "Hello there. And goodbye.", "usage": {"type": "duration", "seconds": 5}}


@pytest.mark.parametrize(("path", "task"), [(PATH, "transcribe"), (TRANSLATIONS, "translate")])
async def test_verbose_json_has_the_segments(path: str, task: str) -> None:
    fields = {"timestamp_granularities[]": "segment"} if path == PATH else {}
    fake = whisper_backend(*TWO)
    answer = (await ask(fake, speech(4.2, 4.2), path, response_format="verbose_json", **fields)).json()
    assert (answer["task"], answer["language"], answer["duration"]) == (task, "english", 43.4)
    assert [each["id"] for each in answer["segments"]] == [0, 1, 2, 3]
    first, _, third, _ = answer["segments"]
    assert (first["start"], first["end"], first["text"]) == (0, 2, " Hello there.")
    assert 38.9 < third["start"] < 39.2 and first["tokens"] == said(" Hello there.")
    assert first["avg_logprob"] == -0.5 and first["temperature"] == 0 and 0 < first["no_speech_prob"] < 0.6
    named = tokens().translate if task == "translate" else tokens().transcribe
    prompts = [each.prompt.token_ids for each in fake.submitted]
    assert [tokens().sot, tokens().languages["en"], named] in prompts and [tokens().sot] in prompts


async def test_silence_has_no_text() -> None:
    fake = whisper_backend()
    answer = await ask(fake, silence(40), response_format="verbose_json")
    assert answer.json()["text"] == "" and answer.json()["segments"] == [] and not fake.submitted
    assert answer.json()["usage"] == {"type": "duration", "seconds": 40}
    assert (await ask(fake, silence(40), response_format="srt")).text == ""


async def test_fields_reach_the_engine() -> None:
    fake = whisper_backend()
    await ask(
        fake, voice(3), language="German", prompt="Grüße", temperature="0.5", seed="7", top_k="5", top_p="0.9",
        repetition_penalty="1.1", max_completion_tokens="50", priority="3", stream="false", user="me",
    )  # fmt: skip
    [_, asked] = fake.submitted
    ids, prompt = tokens(), tokenizer().encode(" Grüße", add_special_tokens=False)
    assert asked.prompt.token_ids == [ids.start_of_prev, *prompt, ids.sot, ids.languages["de"], ids.transcribe]
    found = {name: getattr(asked.params, name) for name in ("temperature", "seed", "top_k", "top_p", "max_tokens")}
    assert found == {"temperature": 0.5, "seed": 7, "top_k": 5, "top_p": 0.9, "max_tokens": 50}
    assert asked.priority == 3 and getattr(asked.params, "repetition_penalty", None) == 1.1


@pytest.mark.parametrize("shape", ["json", "text"])
async def test_a_stream_has_the_text_of_each_window(shape: str) -> None:
    answer = await ask(whisper_backend(), speech(3, 3, 3), stream="true", response_format=shape)
    *deltas, done = events(answer.text)
    assert {each["type"] for each in deltas} == {"transcript.text.delta"} and len(deltas) == 3
    text = "Hello there. Hello there. Hello there."
    assert "".join(each["delta"] for each in deltas) == text
    assert done == {"type": "transcript.text.done", "text": text, "usage": {"type": "duration", "seconds": 79}}


async def test_a_stream_of_silence_ends_at_once() -> None:
    [done] = events((await ask(whisper_backend(), silence(5), stream="true")).text)
    assert (done["type"], done["text"]) == ("transcript.text.done", "")


async def test_json_with_a_data_url_as_batches_have_it() -> None:
    url = "data:audio/wav;base64," + base64.b64encode(wav(voice(2), 16_000)).decode()
    async with client(whisper_backend()) as http:
        answer = await http.post(PATH, json={"file_url": url, "response_format": "verbose_json", "seed": 3})
    assert answer.json()["text"] == "Hello there." and answer.json()["duration"] == 2.0


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"language": "xx"}, "language", "none of Whisper's"),
        ({"language": "fr"}, "language", "no token for language 'fr'"),
        ({"response_format": "yaml"}, "response_format", "Input should be"),
        ({"response_format": "srt", "stream": "true"}, "response_format", "is not streamed"),
        ({"timestamp_granularities[]": ["segment", "word"]}, "timestamp_granularities", "json has no words"),
        ({"timestamp_granularities[]": "word", "response_format": "srt"}, "timestamp_granularities", "verbose_json"),
        ({"timestamp_granularities[]": ["page"]}, "timestamp_granularities.0", "Input should be"),
        ({"temperature": "hot"}, "temperature", "not 'hot'"),
        ({"temperature": "3"}, "temperature", "less than or equal to 2"),
        ({"temperature": "NaN"}, "temperature", "not 'NaN'"),
        ({"stream": "maybe"}, "stream", "not 'maybe'"),
        ({"seed": "1.5"}, "seed", "not '1.5'"),
        ({"top_p": "0"}, "top_p", "greater than 0"),
        ({"to_language": "fr"}, "to_language", "English alone"),
        ({"model": "other"}, "model", "is not here"),
        ({"include[]": "logprobs"}, "include", "avg_logprob"),
        ({"chunking_strategy": '{"type": "server_vad"}'}, "chunking_strategy", "cut at silences"),
        ({"hotwords": "a"}, "hotwords", "prompt"),
        ({"file_url": "data:,"}, "file_url", "belongs to JSON"),
        ({"request_id": " "}, "request_id", "must be"),
    ],
)  # fmt: skip
async def test_a_wrong_field_is_named(fields: dict[str, Any], param: str, reason: str) -> None:
    fake = whisper_backend()
    answer = await ask(fake, voice(2), **fields)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404) and error["param"] == param and reason in error["message"], error
    assert not fake.submitted


async def test_words_are_refused_where_the_device_shows_none() -> None:
    fake = whisper_backend()
    assert isinstance(fake.model_info.encoder, SpeechInput)
    fake.model_info = replace(fake.model_info, encoder=replace(fake.model_info.encoder, aligns=False))
    fields = {"timestamp_granularities[]": "word", "response_format": "verbose_json"}
    error = (await ask(fake, voice(2), **fields)).json()["error"]
    assert error["param"] == "timestamp_granularities" and "not there on this device" in error["message"]
    assert not fake.submitted


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "file is missing"),
        ({"file_url": "https://example.com/a.wav"}, "fetches no addresses"),
        ({"file_url": "data:audio/wav,abc"}, "not in base64"),
        ({"file_url": "data:audio/wav;base64,?"}, "damaged base64"),
        ({"file_url": "data:audio/wav;base64,AAAA"}, "is no WAV"),
        ({"file_url": 5}, "file_url"),
    ],
)
async def test_wrong_json_is_refused(fields: dict[str, Any], reason: str) -> None:
    async with client(whisper_backend()) as http:
        answer = await http.post(PATH, json=fields)
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"]


async def test_what_other_clients_send_and_means_nothing_is_taken() -> None:
    """Empty fields of web forms, fields of vLLM and OpenAI with their defaults, a list of one."""
    fields = {
        "language": "", "prompt": "", "temperature": "", "stream": "", "response_format": "json", "n": "1",
        "chunking_strategy": "auto", "stream_include_usage": "true", "use_beam_search": "false", "to_language": "",
        "length_penalty": "1.0", "hotwords": "",
    }  # fmt: skip
    answer = await ask(whisper_backend(), voice(2), **fields)
    assert answer.status_code == 200, answer.text
    assert (await ask(whisper_backend(), voice(2), TRANSLATIONS, to_language="en")).status_code == 200
    assert (await ask(whisper_backend(), voice(2), to_language="de", language="de")).status_code == 200


async def test_a_file_that_is_no_audio_is_refused_with_the_reason() -> None:
    async with client(whisper_backend(), max_audio_seconds=3) as http:
        for content, reason in (
            (b"rubbish", "is no WAV"), (b"", "is empty"), (wav(voice(4), 16_000), "longer than 3 s")
        ):  # fmt: skip
            answer = await http.post(PATH, files={"file": ("a.wav", content)})
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"] == "file" and error["code"] == "invalid_audio"
            assert reason in error["message"]
        assert (await http.post(PATH, files=file_of(voice(2)))).json()["text"] == "Hello there."


@pytest.mark.parametrize("path", PATHS)
async def test_other_models_say_that_they_transcribe_nothing(path: str) -> None:
    async with client(FakeBackend(), voice(1)) as http:
        answer = await http.post(path, files=ANY)
    assert answer.status_code == 400 and "transcribes no audio" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat()),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", chat(max_tokens=1, model=None)),
        ("/api/chat", chat(model="fake/model")),
        ("/api/generate", {"model": "fake/model", "prompt": "Hi"}),
        ("/completion", {"prompt": "Hi"}),
    ],
)
async def test_a_model_that_transcribes_names_the_routes_to_use(path: str, body: dict[str, Any]) -> None:
    fake = whisper_backend()
    async with client(fake) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 400 and "/v1/audio/transcriptions" in answer.text, answer.text
    assert not fake.submitted


async def test_keys_are_asked_for_and_tenants_kept_apart() -> None:
    fake = whisper_backend()
    async with client(fake, voice(2), api_key=("one", "two")) as http:
        assert (await http.post(PATH, files=ANY)).status_code == 401
        for key in ("one", "two"):
            assert (await http.post(PATH, files=ANY, headers={"x-api-key": key})).status_code == 200
    assert len({each.prompt.cache_salt for each in fake.submitted}) == 2


async def test_a_caller_who_leaves_ends_all_requests() -> None:
    fake = whisper_backend(hang=8)
    async with client(fake, speech(3, 3, 3, 3)) as http:
        task = asyncio.create_task(http.post(PATH, files=ANY))
        while fake.hanging < 4:
            await asyncio.sleep(0)
        assert len(fake.running) == 4
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(50):
            await asyncio.sleep(0)
        assert not fake.running and len(fake.aborted) == 4
        service = http._transport.app.state.service  # type: ignore[attr-defined]
        assert not service.calls and service.capacity.held.completions == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_of_the_engine_is_an_error(stream: bool) -> None:
    fake = whisper_backend(fail_at=8, failure="out of order")
    answer = await ask(fake, speech(3, 3), stream=str(stream).lower())
    assert answer.status_code == 500 and "out of order" in answer.json()["error"]["message"]
    assert not fake.running


async def test_a_stream_that_fails_later_ends_with_the_error() -> None:
    fake = whisper_backend()
    async with client(fake, speech(3, 3, 3)) as http:
        service = http._transport.app.state.service  # type: ignore[attr-defined]
        fake.hang = 8

        async def free_one() -> None:
            while fake.hanging < 3:
                await asyncio.sleep(0)
            fake.hang = None
            fake.go_on.set()

        task = asyncio.create_task(free_one())
        answer = await http.post(PATH, files=ANY, data={"stream": "true"})
        await task
        assert len(events(answer.text)) == 4
        fake.hang, fake.go_on, fake.hanging = 8, asyncio.Event(), 0

        async def fail() -> None:
            while fake.hanging < 3:
                await asyncio.sleep(0)
            [call] = service.calls
            call.fail(ApiError(503, "the server is shutting down", code="shutting_down"))

        task = asyncio.create_task(fail())
        answer = await http.post(PATH, files=ANY, data={"stream": "true"})
        await task
        assert answer.status_code == 503 and not fake.running


async def test_a_small_server_takes_what_fits_and_refuses_the_rest() -> None:
    fake = whisper_backend(hang=8)
    async with client(fake, speech(3, 3, 3, 3), max_queued_requests=2) as http:
        task = asyncio.create_task(http.post(PATH, files=ANY))
        while fake.hanging < 2:
            await asyncio.sleep(0)
        assert len(fake.running) == 2
        refused = await http.post(PATH, files=ANY)
        assert refused.status_code == 429 and "retry-after" in refused.headers
        fake.hang = None
        fake.go_on.set()
        answer = await asyncio.wait_for(task, WAIT)
        assert answer.json()["text"].count("Hello") == 4


async def test_tokens_are_counted_and_the_routes_described() -> None:
    fake = whisper_backend()
    async with client(fake, voice(2)) as http:
        await http.post(PATH, files=ANY)
        metrics = (await http.get("/metrics")).text
        described = (await http.get("/openapi.json")).json()["paths"]
    assert any("generation_tokens" in line and not line.endswith(" 0.0") for line in metrics.splitlines())
    for path in PATHS:
        content = described[path]["post"]["requestBody"]["content"]
        form = content["multipart/form-data"]["schema"]
        assert form["properties"]["file"] == {"type": "string", "format": "binary"} and "file" in form["required"]
        assert "language" in form["properties"] and "application/json" in content
        assert {"application/json", "text/event-stream", "text/plain"} <= set(
            described[path]["post"]["responses"]["200"]["content"]
        )
    assert json.dumps(described)


async def test_the_page_learns_that_the_model_transcribes() -> None:
    for fake, wanted in ((whisper_backend(), True), (FakeBackend(tokenizer()), False)):
        async with client(fake) as http:
            index = (await http.get("/")).text
        assert ("<body data-transcribes>" in index) is wanted and "<body" in index
