"""Files of conversations: {"messages": [...]}, messages as in OpenAI's API."""

import json
import os
from pathlib import Path
from typing import Any

from quintet.cli.chat.pictures import is_content

MAX_FILE = 2**27  # bytes; pictures are in it
_ROLES = ("system", "user", "assistant", "tool")


def read_messages(path: str) -> list[dict[str, Any]]:
    """Returns the messages of a saved conversation. ValueError says why a file holds none."""
    file = Path(os.path.expanduser(path))
    try:
        if file.stat().st_size > MAX_FILE:
            raise ValueError(f"has more than {MAX_FILE} bytes")
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot load {path!r}: {error}; give a file that /save wrote") from None
    messages = found.get("messages") if isinstance(found, dict) else None
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise ValueError(f'cannot load {path!r}: it holds no {{"messages": [...]}}; give a file that /save wrote')
    return messages


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("role") not in _ROLES:
        return False
    return is_content(value.get("content")) or (value["role"] == "assistant" and bool(value.get("tool_calls")))


def write_messages(path: str, messages: list[dict[str, Any]]) -> None:
    """Writes a conversation atomically. ValueError if the path is of another file than a saved conversation."""
    file = Path(os.path.realpath(os.path.expanduser(path)))
    try:
        if file.exists():
            read_messages(path)
    except ValueError:
        raise ValueError(f"{path!r} is there and is no saved conversation; give another name") from None
    try:
        content = (json.dumps({"messages": messages}, ensure_ascii=False, indent=2) + "\n").encode()
        part = file.with_name(f"{file.name}.part")
        try:
            part.write_bytes(content)
            os.replace(part, file)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"cannot save to {path!r}: {error.strerror or error}; give the path of a new file") from None
    except UnicodeEncodeError as error:
        raise ValueError(
            f"cannot save to {path!r}: a message has no form in UTF-8 ({error}); /clear starts afresh"
        ) from None
