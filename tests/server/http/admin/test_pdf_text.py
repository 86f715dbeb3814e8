"""POST /page/pdf_text: text of PDF files, extracted within limits that a hostile file cannot leave."""

import asyncio
import io
import sys
import zlib

import httpx
import psutil
import pytest

from quintet.common.distribution import install_hint
from quintet.server.http.errors import ApiError
from quintet.server.pdf.extract import TOO_MUCH, PdfExtractor, PdfText
from tests.server.http.serving import chat, client

PATH = "/page/pdf_text"
needs_pypdf = pytest.mark.usefixtures("pypdf")


@pytest.fixture
def pypdf() -> None:
    pytest.importorskip("pypdf", reason="needs the extra pdf")


def pdf(*contents: bytes) -> bytes:
    """A PDF file with a page for each content stream; equal streams are one object."""
    streams = list(dict.fromkeys(contents))
    first_page = 4 + len(streams)
    kids = b" ".join(b"%d 0 R" % (first_page + at) for at in range(len(contents)))
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Count %d/Kids[%b]>>" % (len(contents), kids),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding>>",
    ]
    for stream in streams:
        packed = zlib.compress(stream)
        objects.append(b"<</Length %d/Filter/FlateDecode>>stream\n%b\nendstream" % (len(packed), packed))
    for content in contents:
        objects.append(
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 600 800]/Resources<</Font<</F 3 0 R>>>>/Contents %d 0 R>>"
            % (4 + streams.index(content))
        )
    data, places = b"%PDF-1.7\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj\n%b\nendobj\n" % (number, each)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    head = b"xref\n0 %d\n0000000000 65535 f \n%b" % (len(objects) + 1, table)
    rest = b"trailer\n<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, len(data))
    return data + head + rest


def writes(text: str) -> bytes:
    """A content stream."""
    return b"BT /F 12 Tf 50 700 Td (%b) Tj ET" % text.encode("cp1252")


async def post(content: bytes, **settings: object) -> httpx.Response:
    async with client(**settings) as http:
        return await http.post(PATH, content=content, headers={"Content-Type": "application/pdf"})


def children() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if "quintet.server.pdf.worker" in each.cmdline()]


@needs_pypdf
async def test_the_text_of_all_pages_is_returned() -> None:
    answer = await post(pdf(writes("Grün is green."), writes(""), writes("The end.")))
    assert answer.json() == {"text": "Grün is green.\n\nThe end.", "pages": 3}
    assert children() == []


@needs_pypdf
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"%PNG", "it does not begin with %PDF-"),
        (b"%PDF-1.7\nrubbish", "pypdf fails with PdfStreamError: "),
        (pdf(writes("x"))[:300], "pypdf fails with "),
        (pdf(writes("")), "it has no text, only pictures or empty pages; attach its text"),
        (pdf(*[writes("x")] * 1001), "it has 1001 pages, and 1000 are read; attach a part of it"),
        (pdf(*[writes("x" * 600_000)] * 2), "it has more than 1000000 characters of text; attach a part of it"),
    ],
    ids=["no-pdf", "rubbish", "cut", "no-text", "pages", "characters"],
)
async def test_a_file_without_readable_text_is_refused_with_the_reason(content: bytes, reason: str) -> None:
    answer = await post(content)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "invalid_pdf"
    assert error["message"].startswith(f"the PDF cannot be read: {reason}")


@needs_pypdf
@pytest.mark.parametrize("algorithm", ["RC4-128", "AES-128", "AES-256"])
async def test_a_file_that_is_locked_against_changes_is_read_and_one_with_a_password_is_refused(algorithm: str) -> None:
    if algorithm != "RC4-128":
        pytest.importorskip("cryptography", reason="needs the extra pdf")
    from pypdf import PdfReader, PdfWriter

    for password, text in (("", "Hi"), ("secret", None)):
        writer, locked = PdfWriter(PdfReader(io.BytesIO(pdf(writes("Hi"))))), io.BytesIO()
        writer.encrypt(password, owner_password="owner", algorithm=algorithm)
        writer.write(locked)
        answer = (await post(locked.getvalue())).json()
        assert answer.get("text") == text
        if text is None:
            assert answer["error"]["message"].startswith("the PDF cannot be read: it is encrypted")


@needs_pypdf
async def test_a_file_that_takes_too_long_ends_with_its_process_and_others_are_served_meanwhile() -> None:
    slow = pdf(*[writes("") + b"\nBT /F 1 Tf (a) Tj ET" * 50_000] * 1000)
    assert len(slow) < 400_000
    extractor = PdfExtractor()
    hostile = asyncio.create_task(PdfExtractor(timeout=2.0).extract(slow))
    assert (await extractor.extract(pdf(writes("Hi")))).text == "Hi"
    with pytest.raises(ApiError, match=TOO_MUCH):
        await hostile
    assert children() == []


@needs_pypdf
async def test_a_file_that_unpacks_to_a_thousand_times_its_size_is_refused() -> None:
    bomb = pdf(b"0" * 150_000_000)
    assert len(bomb) < 200_000
    answer = await post(bomb)
    assert answer.status_code == 400 and "the PDF cannot be read" in answer.json()["error"]["message"]


@needs_pypdf
async def test_a_caller_that_disconnects_ends_the_process() -> None:
    slow = pdf(*[writes("") + b"\nBT /F 1 Tf (a) Tj ET" * 50_000] * 1000)
    task = asyncio.create_task(PdfExtractor().extract(slow))
    while not children():
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert children() == []


class HeldExtractor:
    """Extracts nothing until it may go on."""

    def __init__(self) -> None:
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()

    async def extract(self, content: bytes) -> PdfText:
        self.begun.set()
        await self.may_end.wait()
        return PdfText(text=content.decode(), pages=1)


async def test_draining_waits_for_the_text_of_a_pdf(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldExtractor()
    monkeypatch.setattr("quintet.server.http.admin.page.PdfExtractor", lambda: held)
    async with client() as http:
        service = http._transport.app.state.service  # type: ignore[attr-defined]
        first = asyncio.create_task(http.post(PATH, content=b"Hi"))
        await held.begun.wait()
        assert len(service.calls) == 1
        draining = asyncio.create_task(service.drain())
        await asyncio.sleep(0)
        assert (await http.post(PATH, content=b"Hi")).status_code == 503 and not draining.done()
        held.may_end.set()
        assert (await first).json() == {"text": "Hi", "pages": 1}
        await draining
        assert not service.calls and not service.ended_calls


async def test_draining_ends_the_text_of_a_pdf_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldExtractor()
    monkeypatch.setattr("quintet.server.http.admin.page.PdfExtractor", lambda: held)
    async with client(drain_timeout=0.05) as http:
        service = http._transport.app.state.service  # type: ignore[attr-defined]
        first = asyncio.create_task(http.post(PATH, content=b"Hi"))
        await held.begun.wait()
        await service.drain()
        answer = await first
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "shutting_down"
        assert len(service.ended_calls) == 1 and not service.calls


async def test_without_pypdf_the_answer_has_the_install_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pypdf", None)
    answer = await post(pdf(writes("x")))
    assert answer.status_code == 501
    assert answer.json()["error"]["message"].endswith(f"which is not installed: {install_hint('pdf')}")


async def test_the_route_has_the_checks_of_all_routes_and_goes_with_the_page() -> None:
    assert (await post(b"x", playground=False)).status_code == 404
    assert (await post(b"x", api_key=("secret",))).status_code == 401
    assert (await post(b"x" * 100_000, max_body_bytes=99_999)).status_code == 413
    async with client() as http:
        assert (await http.post(PATH, content=b"x", headers={"Origin": "http://evil.example"})).status_code == 403
        assert (await http.get(PATH)).status_code == 404
        assert (await http.post("/v1/chat/completions", json=chat())).status_code == 200
