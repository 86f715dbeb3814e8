"""GGUF files of any content, right or wrong, written byte by byte by the format's description."""

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class Row(NamedTuple):
    """A line of the tensors' table, its axes as the file has them: the first is that whose neighbours lie together."""

    name: str
    axes: Sequence[int]
    kind: int
    offset: int


def text(content: str) -> bytes:
    raw = content.encode(errors="surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def value(content: Any, kind: int | None = None) -> bytes:
    """With its type before it."""
    if isinstance(content, bytes):  # as it is
        return content
    if isinstance(content, list):
        inner = kind if kind is not None else _kind(content[0])
        items = b"".join(value(each, inner)[4:] for each in content)
        return struct.pack("<IIQ", ARRAY, inner, len(content)) + items
    kind = _kind(content) if kind is None else kind
    return struct.pack("<I", kind) + (text(content) if kind == STRING else struct.pack(f"<{CODES[kind]}", content))


def _kind(content: Any) -> int:
    return {bool: BOOL, int: U32, float: F32, str: STRING}[type(content)]


def header(
    metadata: Mapping[str, Any], table: Sequence[Row] = (), version: int = 3, counts: tuple[int, int] | None = None
) -> bytes:
    """All before the tensors, with the padding to 32 bytes; `counts` instead of those that are true."""
    tensors, entries = counts or (len(table), len(metadata))
    made = b"GGUF" + struct.pack("<IQQ", version, tensors, entries)
    made += b"".join(text(key) + value(each) for key, each in metadata.items())
    for row in table:
        made += text(row.name) + struct.pack(f"<I{len(row.axes)}Q", len(row.axes), *row.axes)
        made += struct.pack("<IQ", row.kind, row.offset)
    return made + bytes(-len(made) % 32)
