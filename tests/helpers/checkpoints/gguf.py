"""GGUF files of any content, right or wrong, written byte by byte by the format's description."""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from quintet.gguf.file import read
from quintet.gguf.tensor_types import KINDS, TensorType

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


FUSED = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")}


def joined(path: Path, to: Path, groups: Mapping[str, Sequence[str]] = FUSED) -> Path:
    """The same file with the rows of some tensors over one another, of each expert where there are experts."""
    made = _tensors(path)
    for whole, parts in groups.items():
        for name in [name for name in made if f".{parts[0]}." in name]:
            found = [made.pop(name.replace(parts[0], each)) for each in parts]
            kind, shape, _ = found[0]
            stacks = shape[0] if len(shape) == 3 else 1
            cuts = [[data[i * len(data) // stacks : (i + 1) * len(data) // stacks] for _, _, data in found]
                    for i in range(stacks)]  # fmt: skip
            axis = 1 if len(shape) == 3 else 0
            rows = sum(each[1][axis] for each in found)
            new = (*shape[:axis], rows, *shape[axis + 1 :])
            made[name.replace(parts[0], whole)] = kind, new, b"".join(b"".join(each) for each in cuts)
    return _rewritten(path, to, made)


def requantized(path: Path, to: Path, name: str) -> Path:
    """The same file with its matrices in F16 as gguf's package quantizes them to the type of that name."""
    kind, made = GGMLQuantizationType[name], _tensors(path)
    for tensor, (old, shape, data) in made.items():
        if old.name == "F16" and len(shape) > 1:
            rows = np.frombuffer(data, np.float16).reshape(shape).astype(np.float32)
            made[tensor] = KINDS[kind], shape, quantize(rows, kind).tobytes()
    return _rewritten(path, to, made)


Tensors = dict[str, tuple[TensorType, tuple[int, ...], bytes]]


def _tensors(path: Path) -> Tensors:
    raw = path.read_bytes()
    return {name: (each.kind, each.shape, raw[each.start : each.start + each.size])
            for name, each in read(path).tensors.items()}  # fmt: skip


def _rewritten(path: Path, to: Path, made: Tensors) -> Path:
    """The same file with these tensors instead of its own."""
    raw, first = path.read_bytes(), next(iter(read(path).tensors))
    entries, metadata = struct.unpack("<Q", raw[16:24])[0], raw[24 : raw.index(text(first))]
    table, data = b"", b""
    numbers = {kind.name: number for number, kind in KINDS.items()}
    for name, (kind, shape, each) in made.items():
        table += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], numbers[kind.name], len(data))
        data += each + bytes(-len(each) % 32)
    start = b"GGUF" + struct.pack("<IQQ", 3, len(made), entries) + metadata + table
    to.write_bytes(start + bytes(-len(start) % 32) + data)
    return to
