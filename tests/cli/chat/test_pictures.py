"""Pictures of terminal messages: files become parts, and what is no picture is refused."""

import base64
from pathlib import Path

import pytest

from quintet.cli.chat import pictures
from quintet.cli.chat.pictures import content_of, picture_part
from quintet.cli.chat.saved import read_messages, write_messages


def test_a_file_is_a_part_with_its_bytes(tmp_path: Path) -> None:
    file = tmp_path / "a.jpg"
    file.write_bytes(b"bytes")
    url = picture_part(str(file))["image_url"]["url"]
    assert url == f"data:image/jpeg;base64,{base64.b64encode(b'bytes').decode()}"
    assert picture_part("https://example.com/a")["image_url"]["url"] == "https://example.com/a"


def test_what_is_no_picture_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "large.png").write_bytes(b"12345")
    monkeypatch.setattr(pictures, "MAX_PICTURE", 4)
    for name, why in (("a.txt", "has no name of a picture"), ("none.png", "cannot read .*No such file"),
                      ("large.png", "has more than 4 bytes")):  # fmt: skip
        with pytest.raises(ValueError, match=why):
            picture_part(str(tmp_path / name))


def test_conversations_with_pictures_are_saved(tmp_path: Path) -> None:
    part = picture_part("https://example.com/a")
    talk = [{"role": "user", "content": content_of("What is it?", [part])}]
    write_messages(str(tmp_path / "talk.json"), talk)
    assert read_messages(str(tmp_path / "talk.json")) == talk
    (tmp_path / "wrong.json").write_text('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}')
    with pytest.raises(ValueError, match="cannot load"):
        read_messages(str(tmp_path / "wrong.json"))
