"""Media of a prompt, fetched and decoded: their order, their sum, and the place of what cannot be used."""

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save

from quintet.media import reader
from quintet.media.decoding.decoder import MediaDecoder
from quintet.media.errors import MediaError
from quintet.media.fetch.http import FetchRules
from quintet.media.info import MediaInfo
from quintet.media.parts import MediaPart
from quintet.media.reader import MediaReader
from tests.helpers.media_files import data_url, http_host, picture_file, response
from tests.media.decoding.files import video_file

LOOPBACK = "127.0.0.1"
INFO = MediaInfo(limits={"image": 3, "video": 1, "audio": 1}, embeds_width=8)


@pytest.fixture(scope="module")
def decoder() -> Iterator[MediaDecoder]:
    made = MediaDecoder()
    yield made
    made.close()


@pytest.fixture
def read(decoder: MediaDecoder) -> Iterator[MediaReader]:
    rules = FetchRules(("images.example",), lambda address: address == LOOPBACK, lambda *asked: [LOOPBACK])
    made = MediaReader(INFO, rules, decoder)
    yield made
    if made._fetchers is not None:
        made._fetchers.shutdown()


def image(url: str, where: str = "here") -> MediaPart:
    return MediaPart("image", where, url)


def test_media_come_in_the_order_of_their_parts_wherever_they_are(read: MediaReader) -> None:
    sizes = [(3, 1), (4, 1), (5, 1), (6, 1)]

    def answer(head: bytes) -> list[bytes]:
        width = int(head.split(b"/")[1].split(b" ")[0])
        return [response(picture_file("PNG", (width, 1)))]

    with http_host(answer) as host:
        urls = [f"http://images.example:{host.port}/3", data_url(picture_file("PNG", (4, 1))),
                f"http://images.example:{host.port}/5", f"http://images.example:{host.port}/6"]  # fmt: skip
        found = read.read([image(url) for url in urls])
    assert [each.data.shape for each in found] == [(1, width, 3) for width, _ in sizes]


def test_the_part_that_cannot_be_used_is_named(read: MediaReader) -> None:
    whole = data_url(picture_file())
    for wrong in ("http://images.example:1/", "http://evil.example/", "data:image/png;base64,AAAA", "x"):
        parts = [image(whole, "first"), image(wrong, "second"), image(whole, "third")]
        with pytest.raises(MediaError) as error:
            read.read(parts)
        assert error.value.where == "second"


def test_all_media_of_a_prompt_are_bounded_together(read: MediaReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_DECODED_BYTES", 6 * 4 * 3 * 2)
    two = [image(data_url(picture_file()), "one"), image(data_url(picture_file()), "two")]
    assert len(read.read(two)) == 2
    with pytest.raises(MediaError) as error:
        read.read([*two, image(data_url(picture_file("PNG", (1, 1))), "three")])
    assert error.value.where == "three"


def test_counts_of_each_kind_are_limited(read: MediaReader) -> None:
    read.check_counts(["image"] * 3 + ["video"])
    for kinds, says in (
        (["image"] * 4, "3 are the most"),
        (["video"] * 2, "1 are the most"),
        (["smell"], "this model"),
    ):
        with pytest.raises(MediaError, match=says):
            read.check_counts(kinds)
    with pytest.raises(MediaError, match="takes text alone"):
        MediaReader(MediaInfo()).check_counts(["image"])


def test_frames_may_come_as_images(read: MediaReader) -> None:
    files = [picture_file("JPEG", (8, 6)), picture_file("JPEG", (8, 6), quality=20)]
    url = "data:video/jpeg;base64," + ",".join(data_url(each).split(",")[1] for each in files)
    [video] = read.read([MediaPart("video", "here", url)])
    want = np.stack([np.asarray(Image.open(io.BytesIO(each)).convert("RGB")) for each in files])
    assert np.array_equal(video.data, want) and video.rate == 0.0
    [one] = read.read([MediaPart("video", "here", data_url(files[0], "video/jpeg"))])
    assert np.array_equal(one.data, want[:1])
    odd = url + "," + data_url(picture_file("JPEG", (9, 6))).split(",")[1]
    with pytest.raises(MediaError, match="give them one size"):
        read.read([MediaPart("video", "here", odd)])


def test_options_of_a_request_go_before_the_operators(decoder: MediaDecoder) -> None:
    info = MediaInfo(
        {"video": 1, "image": 1}, io_options={"video": {"num_frames": 5}, "image": {"rgba_background_color": [1, 2, 3]}}
    )
    given = MediaReader(info, decoder=decoder)
    clear = data_url(picture_file("PNG", (1, 1), "RGBA"))
    parts = [MediaPart("video", "here", data_url(video_file(20), "video/mp4")), image(clear)]
    video, picture = given.read(parts)
    assert video.data.shape[0] == 5 and picture.data.shape == (1, 1, 3)
    assert given.read(parts, {"video": {"num_frames": 2}})[0].data.shape[0] == 2
    assert given.read(parts, {"video": {"num_frames": -1, "fps": 2}})[0].data.shape[0] == 4


@pytest.mark.parametrize(
    "options",
    [{"video": {"num_frames": 0}}, {"video": {"num_frames": 10**9}}, {"video": {"num_frames": True}},
     {"video": {"fps": "x"}}, {"video": {"fps": float("nan")}}, {"video": {"frames": 3}},
     {"image": {"rgba_background_color": [1, 2]}},
     {"image": {"rgba_background_color": [1, 2, 300]}}, {"images": {}}, {"video": 5}],
)  # fmt: skip
def test_wrong_options_are_refused(read: MediaReader, options: Any) -> None:
    with pytest.raises(ValueError, match="media_io_kwargs"):
        read.read([image(data_url(picture_file()))], options)


def test_embeddings_are_rows_of_the_width_and_nothing_else(read: MediaReader) -> None:
    def part(given: Any) -> MediaPart:
        return MediaPart("image", "here", embeds=given)

    rows = np.arange(24, dtype=np.float32).reshape(3, 8)
    text = data_url(save({"x": rows})).split(",")[1]
    for given in (rows, rows[None], rows.astype(np.float16), text):
        assert np.array_equal(read.read([part(given)])[0].data, rows)
    two = data_url(save({"x": rows, "y": rows})).split(",")[1]
    for wrong in (rows[:, :7], rows[0], rows[:0], rows.astype(np.int64), rows * np.nan, "AAAA", text[:-8], two, {}, 5):
        with pytest.raises(MediaError):
            read.read([part(wrong)])
    with pytest.raises(MediaError, match="enable-mm-embeds"):
        MediaReader(MediaInfo({"image": 1})).read([part(rows)])
