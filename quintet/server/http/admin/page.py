"""GET / and /page/*: the page's files, from memory; POST /page/pdf_text: text of a PDF that the page attaches."""

import hashlib
import mimetypes
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quintet.server.http.errors import ApiError
from quintet.server.http.inputs.body import read_bytes
from quintet.server.http.middleware.access import PAGE_POLICY
from quintet.server.http.other_call import OtherCall
from quintet.server.http.respond import app_state_of, json_response, while_connected
from quintet.server.pdf.extract import PdfExtractor

FOLDER = Path(__file__).parents[2] / "page"
PDF_TEXT = "/page/pdf_text"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


class PageFile(NamedTuple):
    """File of the page."""

    content: bytes
    kind: str
    tag: str


def router(folder: Path = FOLDER, tool_servers: bool = False) -> APIRouter:
    """Returns routes for all files that the folder holds now. `tool_servers`: the page may ask for their tools."""
    files = read_page(folder)
    if tool_servers:
        files["index.html"] = _marked(files["index.html"], b"tool-servers")
    speech = {"index.html": _marked(files["index.html"], b"transcribes")}
    routes, extractor = APIRouter(include_in_schema=False), PdfExtractor()

    @routes.get("/")
    async def index(http: HttpRequest) -> Response:
        transcribes = app_state_of(http).backend.model_info.encoder is not None
        return page_response(speech if transcribes else files, "index.html", http)

    @routes.get("/page/{name:path}")
    async def file(http: HttpRequest, name: str) -> Response:
        return page_response(files, name, http)

    @routes.post(PDF_TEXT)
    async def pdf_text(http: HttpRequest) -> Response:
        call, content = OtherCall(app_state_of(http)), await read_bytes(http)
        return await call.run(pdf_response(extractor, content, http))

    return routes


async def pdf_response(extractor: PdfExtractor, content: bytes, http: HttpRequest) -> Response:
    """Returns text and number of pages of a PDF file as JSON. The body of `http` was read. ApiError 400, 501."""
    return json_response(await while_connected(http, extractor.extract(content)))


def _marked(index: PageFile, mark: bytes) -> PageFile:
    """Returns index.html with a mark, for what the page asks only of servers that have it."""
    return _file(index.content.replace(b"<body", b"<body data-" + mark, 1), index.kind)


def _file(content: bytes, kind: str) -> PageFile:
    return PageFile(content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def read_page(folder: Path = FOLDER) -> dict[str, PageFile]:
    """Returns the files that the folder holds now, by name."""
    return dict(_read(folder))


def _read(folder: Path) -> Iterator[tuple[str, PageFile]]:
    for path in sorted(folder.rglob("*")):
        kind = _TYPES.get(path.suffix) or mimetypes.types_map.get(path.suffix)
        if path.is_file() and kind is not None and not path.name.startswith("."):
            yield path.relative_to(folder).as_posix(), _file(path.read_bytes(), kind)


def page_response(files: dict[str, PageFile], name: str, http: HttpRequest) -> Response:
    """ApiError 404 if there is no file of this name."""
    file = files.get(name)
    if file is None:
        raise ApiError(404, f"the page has no file {name[:200]!r}", code="not_found")
    headers = {
        "ETag": file.tag, "Cache-Control": "no-cache", "Content-Security-Policy": PAGE_POLICY,
        "X-Content-Type-Options": "nosniff",
    }  # fmt: skip
    asked = [each.strip().removeprefix("W/") for each in http.headers.get("if-none-match", "").split(",")]
    if file.tag in asked or "*" in asked:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.kind, headers=headers)
