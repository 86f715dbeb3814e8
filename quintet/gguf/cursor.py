"""Reads values one after the other, each checked against the file's end before anything is made of it."""

import mmap
import struct
from collections.abc import Iterator, Sequence
from typing import Any, overload

STRING, ARRAY = 8, 9
# Types of values by their numbers: how struct reads them, little-endian.
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
BOOL = 7
LENGTH = struct.Struct("<Q")
SHOWN = 60  # characters of a name in an error


class CorruptFile(ValueError):
    """Error in the content of a file; the file's reader adds the path."""


class Cursor:
    """A place in a file."""

    def __init__(self, data: mmap.mmap, at: int = 0) -> None:
        self.data, self.at, self.end = data, at, len(data)

    def skip(self, size: int, what: str) -> int:
        """Over so many bytes, which have to be there -> where they begin."""
        first = self.at
        if size > self.end - first:
            raise CorruptFile(f"{what} takes {size} bytes at {first}, and the file ends at {self.end}")
        self.at = first + size
        return first

    def number(self, code: str, what: str) -> Any:
        return struct.unpack_from(f"<{code}", self.data, self.skip(struct.calcsize(f"<{code}"), what))[0]

    def text(self, what: str, most: int) -> str:
        """A string of up to so many bytes."""
        size = self.number("Q", f"the length of {what}")
        if size > most:
            raise CorruptFile(f"{what} has {size} bytes, more than the {most} that one may have")
        first = self.skip(size, what)
        try:
            return self.data[first : self.at].decode()
        except UnicodeDecodeError as error:
            raise CorruptFile(f"{what} is not UTF-8 at byte {first + error.start}") from None

    def value(self, kind: int, what: str) -> "int | float | bool | str | Array":
        """Reads a value of the type with this number."""
        if kind == STRING:
            return self.text(what, self.end)
        if kind == ARRAY:
            return self._array(what)
        if kind not in NUMBERS:
            raise CorruptFile(f"{what} is of type {kind}, which GGUF does not have")
        found: int | float = self.number(NUMBERS[kind], what)
        if kind != BOOL:
            return found
        if found not in (0, 1):
            raise CorruptFile(f"{what} is a truth value of {found}, not of 0 or 1")
        return bool(found)

    def _array(self, what: str) -> "Array":
        kind, count = self.number("I", what), self.number("Q", what)
        if kind == STRING:
            first = self.at
            self._skip_texts(count, what)
        elif kind in NUMBERS:
            first = self.skip(count * struct.calcsize(f"<{NUMBERS[kind]}"), what)
        else:
            raise CorruptFile(f"{what} is a list of values of type {kind}; GGUF has lists of numbers and of strings")
        return Array(self.data, kind, count, first)

    def _skip_texts(self, count: int, what: str) -> None:
        """A loop in its plainest form: a vocabulary has hundreds of thousands."""
        if count > (self.end - self.at) // LENGTH.size:
            raise CorruptFile(f"{what} has {count} strings, more than the file has room for")
        data, at, last, length = self.data, self.at, self.end - LENGTH.size, LENGTH.unpack_from
        for index in range(count):
            if at > last:
                raise CorruptFile(f"string {index} of {what} lies behind the file's end")
            at += 8 + length(data, at)[0]
        if at > self.end:
            raise CorruptFile(f"the last string of {what} goes on to {at}, and the file ends at {self.end}")
        self.at = at


class Array(Sequence[Any]):
    """A list in the file: numbers, truth values or strings, each made when it is asked for.

    Bytes of strings that are no UTF-8 are surrogates, as os.fsdecode() makes them.
    """

    def __init__(self, data: mmap.mmap, kind: int, count: int, first: int) -> None:
        self._data, self._kind, self._count, self._first = data, kind, count, first

    @property
    def of_strings(self) -> bool:
        return self._kind == STRING

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        place = range(self._count)[index]
        if self.of_strings:
            return next(each for at, each in enumerate(self) if at == place)
        code = NUMBERS[self._kind]
        (found,) = struct.unpack_from(f"<{code}", self._data, self._first + place * struct.calcsize(f"<{code}"))
        return bool(found) if self._kind == BOOL else found

    def __iter__(self) -> Iterator[Any]:
        return self._texts() if self.of_strings else self._numbers()

    def _numbers(self) -> Iterator[Any]:
        code = NUMBERS[self._kind]
        last = self._first + self._count * struct.calcsize(f"<{code}")
        for (each,) in struct.iter_unpack(f"<{code}", memoryview(self._data)[self._first : last]):
            yield bool(each) if self._kind == BOOL else each

    def _texts(self) -> Iterator[str]:
        data, at = self._data, self._first
        for _ in range(self._count):
            first = at + LENGTH.size
            at = first + LENGTH.unpack_from(data, at)[0]
            yield data[first:at].decode(errors="surrogateescape")


def format_name(name: str) -> str:
    """A name of the file's in an error's line."""
    return repr(name if len(name) <= SHOWN else f"{name[:SHOWN]}...")
