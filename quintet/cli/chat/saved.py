"""Files of conversations: {"messages": [...]}, messages as in OpenAI's API."""

import json
from pathlib import Path
from typing import Any

MAX_FILE = 16 * 2**20  # bytes
_ROLES = ("system", "user", "assistant", "tool")


def read_messages(path: str) -> list[dict[str, Any]]:
    """Returns the messages of a saved conversation. ValueError says why a file holds none."""
    file = Path(path).expanduser()
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
    return isinstance(value.get("content"), str) or bool(value.get("tool_calls"))


def write_messages(path: str, messages: list[dict[str, Any]]) -> None:
    """Writes a conversation. ValueError if the path is of another file than a saved conversation."""
    file = Path(path).expanduser()
    try:
        if file.exists():
            read_messages(path)
        file.write_text(json.dumps({"messages": messages}, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot save to {path!r}: {error.strerror or error}; give the path of a new file") from None
    except ValueError:
        raise ValueError(f"{path!r} is there and is no saved conversation; give another name") from None
