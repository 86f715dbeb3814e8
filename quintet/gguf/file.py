"""The header of a GGUF file: its metadata, and where each tensor lies. Anybody may have written it."""

import functools
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quintet.gguf import whisper_cpp
from quintet.gguf.cursor import Array, CorruptFile, Cursor, format_name
from quintet.gguf.tensor_types import GGUFTensor, TensorType, sized

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes, where the file says nothing else
MAX_ALIGNMENT = 2**20
MAX_ENTRIES, MAX_TENSORS = 2**16, 2**17  # far beyond any model
MAX_KEY, MAX_NAME = 2**16 - 1, 255  # bytes; llama.cpp writes names of up to 63
MAX_AXES = 4
MIN_ENTRY, MIN_TENSOR = 13, 8 + 4 + 8 + 4 + 8  # bytes that one takes
MAX_CACHED_FILES = 8  # headers that stay in memory: configuration, tokenizer and weights are read from the same
MAX_SPLIT = 9999  # files of one model
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")

Value = int | float | bool | str | Array


@dataclass(frozen=True)
class GGUFFile:
    """Content of one file. Lists of its metadata are read from the file on access."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GGUFTensor]

    def floats(self, tensor: GGUFTensor) -> list[float]:
        """The numbers of a short tensor of F32."""
        with self.path.open("rb") as stream:
            stream.seek(tensor.start)
            raw = stream.read(tensor.size)
        return list(struct.unpack(f"<{tensor.size // 4}f", raw.ljust(tensor.size, b"\0")))


def read_metadata(path: Path) -> Mapping[str, Value]:
    """The key-value pairs of a file. ValueError says what is wrong with it; OSError that it cannot be opened."""
    return read(path).metadata


def read(path: Path) -> GGUFFile:
    """ValueError says in one line what of the file is damaged or not understood; OSError that it cannot be opened."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file; check the path")
    state = path.stat()
    try:
        return _read(path, (state.st_ino, state.st_mtime_ns, state.st_size))
    except CorruptFile as error:
        raise ValueError(f"{path}: {error}; fetch it again") from None


def is_gguf(path: Path) -> bool:
    """Returns whether a path is a file that begins with GGUF's magic, or with that of whisper.cpp's files."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(len(MAGIC)) in (MAGIC, whisper_cpp.MAGIC)


def files(path: Path) -> list[GGUFFile]:
    """The file, or all files that the model was split into, the first first; `path` is any of them."""
    given = read(path)
    count = given.metadata.get("split.count", 1)
    if count in (0, 1):
        return [given]
    found = [given if each == path else read(each) for each in split_names(path, count)]
    for number, each in enumerate(found):
        place = each.metadata.get("split.no"), each.metadata.get("split.count")
        if place != (number, count):
            raise ValueError(
                f"{each.path} says that it is number {place[0]} of {place[1]} files, counted from 0, and its name says "
                f"{number} of {count}; fetch it again"
            )
    _check_split(found)
    return found


def split_names(path: Path, count: Any) -> list[Path]:
    """The files of a model that was split into so many, one of which this is; ValueError if it is not called so."""
    named = SPLIT.fullmatch(path.name)
    if named is None or type(count) is not int or not 1 <= count <= MAX_SPLIT or int(named[3]) != count:
        raise ValueError(
            f"{path} is one of {count} files of a model, and its name does not say so, as in name-00001-of-00002.gguf; "
            "give the files the names that they were published with"
        )
    return [path.with_name(f"{named[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def _check_split(found: list[GGUFFile]) -> None:
    names: set[str] = set()
    for each in found:
        twice = names & set(each.tensors)
        if twice:
            raise ValueError(
                f"{each.path}: tensor {format_name(min(twice))} is in another file of the model too; fetch them again"
            )
        names |= set(each.tensors)
    count = found[0].metadata.get("split.tensors.count", len(names))
    if count != len(names):
        raise ValueError(f"{found[0].path} and its neighbours hold {len(names)} tensors, not {count}; fetch them again")


@functools.lru_cache(maxsize=MAX_CACHED_FILES)
def _read(path: Path, state: tuple[int, ...]) -> GGUFFile:
    """`state`: identity of the file's content, for the cache."""
    with path.open("rb") as stream:
        size = stream.seek(0, 2)
        if size < 24:
            raise CorruptFile(f"it has {size} bytes, fewer than a GGUF file's beginning")
        data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = Cursor(data)
    if data[: len(MAGIC)] == whisper_cpp.MAGIC:
        return GGUFFile(path, *whisper_cpp.read_whisper_cpp(cursor))
    tensors, entries = _beginning(cursor)
    metadata = _metadata(cursor, entries)
    return GGUFFile(path, metadata, _tensors(cursor, tensors, _alignment(metadata)))


def _beginning(cursor: Cursor) -> tuple[int, int]:
    """Reads the header: the numbers of tensors and of metadata entries."""
    if cursor.data[: len(MAGIC)] != MAGIC:
        raise CorruptFile(f"it begins with {cursor.data[: len(MAGIC)]!r}, not with {MAGIC!r}, so it is no GGUF file")
    cursor.at = len(MAGIC)
    version = cursor.number("I", "the version")
    if version not in VERSIONS:
        swapped = struct.unpack(">I", struct.pack("<I", version))[0] in VERSIONS
        raise CorruptFile(
            "it is big-endian, and quintet reads little-endian files"
            if swapped
            else f"it is of GGUF version {version}, and quintet reads versions 2 and 3"
        )
    tensors, entries = cursor.number("Q", "the number of tensors"), cursor.number("Q", "the number of entries")
    room = cursor.end - cursor.at
    for count, most, least, what in (
        (tensors, MAX_TENSORS, MIN_TENSOR, "tensors"),
        (entries, MAX_ENTRIES, MIN_ENTRY, "metadata entries"),
    ):
        if count > min(most, room // least):
            raise CorruptFile(f"it says that it holds {count} {what}, more than it has room for or a model has")
    return tensors, entries


def _metadata(cursor: Cursor, count: int) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for index in range(count):
        key = cursor.text(f"the name of metadata entry {index}", MAX_KEY)
        if key in found:
            raise CorruptFile(f"metadata entry {format_name(key)} stands there twice")
        kind = cursor.number("I", f"the type of {format_name(key)}")
        found[key] = cursor.value(kind, f"metadata entry {format_name(key)}")
    return found


def _alignment(metadata: Mapping[str, Value]) -> int:
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise CorruptFile(
            f"general.alignment is {format_name(str(alignment))}, not a power of two up to {MAX_ALIGNMENT}"
        )
    return alignment


class _TensorRecord(NamedTuple):
    """A tensor as the table has it."""

    kind: TensorType
    shape: tuple[int, ...]
    offset: int  # bytes from where the data begins
    size: int


def _tensors(cursor: Cursor, count: int, alignment: int) -> dict[str, GGUFTensor]:
    listed: dict[str, _TensorRecord] = {}
    for index in range(count):
        name = cursor.text(f"the name of tensor {index}", MAX_NAME)
        if not name.isprintable():
            raise CorruptFile(f"tensor {format_name(name)} has a name that cannot be printed")
        if name in listed:
            raise CorruptFile(f"tensor {format_name(name)} stands there twice")
        listed[name] = _read_record(cursor, name, alignment)
    start = cursor.at + -cursor.at % alignment
    _check_places(listed, cursor.end - start)
    return {name: GGUFTensor(each.kind, each.shape, start + each.offset, each.size) for name, each in listed.items()}


def _read_record(cursor: Cursor, name: str, alignment: int) -> _TensorRecord:
    what = f"tensor {format_name(name)}"
    axes = cursor.number("I", what)
    if not 1 <= axes <= MAX_AXES:
        raise CorruptFile(f"{what} has {axes} axes, not 1 to {MAX_AXES}")
    shape = tuple(cursor.number("Q", what) for _ in range(axes))[::-1]
    number, offset = cursor.number("I", what), cursor.number("Q", what)
    kind, size = sized(what, number, shape)
    if offset % alignment:
        raise CorruptFile(f"{what} begins at {offset}, no multiple of the alignment, {alignment}")
    return _TensorRecord(kind, shape, offset, size)


def _check_places(listed: Mapping[str, _TensorRecord], room: int) -> None:
    """Checks that all tensors are within the file, and no two overlap."""
    last, before = 0, ""
    for name, each in sorted(listed.items(), key=lambda entry: entry[1].offset):
        if each.offset < last:
            raise CorruptFile(f"tensor {format_name(name)} begins within {format_name(before)}")
        last, before = each.offset + each.size, name
        if last > room:
            raise CorruptFile(
                f"tensor {format_name(name)} is {list(each.shape)} of {each.kind.name}, {each.size} bytes at "
                f"{each.offset}, "
                f"and the file has {max(room, 0)} bytes of tensors: it is cut short, or not the file it was"
            )
