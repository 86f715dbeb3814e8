"""Files of conversations: what is read from them, and that writing loses nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from quintet.cli.chat.saved import read_messages, write_messages

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TALK: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [CALL]}]


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    file, link = tmp_path / "talk.json", tmp_path / "link.json"
    link.symlink_to(file)
    write_messages(str(file), TALK)
    write_messages(str(link), TALK[:1])
    assert read_messages(str(file)) == TALK[:1] and link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [link, file]


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_a_message_without_text_is_refused(role: str, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    file.write_text(json.dumps({"messages": [{"role": role, "tool_calls": [CALL]}]}))
    with pytest.raises(ValueError, match="cannot load .* give a file that /save wrote"):
        read_messages(str(file))


def test_an_earlier_file_stays_if_a_message_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    write_messages(str(file), TALK)
    with pytest.raises(ValueError, match="cannot save to .*: a message has no form in UTF-8"):
        write_messages(str(file), [{"role": "user", "content": "\ud800"}])
    assert read_messages(str(file)) == TALK and list(tmp_path.iterdir()) == [file]


def test_a_home_of_an_unknown_user_is_a_path_that_is_absent() -> None:
    with pytest.raises(ValueError, match="cannot load '~no-such-user/x'"):
        read_messages("~no-such-user/x")
    with pytest.raises(ValueError, match="cannot save to '~no-such-user/x'"):
        write_messages("~no-such-user/x", TALK)
