"""Bytes that URLs name: data:, and files of one folder."""

import base64
import os
from pathlib import Path

import pytest

from quintet.media.errors import MediaError
from quintet.media.fetch import sources
from quintet.media.fetch.sources import MAX_BYTES, MediaSources, decode_base64
from tests.helpers.media_files import data_url


def test_a_data_url_gives_its_bytes() -> None:
    assert MediaSources().read("image", data_url(b"\0\1picture")) == [b"\0\1picture"]
    assert MediaSources().read("image", "DATA:IMAGE/PNG;charset=x;Base64," + "YWJj\nZA==") == [b"abcd"]
    assert MediaSources().read("audio", data_url(b"x", "audio/wav")) == [b"x"]
    frames = ",".join(base64.b64encode(each).decode() for each in (b"one", b"two"))
    assert MediaSources().read("video", f"data:video/jpeg;base64,{frames}") == [b"one", b"two"]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("data:image/png;base64,", "is empty"), ("data:image/png;base64,====", "not base64"),
        ("data:image/png;base64,YW", "not base64"), ("data:image/png;base64,YWJj!", "not base64"),
        ("data:image/png;base64,YWJjé", "not base64"), ("data:image/png;base64,YW==Jj", "not base64"),
        ("data:image/png;base64,YWJj_-", "not base64"), ("data:image/png;base64,%59", "not base64"),
        ("data:image/png,abc", "not base64; write"), ("data:;base64", "without a comma"), ("data:", "without a comma"),
        ("data:" + "x" * 300 + ",YQ==", "without a comma"), ("data:text/html;base64,YQ==", "'text/html'"),
        ("data:image/svg+xml;base64,YQ==", "SVG"), ("data:video/mp4;base64,YQ==", "'video/mp4'"),
        ("", "must be a data: URL"), ("picture.png", "must be a data: URL"), ("ftp://x/y", "must be a data: URL"),
        ("javascript:alert(1)", "must be a data: URL"), ("/etc/passwd", "must be a data: URL"),
        ("file:///etc/passwd", "no folder of files is allowed"), ("https://example.com/x", "none is allowed"),
    ],
)  # fmt: skip
def test_other_urls_are_refused_with_the_reason(url: str, says: str) -> None:
    with pytest.raises(MediaError) as error:
        MediaSources().read("image", url)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_base64_is_bounded_before_it_is_decoded() -> None:
    with pytest.raises(MediaError, match="more than 10 bytes"):
        decode_base64("!" * 21, 10)
    with pytest.raises(MediaError, match="has 12 bytes, and 10"):
        decode_base64(base64.b64encode(b"x" * 12).decode(), 10)


def test_files_of_the_folder_are_read_and_no_others(tmp_path: Path) -> None:
    folder, outside = tmp_path / "pictures", tmp_path / "secret.png"
    folder.mkdir()
    outside.write_bytes(b"secret")
    (folder / "a b.png").write_bytes(b"picture")
    (folder / "inner").symlink_to(folder / "a b.png")
    (folder / "out").symlink_to(outside)
    (folder / "up").symlink_to(tmp_path)
    (folder / "loop").symlink_to(folder / "loop")
    os.mkfifo(folder / "pipe")
    given = MediaSources(local_path=str(folder))
    for name in ("a%20b.png", "inner", "../pictures/inner", "./inner"):
        assert given.read("image", f"file://{folder}/{name}") == [b"picture"]
    assert given.read("image", f"file://localhost{folder}/inner") == [b"picture"]
    wrong = [
        "out",
        "up/secret.png",
        "../secret.png",
        "..%2Fsecret.png",
        "loop",
        "pipe",
        "",
        "nothing",
        "a\0b",
        "x" * 5000,
    ]
    urls = [f"file://{folder}/{name}" for name in wrong]
    urls += [f"file://evil{folder}/inner", f"file:{outside}", f"file://{tmp_path}/pictures2/x", "file:inner", "file://",
             "file:///", "file:///dev/zero", "file:///proc/self/environ", f"FILE://{outside}"]  # fmt: skip
    for url in urls:
        with pytest.raises(MediaError) as error:
            given.read("image", url)
        assert "secret" not in str(error.value)


def test_a_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large").write_bytes(b"x" * 11)
    monkeypatch.setattr(sources, "MAX_BYTES", {**MAX_BYTES, "image": 10})
    with pytest.raises(MediaError, match="has 11 bytes, and 10 is the most"):
        MediaSources(local_path=str(tmp_path)).read("image", f"file://{tmp_path}/large")
