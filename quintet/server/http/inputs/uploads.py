"""Reads multipart/form-data: fields in memory, files into private temporary files as they come.

A temporary file has no name from the start, so that nothing is left of it, however the request or the process ends.
Source: RFC 7578.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from quintet.server.http.errors import ApiError, ClientGone

FORM = "multipart/form-data"
_WAITING = 2**18  # bytes that wait for the next write; each is made in a thread
_SHOWN = 80  # characters of a name in an error
_MAX_HEADERS, _MAX_HEADER_BYTES = 8, 2**12  # of a part
_PLAIN = ("", "binary", "8bit", "7bit")  # Content-Transfer-Encoding; RFC 7578 does away with the others


class FormLimits(NamedTuple):
    """Limits of a form's content; its bytes are bounded by the route's limit."""

    fields: int = 64
    field_bytes: int = 2**16  # of all fields together; prompts are among them
    files: tuple[str, ...] = ("file",)  # names that files may have, one each


_LIMITS = FormLimits()


@dataclass
class UploadedFile:
    """A file of a form, in a temporary file without a name."""

    name: str  # that the client gives it: no path of ours
    content_type: str
    content: BinaryIO = field(repr=False)  # at its beginning; closed with the form
    size: int = 0  # bytes


@dataclass
class Form:
    """Fields and files of a form."""

    fields: list[tuple[str, str]] = field(default_factory=list)
    files: dict[str, UploadedFile] = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        """Returns the fields as an object: text by name, and a list for names that end with []. ApiError 400 for other
        names that come twice."""
        found: dict[str, Any] = {}
        for name, value in self.fields:
            if name.endswith("[]"):
                several = found.setdefault(name[:-2], [])
                if not isinstance(several, list):
                    raise _twice(name)
                several.append(value)
            elif name in found:
                raise _twice(name)
            else:
                found[name] = value
        return found

    def file(self, name: str = "file") -> UploadedFile:
        """ApiError 400 if there is none of this name."""
        if name not in self.files:
            raise ApiError(
                400, f"{name} is missing; send a file as the part {name!r}", param=name, code="missing_field"
            )
        return self.files[name]

    def close(self) -> None:
        """Deletes the files."""
        for each in self.files.values():
            with contextlib.suppress(OSError):  # the disk is full: what waits to be written is not wanted any more
                each.content.close()


@contextlib.asynccontextmanager
async def read_form(http: HttpRequest, limits: FormLimits = _LIMITS) -> AsyncIterator[Form]:
    """Reads the body; the files are there until the block ends.

    ApiError 415 if Content-Type is not multipart/form-data, 400 for a form that is damaged or holds more than `limits`,
    507 without room on the disk; ClientGone if the client disconnects before its end.
    """
    reading = _Reading(_boundary_of(http), limits)
    try:
        await reading.read(http)
        yield reading.form
    finally:
        reading.close()


def _boundary_of(http: HttpRequest) -> bytes:
    kind, options = parse_options_header(http.headers.get("content-type", ""))
    if kind.lower() != FORM.encode():
        shown = kind.decode("latin-1")[:_SHOWN]
        raise ApiError(415, f"the body is {shown!r}; send {FORM}, as curl -F and OpenAI's clients do")
    if not options.get(b"boundary"):
        raise ApiError(
            400, "Content-Type has no boundary; let the client's library set this header", code="invalid_form"
        )
    return options[b"boundary"]


class _Part:
    """A part that is being read: its headers, then its bytes."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.header_name, self.header_value = bytearray(), bytearray()
        self.name = ""
        self.value = bytearray()  # of a field
        self.file: UploadedFile | None = None


class _Reading:
    """Parser of one body. Callbacks are the parser's; they block on nothing."""

    def __init__(self, boundary: bytes, limits: FormLimits) -> None:
        self.form = Form()
        self._limits, self._part = limits, _Part()
        self._field_bytes, self._ended = 0, False
        self._waiting: list[tuple[UploadedFile, bytes]] = []
        callbacks: Mapping[str, Any] = {
            "on_part_begin": self._begin, "on_header_field": self._header_name, "on_header_value": self._header_value,
            "on_header_end": self._header_end, "on_headers_finished": self._open, "on_part_data": self._data,
            "on_part_end": self._finish, "on_end": self._end,
        }  # fmt: skip
        try:
            self._parser = MultipartParser(boundary, callbacks)  # type: ignore[arg-type]
        except FormParserError as error:
            raise _damaged(error) from None

    async def read(self, http: HttpRequest) -> None:
        try:
            async for piece in http.stream():
                if piece:
                    self._parser.write(piece)
                if sum(len(data) for _, data in self._waiting) >= _WAITING:
                    await self._write()
            await self._write()
        except ClientDisconnect:
            raise ClientGone from None
        except FormParserError as error:
            raise _damaged(error) from None
        if not self._ended:
            raise _damaged("it ends before its last boundary")
        for each in self.form.files.values():
            each.content.seek(0)

    def close(self) -> None:
        self.form.close()

    async def _write(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        try:
            await asyncio.to_thread(_write_all, waiting)
        except OSError as error:
            raise ApiError(
                507, f"the server cannot keep the file ({error.strerror}); try again later", code="no_space"
            ) from error

    def _begin(self) -> None:
        self._part = _Part()
        if len(self.form.fields) + len(self.form.files) >= self._limits.fields:
            raise _too_many(f"more than {self._limits.fields} parts")

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._part.header_name += data[start:end]
        self._check_header()

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._part.header_value += data[start:end]
        self._check_header()

    def _check_header(self) -> None:
        part = self._part
        if len(part.header_name) + len(part.header_value) > _MAX_HEADER_BYTES or len(part.headers) >= _MAX_HEADERS:
            raise _too_many(f"a part with more than {_MAX_HEADERS} headers, or one of {_MAX_HEADER_BYTES} bytes")

    def _header_end(self) -> None:
        part = self._part
        part.headers[part.header_name.decode("latin-1").lower()] = bytes(part.header_value).decode("utf-8", "replace")
        part.header_name, part.header_value = bytearray(), bytearray()

    def _open(self) -> None:
        part = self._part
        kind, options = parse_options_header(part.headers.get("content-disposition", "").encode())
        if kind.lower() != b"form-data" or not options.get(b"name"):
            raise _damaged("a part has no Content-Disposition: form-data with a name")
        part.name = options[b"name"].decode("utf-8", "replace")
        if (encoding := part.headers.get("content-transfer-encoding", "").lower()) not in _PLAIN:
            raise _damaged(f"part {part.name[:_SHOWN]!r} is encoded as {encoding[:_SHOWN]!r}")
        if b"filename" not in options:
            return
        if part.name not in self._limits.files or part.name in self.form.files:
            named = ", ".join(self._limits.files)
            raise ApiError(
                400, f"the form has a file {part.name[:_SHOWN]!r}, and the route takes one file of each of these "
                f"names: {named}", param=part.name[:_SHOWN], code="invalid_form",
            )  # fmt: skip
        part.file = UploadedFile(
            options[b"filename"].decode("utf-8", "replace")[:255], part.headers.get("content-type", "")[:255],
            tempfile.TemporaryFile(),
        )  # fmt: skip
        self.form.files[part.name] = part.file

    def _data(self, data: bytes, start: int, end: int) -> None:
        part = self._part
        if part.file is not None:
            part.file.size += end - start
            self._waiting.append((part.file, data[start:end]))
            return
        self._field_bytes += end - start
        if self._field_bytes > self._limits.field_bytes:
            raise _too_many(f"fields of more than {self._limits.field_bytes} bytes together")
        part.value += data[start:end]

    def _finish(self) -> None:
        part = self._part
        if part.file is not None:
            return
        try:
            self.form.fields.append((part.name, part.value.decode()))
        except UnicodeDecodeError:
            raise ApiError(
                400, f"{part.name[:_SHOWN]} is not UTF-8; send text in UTF-8", param=part.name[:_SHOWN],
                code="invalid_form",
            ) from None  # fmt: skip

    def _end(self) -> None:
        self._ended = True


def _write_all(waiting: list[tuple[UploadedFile, bytes]]) -> None:
    for file, data in waiting:
        file.content.write(data)
        file.content.flush()


def _damaged(why: object) -> ApiError:
    return ApiError(
        400, f"the form is damaged: {str(why)[:200]}; let the client's library write it", code="invalid_form"
    )


def _too_many(what: str) -> ApiError:
    return ApiError(400, f"the form has {what}; send less", code="invalid_form")


def _twice(name: str) -> ApiError:
    shown = name[:_SHOWN]
    return ApiError(400, f"{shown} comes twice; send it once, or as {shown.removesuffix('[]')}[]", param=shown,
                    code="invalid_value")  # fmt: skip
