"""Tensors out of files that torch.save wrote (*.bin, *.pt), read without running what is in them.

Such a file is a zip of a pickle, which says how tensors are made, and of their bytes. A pickle is a program; here its
instructions are read one by one, those that tensors need are done, and any other is an error that names it.
"""

import itertools
import mmap
import pickletools
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

PICKLE_BYTES = 2**20, 2**11  # at most, of any file and more for each entry of the zip; torch writes some 250 a tensor
INSTRUCTIONS = 2**16, 2**8  # likewise; torch writes some 40 a tensor
MAX_PICKLE_BYTES = 2**26  # of any file; those of the largest checkpoints take a few MB
MAX_ENTRIES = 2**20  # of the zip
MAX_DIMENSIONS = 16
LOCAL = struct.Struct("<4s22xHH")  # of a zip: an entry's own header, up to the lengths of its name and extra field
STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip
ZIP_ERRORS = (zipfile.BadZipFile, struct.error, EOFError, OverflowError)  # that zipfile raises for damaged ones
MARK = object()


class PickleGlobal(NamedTuple):
    """A function or a class that a pickle names. None of them is ever imported."""

    module: str
    name: str


class PickledTensor(NamedTuple):
    """Numbers in the file, and as what a tensor looks at them."""

    key: str
    dtype: torch.dtype
    numbers: int
    offset: int = 0
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()


class TorchFile:
    """One file, opened. ValueError says what is wrong with it, or what of it is no tensor."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with zipfile.ZipFile(path) as archive, path.open("rb") as stream:
                self._memory = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
                self._entries = _entries(archive.infolist())
            count = len(self._entries)
            content = self._content("data.pkl", min(PICKLE_BYTES[0] + PICKLE_BYTES[1] * count, MAX_PICKLE_BYTES))
            if "byteorder" in self._entries and self._content("byteorder", 16) != b"little":
                raise ValueError("its numbers are big-endian")
        except (*ZIP_ERRORS, KeyError, OSError, NotImplementedError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"{path} is no file that torch.save has written since torch 1.6 ({error}); fetch it again, or convert "
                "the checkpoint with transformers' save_pretrained()"
            ) from None
        try:
            self._tensors = _tensors(_Unpickler(content, INSTRUCTIONS[0] + INSTRUCTIONS[1] * count).result())
            for name, stored in self._tensors.items():
                self._check(name, stored)
        except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path} is refused: {error}; convert the checkpoint where you trust it") from None

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> "TensorHeader":
        stored = self._tensors[name]
        return TensorHeader(stored.shape, stored.dtype)

    def get_tensor(self, name: str) -> Tensor:
        """Returns a view of the mapped file; its pages are read on first access."""
        stored = self._tensors[name]
        if not stored.numbers:
            return torch.empty(stored.shape, dtype=stored.dtype)
        first = self._start(self._entries[f"data/{stored.key}"])
        numbers = torch.frombuffer(self._memory, dtype=stored.dtype, count=stored.numbers, offset=first)
        return numbers.as_strided(stored.shape, stored.strides, stored.offset)

    def _content(self, name: str, most: int) -> bytes:
        entry = self._entries[name]
        if entry.file_size > most:
            raise ValueError(
                f"its {name} takes {entry.file_size} bytes, at most {most} for its {len(self._entries)} entries"
            )
        first = self._start(entry)
        return self._memory[first : first + entry.file_size]

    def _check(self, name: str, stored: PickledTensor) -> None:
        entry = self._entries.get(f"data/{stored.key}")
        if entry is None or entry.file_size != stored.numbers * stored.dtype.itemsize:
            raise ValueError(f"the numbers of {name[:80]!r} are not in it as it says")
        ends = [(size - 1) * step for size, step in zip(stored.shape, stored.strides, strict=True)]
        if 0 not in stored.shape and stored.offset + sum(ends) >= stored.numbers:
            raise ValueError(f"{name[:80]!r} reaches past its numbers")
        self._start(entry)

    def _start(self, entry: zipfile.ZipInfo) -> int:
        """Returns the offset of an entry's bytes, which are stored uncompressed."""
        head = self._memory[entry.header_offset : entry.header_offset + LOCAL.size]
        magic, name, extra = LOCAL.unpack(head) if len(head) == LOCAL.size else (b"", 0, 0)
        first = entry.header_offset + LOCAL.size + name + extra
        if magic != b"PK\x03\x04" or entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{entry.filename[:80]!r} is compressed, or is not where the file says")
        if first + entry.file_size > len(self._memory):
            raise ValueError("it is cut short")
        return first


class TensorHeader(NamedTuple):
    """Shape and dtype of a tensor that was not read yet, with the methods of safetensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> torch.dtype:
        return self.dtype


def _entries(found: list[zipfile.ZipInfo]) -> dict[str, zipfile.ZipInfo]:
    """Returns the entries by name, without the folder that holds them all; ValueError for more than MAX_ENTRIES."""
    if len(found) > MAX_ENTRIES:
        raise ValueError(f"it has {len(found)} entries")
    return {each.filename.partition("/")[2]: each for each in found}


def _tensors(result: Any) -> Mapping[str, PickledTensor]:
    """ValueError where the pickle makes anything but tensors by name."""
    if not isinstance(result, dict):
        raise ValueError(f"it holds {_shown(result)}, and no tensors by name")
    for name, value in result.items():
        if not isinstance(name, str) or not isinstance(value, PickledTensor):
            raise ValueError(f"it holds {_shown(value)} as {str(name)[:80]!r}, which is no tensor")
    return result


def _shown(value: Any) -> str:
    return f"{value.module}.{value.name}"[:120] if isinstance(value, PickleGlobal) else type(value).__name__


class _Unpickler:
    """A pickle's instructions, on a stack of plain values.

    Values may be nested to any depth and share parts, so that nothing here may walk through them: a dict's keys and
    the names of globals are text before they are hashed, compared or shown.
    """

    def __init__(self, pickle: bytes, most: int) -> None:
        self._pickle = pickle
        self._most = most
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._do: dict[str, Callable[[Any], None]] = {
            **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda _: None),
            **dict.fromkeys(("BINPUT", "LONG_BINPUT", "PUT"), self._keep),
            **dict.fromkeys(("BINGET", "LONG_BINGET", "GET"), lambda at: self._push(self._memo[at])),
            **dict.fromkeys(CONSTANTS, self._push),
            "MEMOIZE": lambda _: self._keep(len(self._memo)),
            "NONE": lambda _: self._push(None),
            "NEWTRUE": lambda _: self._push(True),
            "NEWFALSE": lambda _: self._push(False),
            "EMPTY_DICT": lambda _: self._push({}),
            "EMPTY_LIST": lambda _: self._push([]),
            "EMPTY_TUPLE": lambda _: self._push(()),
            "MARK": lambda _: self._push(MARK),
            "TUPLE": lambda _: self._push(tuple(self._marked())),
            **{f"TUPLE{n}": lambda _, n=n: self._push(self._popped(n)) for n in (1, 2, 3)},  # type: ignore[misc]
            "GLOBAL": lambda named: self._push(_global(*named.split(" ", 1))),
            "STACK_GLOBAL": lambda _: self._push(_global(*self._popped(2))),
            "BINPERSID": lambda _: self._push(_storage(self._stack.pop())),
            "REDUCE": lambda _: self._push(_call_result(*self._popped(2))),
            "BUILD": lambda _: self._built(self._stack.pop()),
            "SETITEM": lambda _: self._set(self._popped(2)),
            "SETITEMS": lambda _: self._set(self._marked()),
            "APPEND": lambda _: self._stack[-2].append(self._stack.pop()),
            "APPENDS": lambda _: self._appended(self._marked()),
            "POP": lambda _: self._dropped(),
        }

    def result(self) -> Any:
        for done, (code, argument, at) in enumerate(pickletools.genops(self._pickle)):
            if done == self._most:
                raise ValueError(f"its pickle has more than {done} instructions, too many for the tensors in it")
            if code.name not in self._do:
                raise ValueError(f"its pickle does {code.name} at {at}, which tensors do not need")
            self._do[code.name](argument)
        [result] = self._stack
        return result

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _keep(self, at: int) -> None:
        self._memo[at] = self._stack[-1]

    def _popped(self, count: int) -> tuple[Any, ...]:
        if len(self._stack) < count:
            raise ValueError("its pickle is cut short")
        found = tuple(self._stack[-count:])
        del self._stack[-count:]
        return found

    def _dropped(self) -> None:
        self._popped(1)

    def _marked(self) -> list[Any]:
        at = next((i for i in range(len(self._stack) - 1, -1, -1) if self._stack[i] is MARK), None)
        if at is None:
            raise ValueError("its pickle is cut short")
        found = self._stack[at + 1 :]
        del self._stack[at:]
        return found

    def _set(self, pairs: Any) -> None:
        if not isinstance(self._stack[-1], dict) or len(pairs) % 2:
            raise ValueError("its pickle sets entries of what is no dict")
        if wrong := [type(key).__name__ for key in pairs[::2] if not isinstance(key, str)]:
            raise ValueError(f"its pickle names an entry by a {wrong[0]}, and tensors have names of text")
        self._stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))

    def _appended(self, values: list[Any]) -> None:
        self._stack[-1].extend(values)

    def _built(self, state: Any) -> None:
        """Ignores what torch stores beside a state dict (_metadata): it does not describe the tensors."""
        if not isinstance(self._stack[-1], dict) or not isinstance(state, dict):
            raise ValueError(f"its pickle sets the state of {_shown(self._stack[-1])}")


CONSTANTS = ("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")


def _global(module: Any, name: Any) -> PickleGlobal:
    if not isinstance(module, str) or not isinstance(name, str):
        raise ValueError("its pickle names a function by what is no text")
    return PickleGlobal(module, name)


def _storage(entry: Any) -> PickledTensor:
    """Reads a persistent id: ("storage", its class, the entry's name, the device it was on, how many numbers)."""
    kind, of, key, _, count = entry
    dtype = STORAGES.get(of.name) if isinstance(of, PickleGlobal) and of.module == "torch" else None
    if kind != "storage" or dtype is None or not isinstance(key, str) or not _non_negative_int(count):
        raise ValueError(f"its pickle asks for {_shown(of)} as the numbers of a tensor")
    return PickledTensor(key, dtype, count)


def _call_result(function: Any, arguments: Any) -> Any:
    """Returns the result of a call in the pickle: only the functions that build tensors are known, by their names."""
    if function == ("collections", "OrderedDict") and arguments == ():
        return {}
    if function == ("torch._utils", "_rebuild_parameter"):
        return arguments[0]
    if function == ("torch._utils", "_rebuild_tensor_v2"):
        return _tensor_view(*itertools.islice(arguments, 4))
    raise ValueError(f"its pickle calls {_shown(function)}, and quintet runs nothing that a file names")


def _tensor_view(storage: Any, offset: Any, shape: Any, strides: Any) -> PickledTensor:
    if len(shape) != len(strides) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"its pickle makes a tensor of {len(shape)} dimensions with {len(strides)} strides")
    if not isinstance(storage, PickledTensor) or not all(map(_non_negative_int, (offset, *shape, *strides))):
        raise ValueError("its pickle makes a tensor of what is none")
    return storage._replace(offset=offset, shape=tuple(shape), strides=tuple(strides))


def _non_negative_int(number: Any) -> bool:
    return type(number) is int and 0 <= number < 2**63
