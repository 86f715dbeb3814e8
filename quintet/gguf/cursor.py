"""Reads values one after the other, each checked against the file's end before anything is made of it."""

import mmap
import struct
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
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
            return Array(self.data, kind, count, self.at, self._skip_texts(count, what))
        if kind not in NUMBERS:
            raise CorruptFile(f"{what} is a list of values of type {kind}; GGUF has lists of numbers and of strings")
        return Array(self.data, kind, count, self.skip(count * struct.calcsize(f"<{NUMBERS[kind]}"), what))

    def _skip_texts(self, count: int, what: str) -> "array[int]":
        """Returns where each string begins, at its length, and where the last ends, in bytes from the first.

        A loop in its plainest form: a vocabulary has hundreds of thousands.
        """
        if count > (self.end - self.at) // LENGTH.size:
            raise CorruptFile(f"{what} has {count} strings, more than the file has room for")
        data, at, last, length = self.data, self.at, self.end - LENGTH.size, LENGTH.unpack_from
        first, starts = at, array("Q", bytes(8 * (count + 1)))
        for index in range(count):
            if at > last:
                raise CorruptFile(f"string {index} of {what} lies behind the file's end")
            starts[index] = at - first
            at += 8 + length(data, at)[0]
        if at > self.end:
            raise CorruptFile(f"the last string of {what} goes on to {at}, and the file ends at {self.end}")
        starts[count] = at - first
        self.at = at
        return starts


class Array(Sequence[Any]):
    """A list in the file: numbers, truth values or strings, each made when it is asked for.

    Bytes of strings that are no UTF-8 are surrogates, as os.fsdecode() makes them.
    """

    def __init__(self, data: mmap.mmap, kind: int, count: int, first: int, starts: "array[int] | None" = None) -> None:
        """`starts`: of strings, from `first` on; see Cursor."""
        self._data, self._kind, self._count, self._first = data, kind, count, first
        self._starts = starts or array("Q", [0])

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
            first, last = (self._first + each for each in self._starts[place : place + 2])
            return self._data[first + LENGTH.size : last].decode(errors="surrogateescape")
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
        content, starts = self._content(), self._starts
        for first, last in zip(starts, starts[1:], strict=False):
            yield content[first + 8 : last].decode(errors="surrogateescape")

    def _content(self) -> bytes:
        """Returns the strings, each behind its length."""
        return self._data[self._first : self._first + self._starts[-1]]

    def positions(self, texts: Collection[str]) -> Iterator[int]:
        """The indices of strings that are one of `texts`, found in the bytes without making a string of each."""
        content, starts = self._content(), self._starts
        for encoded in (text.encode() for text in texts):
            entry = LENGTH.pack(len(encoded)) + encoded
            at = content.find(entry)
            while at >= 0:
                index = bisect_left(starts, at)
                if index < self._count and starts[index] == at:  # else it is within another string
                    yield index
                at = content.find(entry, at + 1)


def format_name(name: str) -> str:
    """A name of the file's in an error's line."""
    return repr(name if len(name) <= SHOWN else f"{name[:SHOWN]}...")
