"""Extracts the text of PDF files, each in a child process with limits on time and memory."""

import asyncio
import importlib.util
import logging
import subprocess
import tempfile

import msgspec

from quintet.common.distribution import install_hint
from quintet.common.processes import Child, Exit
from quintet.server.http.errors import ApiError
from quintet.server.pdf.worker import Extracted, Orders

logger = logging.getLogger(__name__)

PROCESSES = 2  # at a time; other requests wait
TIMEOUT = 30.0  # seconds for one file, the start of its process included
TOO_MUCH = "it takes too much time or memory to read; attach a part of it, or its text"


class PdfText(msgspec.Struct, kw_only=True):
    """Text of a PDF file."""

    text: str
    pages: int


class PdfExtractor:
    """Starts a process for each file. To be used in one event loop."""

    def __init__(self, timeout: float = TIMEOUT) -> None:
        self._timeout = timeout
        self._places = asyncio.Semaphore(PROCESSES)

    async def extract(self, content: bytes) -> PdfText:
        """Returns the text of all pages. Raises ApiError 501 without a package that it needs, 400 if the file cannot be
        read, 500 if the process fails."""
        if not content.startswith(b"%PDF-"):
            raise _unreadable("it does not begin with %PDF-")
        if importlib.util.find_spec("pypdf") is None:
            raise _not_installed("PDF files need the package pypdf on the server, which is not installed")
        async with self._places:
            found = await self._in_process(content)
        if found is not None and found.lacking:
            raise _not_installed(f"this PDF is encrypted, and the server lacks a package for it ({found.error})")
        if found is None or found.error:
            raise _unreadable(TOO_MUCH if found is None else found.error)
        return PdfText(text=found.text, pages=found.pages)

    async def _in_process(self, content: bytes) -> Extracted | None:
        """Returns None if the process was ended by a limit."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Exit] = loop.create_future()
        with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as result:
            source.write(content)
            source.flush()
            files = source.fileno(), result.fileno()
            child = Child("quintet.server.pdf.worker", Orders(*files), inherit=files, stderr=subprocess.DEVNULL)
            child.follow(lambda status: loop.call_soon_threadsafe(_set_once, ended, status))
            try:
                status = await asyncio.wait_for(ended, self._timeout)
                result.seek(0)
                written = result.read()
                if written and status.code == 0:
                    return msgspec.json.decode(written, type=Extracted)
                if status.code and status.code > 0:  # no limit ends it so
                    logger.error("the process that reads a PDF file ended with %s", status)
                    raise ApiError(500, "the server failed to read the PDF; its log has the reason")
                return None
            except asyncio.TimeoutError:
                return None
            finally:
                child.kill()
                child.close()


def _set_once(future: "asyncio.Future[Exit]", status: Exit) -> None:
    if not future.done():
        future.set_result(status)


def _not_installed(what: str) -> ApiError:
    return ApiError(501, f"{what}: {install_hint('pdf')}", code="not_installed")


def _unreadable(reason: str) -> ApiError:
    return ApiError(400, f"the PDF cannot be read: {reason}", code="invalid_pdf")
