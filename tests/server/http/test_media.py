"""Images, video and audio in all chat APIs, over a fake engine: real files, real decoding, a processor of the test."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quintet.media import reader
from quintet.media.decoding.decoder import MediaDecoder
from quintet.media.info import MediaInfo
from quintet.server.config import MEDIA_PATHS
from tests.helpers.media_files import MARK_ID, PLACEHOLDER, ROWS, PlaceholderProcessor, data_url, picture_file, png_bomb
from tests.media.audio.test_decode import RATE, SOUND, wav
from tests.media.decoding.files import video_file
from tests.server.fakes import MODEL, FakeBackend
from tests.server.http.serving import client

KINDS = ("image", "video", "audio")
PICTURE = picture_file("PNG", (9, 5))
PIXELS = np.asarray(Image.open(io.BytesIO(PICTURE)))
URL = data_url(PICTURE)
BASE64 = base64.b64encode(PICTURE).decode()
CONTENT = [
    {"type": "text", "text": "What"},
    {"type": "image_url", "image_url": {"url": URL}},
    {"type": "text", "text": "is it?"},
]
OPENAI = "/v1/chat/completions"


@pytest.fixture(scope="module")
def decoder() -> Iterator[MediaDecoder]:
    """One for all tests of the module: its processes take a while to start."""
    made = MediaDecoder()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def one_decoder(decoder: MediaDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MediaDecoder", lambda: decoder)


def seeing(**info: Any) -> tuple[FakeBackend, PlaceholderProcessor]:
    """A backend whose model takes all kinds, and its processor."""
    processor = PlaceholderProcessor()
    given = {"limits": dict.fromkeys(KINDS, 4), "placeholders": dict.fromkeys(KINDS, PLACEHOLDER), **info}
    fake = FakeBackend(media=MediaInfo(**given), media_processor=lambda: processor)
    fake.reply = fake.encode("a picture")
    return fake, processor


async def ask(fake: FakeBackend, path: str, body: dict[str, Any], status: int = 200, **settings: Any) -> Any:
    async with client(fake, **settings) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def image_url(url: str) -> dict[str, Any]:
    return user([{"type": "image_url", "image_url": {"url": url}}])


BODIES = {
    OPENAI: user(CONTENT),
    "/v1/responses": {"input": [{"role": "user", "content": [
        {"type": "input_text", "text": "What"}, {"type": "input_image", "image_url": URL, "detail": "low"},
        {"type": "input_text", "text": "is it?"},
    ]}]},
    "/v1/messages": {"max_tokens": 9, **user([
        {"type": "text", "text": "What"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": BASE64}},
        {"type": "text", "text": "is it?"},
    ])},
    "/api/chat": {"model": MODEL, "stream": False, "messages": [
        {"role": "user", "content": "What is it?", "images": [BASE64]}
    ]},
    "/api/generate": {"model": MODEL, "stream": False, "prompt": "What is it?", "images": [BASE64]},
}  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
async def test_a_picture_comes_to_the_engine_from_each_api(path: str) -> None:
    fake, processor = seeing()
    answer = await ask(fake, path, BODIES[path])
    assert "a picture" in str(answer)
    [(text, [medium], options)] = processor.calls
    assert medium.kind == "image" and np.array_equal(medium.data, PIXELS) and options == {}
    [submitted] = fake.submitted
    [item] = submitted.prompt.media
    [(first, stop)] = item.spans
    assert submitted.prompt.token_ids[first:stop] == [MARK_ID] * ROWS and submitted.prompt.text == text
    before = text[: text.index(PLACEHOLDER)]
    assert ("What" in before) == (path not in ("/api/chat", "/api/generate")) and "is it?" not in before


async def test_a_template_that_takes_parts_gets_one_for_each_medium_in_order() -> None:
    fake, processor = seeing(placeholders={})
    template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{% if p.type == 'text' %}{{ p.text }}{% else %}<media>({{ p.type }}){% endif %}"
        "{% endfor %}{% endif %}{% endfor %}"
    )
    parts = [
        {"type": "video_url", "video_url": {"url": data_url(video_file(20), "video/mp4")}}, *CONTENT,
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav(SOUND)).decode(), "format": "wav"}},
    ]  # fmt: skip
    await ask(fake, OPENAI, {**user(parts), "media_io_kwargs": {"video": {"num_frames": 4}}}, chat_template=template)
    [(text, media, _)] = processor.calls
    assert text == "<media>(video)What<media>(image)is it?<media>(audio)"
    assert [each.kind for each in media] == ["video", "image", "audio"]
    assert media[0].data.shape == (4, 48, 64, 3) and media[0].rate == pytest.approx(2.0)
    assert media[2].data.shape == (len(SOUND) * 16000 // RATE,) and media[2].rate == 16000


async def test_options_of_the_processor_are_the_operators_and_the_requests() -> None:
    fake, processor = seeing(processor_options={"max_pixels": 9, "size": 1})
    await ask(fake, OPENAI, {**user(CONTENT), "mm_processor_kwargs": {"size": 2}})
    assert processor.calls[0][2] == {"max_pixels": 9, "size": 2}


async def test_a_tools_result_may_have_a_picture() -> None:
    fake, processor = seeing()
    call = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
    image = BODIES["/v1/messages"]["messages"][0]["content"][1]  # type: ignore[index]
    messages = [
        {"role": "user", "content": "Look."}, {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [image]}]},
    ]  # fmt: skip
    await ask(fake, "/v1/messages", {"max_tokens": 5, "messages": messages})
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    out = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_image", "image_url": URL}]}
    await ask(fake, "/v1/responses", {"input": [{"role": "user", "content": "Look."}, call, out]})
    assert [len(media) for _, media, _ in processor.calls] == [1, 1]


async def test_a_stored_response_keeps_its_picture() -> None:
    fake, processor = seeing()
    async with client(fake) as http:
        first = (await http.post("/v1/responses", json=BODIES["/v1/responses"])).json()
        items = (await http.get(f"/v1/responses/{first['id']}/input_items")).json()["data"]
        again = await http.post("/v1/responses", json={"input": "And now?", "previous_response_id": first["id"]})
    assert again.status_code == 200, again.text
    assert any(part == {"type": "input_image", "image_url": URL, "detail": "low"} for part in items[0]["content"])
    assert [len(media) for _, media, _ in processor.calls] == [1, 1]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", user(CONTENT)), ("/v1/messages/count_tokens", {"messages": BODIES["/v1/messages"]["messages"]}),
        ("/v1/responses/input_tokens", BODIES["/v1/responses"]),
    ],
)  # fmt: skip
async def test_tokens_of_pictures_are_counted(path: str, body: dict[str, Any]) -> None:
    fake, _ = seeing()
    with_picture = str(await ask(fake, path, body))
    sees_none = FakeBackend(media=MediaInfo())
    refused = await ask(sees_none, path, body, 400)
    assert "takes text alone" in str(refused)
    assert with_picture


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("data:image/png;base64,????", "is not base64"), (data_url(b"<svg/>", "image/svg+xml"), "SVG"),
        (data_url(b"nonsense"), "no image of a known format"), (data_url(png_bomb(50_000, 50_000)), "pixels"),
        (data_url(PICTURE[:50]), "damaged"), (data_url(PICTURE, "text/html"), "'text/html'"),
        ("https://example.com/a.png", "--allowed-media-domains"), ("file:///etc/passwd", "--allowed-local-media-path"),
        ("http://169.254.169.254/latest", "--allowed-media-domains"), ("a.png", "must be a data: URL"),
    ],
)  # fmt: skip
async def test_what_cannot_be_used_is_a_400_that_names_the_part(url: str, says: str) -> None:
    fake, processor = seeing()
    body = user([{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": url}}])
    error = (await ask(fake, OPENAI, body, 400))["error"]
    assert error["param"] == "messages[0].content[1]" and error["code"] == "invalid_media"
    assert says in error["message"] and len(error["message"]) < 500
    assert not processor.calls and not fake.submitted and not fake.running


@pytest.mark.parametrize("path", BODIES)
async def test_models_of_text_refuse_pictures_and_say_what_to_do(path: str) -> None:
    message = str(await ask(FakeBackend(), path, BODIES[path], 400))
    assert "this model takes text alone" in message and "choose a model that takes images" in message


async def test_counts_are_limited_by_kind() -> None:
    fake, processor = seeing(limits={"image": 1, "video": 0})
    error = (await ask(fake, OPENAI, user(CONTENT * 2), 400))["error"]
    assert "2 items of the kind image, and 1 are the most (--limit-mm-per-prompt)" in error["message"]
    video = user([{"type": "video_url", "video_url": {"url": data_url(video_file(20), "video/mp4")}}])
    for body in (video, user([{"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AA=="}}])):
        assert "this model takes text and image" in (await ask(fake, OPENAI, body, 400))["error"]["message"]
    assert not processor.calls


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([{"type": "image_url"}], "image_url is missing"),
        ([{"type": "image_url", "image_url": 5}], "must be an object"),
        ([{"type": "image_url", "image_url": {"url": ""}}], "must be an object"),
        ([{"type": "image_url", "image_url": {"url": URL, "detail": "most"}}], "must be one of auto, low, high"),
        ([{"type": "image_url", "image_url": {"url": URL}, "uuid": 7}], "uuid must be text"),
        ([{"type": "image_url", "image_url": None, "uuid": "x"}], "not kept by their uuid alone"),
        ([{"type": "input_audio", "input_audio": "x"}], "must be an object"),
        ([{"type": "input_audio", "input_audio": {"data": "AA==", "format": "midi"}}], "must be one of wav, mp3"),
        ([{"type": "image_pil", "image_pil": "x"}], "Python programs"),
        ([{"type": "image_embeds", "image_embeds": "AA=="}], "--enable-mm-embeds"),
        ([{"type": "imge_url", "image_url": {"url": URL}}], "known: text, image_url"),
        ([{"type": "image_url", "image_url": {"url": data_url(PICTURE)}}, 5], "parts of type 'int'"),
    ],
)  # fmt: skip
async def test_damaged_parts_are_refused_by_name(content: Any, says: str) -> None:
    fake, _ = seeing()
    assert says in (await ask(fake, OPENAI, user(content), 400))["error"]["message"]


async def test_a_system_message_has_no_pictures_and_a_prompt_with_them_is_not_cut() -> None:
    fake, _ = seeing()
    system = {"messages": [{"role": "system", "content": CONTENT}, {"role": "user", "content": "x"}]}
    assert "put it into one of the user" in (await ask(fake, OPENAI, system, 400))["error"]["message"]
    error = (await ask(fake, OPENAI, {**user(CONTENT), "truncate_prompt_tokens": 5}, 400))["error"]
    assert error["param"] == "truncate_prompt_tokens"
    long = user([*CONTENT, {"type": "text", "text": "a word " * 600}])
    assert (await ask(fake, OPENAI, long, 400))["error"]["code"] == "context_length_exceeded"


async def test_bodies_may_be_as_large_as_uploads_where_the_model_sees() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "BMP")
    body, limits = (
        image_url(data_url(file.getvalue(), "image/bmp")),
        {"max_body_bytes": 9_000, "max_upload_bytes": 30_000},
    )
    fake, processor = seeing()
    await ask(fake, OPENAI, body, **limits)
    assert np.array_equal(processor.calls[0][1][0].data, noise)
    assert (await ask(FakeBackend(), OPENAI, body, 413, **limits))["error"]["code"] == "request_too_large"
    error = (await ask(fake, OPENAI, image_url(URL + "A" * 30_000), 413, **limits))["error"]
    assert "--max-upload-bytes" in error["message"]
    await ask(fake, "/v1/completions", {"prompt": "x" * 9_000}, 413, **limits)


async def test_every_path_with_a_larger_limit_is_there() -> None:
    async with client(seeing()[0]) as http:
        for path in MEDIA_PATHS:
            assert (await http.post(path, json={})).status_code != 404, path


async def test_a_processor_that_refuses_is_a_400() -> None:
    fake, _ = seeing()
    error = (await ask(fake, OPENAI, user([*CONTENT, {"type": "text", "text": PLACEHOLDER}]), 400))["error"]
    assert "2 placeholders for 1 items" in error["message"] and error["param"] == "messages"
