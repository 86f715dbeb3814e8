"""Files that somebody spoilt: bytes that are changed anywhere, and numbers that a reader counts on."""

import json
import random
import struct
from collections.abc import Callable
from typing import Any

ODD = (0, 1, 2, 7, 31, 32, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63, 2**64 - 1)
TEXTS = (
    "",
    "x",
    "\0",
    "\n",
    "a" * 300,
    "é",
    "\udcff",
    "../../passwd",
    "<|im_end|>",
    "{{ 1 }}",
    "[[0-9]+",
    "▁",
    "1e999",
)
VALUES: tuple[Any, ...] = (*ODD, *TEXTS, None, True, -1, 0.5, float("inf"), [], {}, [[]], {"a": {}}, [1, "x", None])


def number(draw: random.Random, size: int) -> int:
    """One that is wrong where another is meant, in a file of so many bytes."""
    near = draw.choice((size, size // 2, 8, draw.randrange(2**16)))
    return max(0, draw.choice((*ODD, near, near + 1, near - 1, near * 2)))


# ------------------------------------------------------------------------------------------------------- any bytes


def _flip(raw: bytearray, draw: random.Random) -> None:
    for _ in range(draw.randint(1, 8)):
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)


def _overwrite(raw: bytearray, draw: random.Random) -> None:
    at, code = draw.randrange(len(raw)), draw.choice("BHIQ")
    width = struct.calcsize(f"<{code}")
    raw[at : at + width] = struct.pack(f"<{code}", number(draw, len(raw)) % (1 << 8 * width))


def _cut(raw: bytearray, draw: random.Random) -> None:
    del raw[draw.randrange(len(raw)) :]


def _remove(raw: bytearray, draw: random.Random) -> None:
    at = draw.randrange(len(raw))
    del raw[at : at + draw.choice((1, 4, 8, 64))]


def _insert(raw: bytearray, draw: random.Random) -> None:
    at = draw.randrange(len(raw))
    raw[at:at] = draw.randbytes(draw.choice((1, 4, 8, 64)))


def _repeat(raw: bytearray, draw: random.Random) -> None:
    first, at = draw.randrange(len(raw)), draw.randrange(len(raw))
    raw[at:at] = raw[first : first + draw.choice((8, 32, 256))]


BYTES: tuple[Callable[[bytearray, random.Random], None], ...] = (_flip, _overwrite, _cut, _remove, _insert, _repeat)


def spoilt(raw: bytes, draw: random.Random, beginning: int | None = None) -> bytes:
    """Some changes, most of them in the first so many bytes."""
    head, rest = bytearray(raw[:beginning]), raw[beginning:] if beginning is not None else b""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        if head:
            draw.choice(BYTES)(head, draw)
    return bytes(head) + rest


# ------------------------------------------------------------------------------------------------------ a JSON object


def changed(said: Any, draw: random.Random) -> Any:
    """The same object with some of its entries, at any depth, replaced, removed, exchanged or added."""
    made = json.loads(json.dumps(said))
    for _ in range(draw.choice((1, 1, 2, 3))):
        _change(made, draw)
    return made


def _change(made: Any, draw: random.Random) -> None:
    places = list(_places(made))
    holder, key = draw.choice(places)
    way = draw.random()
    if way < 0.6:
        holder[key] = json.loads(json.dumps(draw.choice(VALUES)))  # its own: what is put in may be changed later
    elif way < 0.75:
        del holder[key]
    elif way < 0.9:
        other, theirs = draw.choice(places)
        holder[key] = json.loads(json.dumps(other[theirs])) if other is not holder or theirs != key else None
    elif isinstance(holder, dict):
        holder[draw.choice(TEXTS)] = json.loads(json.dumps(draw.choice(VALUES)))


def _places(said: Any) -> list[tuple[Any, Any]]:
    """Every entry of every object and list within."""
    found, stack = [], [said]
    while stack:
        each = stack.pop()
        keys = list(each) if isinstance(each, dict) else list(range(len(each)))
        found += [(each, key) for key in keys]
        stack += [each[key] for key in keys if isinstance(each[key], dict | list)]
    return found or [({"": None}, "")]


def safetensors(header: dict[str, Any], data: bytes, draw: random.Random) -> bytes:
    """A file of which the header, its length or any byte is wrong; some are right."""
    way = draw.random()
    said = header if way < 0.15 else changed(header, draw) if way < 0.4 else _moved(header, draw, len(data))
    raw = json.dumps(said).encode(errors="replace")
    size = len(raw) if way < 0.95 else number(draw, len(raw))
    whole = struct.pack("<Q", size) + raw + data
    return spoilt(whole, draw, 8 + len(raw)) if way > 0.85 else whole


WIDTHS = (("F64", "I64"), ("F32", "I32", "U32"), ("F16", "BF16", "I16"), ("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"))
ENDS = (".weight", ".absmax", ".scales", ".qweight", "_scale", "_packed", "_shape", ".bias", ".nested_absmax")


def _moved(header: dict[str, Any], draw: random.Random, size: int) -> dict[str, Any]:
    """Tensors of other types, shapes, places and names, most of which fit together."""
    made = json.loads(json.dumps(header))
    for _ in range(draw.choice((1, 1, 2, 3))):
        names = [name for name in made if name != "__metadata__"]
        name, other = draw.choice(names), draw.choice(names)
        _move(made, name, other, draw, size)
    return made


def _move(made: dict[str, Any], name: str, other: str, draw: random.Random, size: int) -> None:
    entry, way = made[name], draw.randrange(10)
    if way == 0:
        entry["dtype"] = draw.choice(("F64", "F32", "BF16", "I64", "I32", "U8", "BOOL", "F8_E8M0", "F4", "X"))
    elif way in (1, 2):
        alike = next((width for width in WIDTHS if entry["dtype"] in width), (entry["dtype"],))
        entry["dtype"] = draw.choice(alike)
    elif way in (3, 4):
        shape = entry["shape"]
        entry["shape"] = draw.choice((shape[::-1], [*shape, 1], [1, *shape], [_count(shape)], made[other]["shape"], []))
    elif way == 5:
        places = ([0, 0], [0, number(draw, size)], [size, 0], made[other]["data_offsets"])
        entry["data_offsets"] = draw.choice(places)
    elif way == 6:
        made[name], made[other] = made[other], entry
    elif way == 7:
        stem = name.rpartition(".")[0]
        made[draw.choice((stem + draw.choice(ENDS), name.replace("0", "7"), name[:-3]))] = made.pop(name)
    elif way == 8:
        del made[name]
    else:
        made[name.rpartition(".")[0] + draw.choice(ENDS)] = dict(entry)


def _count(shape: list[int]) -> int:
    count = 1
    for each in shape:
        count *= each
    return count
