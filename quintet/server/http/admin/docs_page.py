"""GET /docs: the routes of this server as a page. It loads nothing from other hosts, and has no scripts."""

from html import escape
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response

from quintet.server.http.openapi import documents_route

router = APIRouter()

_HEAD = (
    "<!doctype html><html lang=en><meta charset=utf-8><title>quintet: routes</title>"
    "<style>body{font:16px system-ui;max-width:70rem;margin:2rem auto;padding:0 1rem}td{padding:.2rem .6rem;"
    "vertical-align:top}</style><h1>Routes</h1><p>Bodies and answers are in <a href=openapi.json>openapi.json</a>.</p>"
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@router.get("/docs")
@documents_route(text="text/html")
async def docs(http: HttpRequest) -> Response:
    """Returns the page."""
    rows = [
        f"<tr><td>{method.upper()}<td><code>{escape(path)}</code><td>{escape(_line(operation))}{_fields(operation)}"
        for path, operations in sorted(http.app.openapi()["paths"].items())
        for method, operation in operations.items()
    ]
    return HTMLResponse(f"{_HEAD}<table>{''.join(rows)}</table>", headers={"Content-Security-Policy": _POLICY})


def _line(operation: dict[str, Any]) -> str:
    return str(operation.get("description", "")).partition("\n")[0]


def _fields(operation: dict[str, Any]) -> str:
    """Names the body's schema."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = str(content.get("schema", {}).get("$ref", "")).rpartition("/")[2]
    return f" <small>body: {escape(name)}</small>" if name else ""
