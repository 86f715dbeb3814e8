"""The page of the HTTP routes, from the description that the server gives at /openapi.json (scripts/reference.py)."""

from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI

from quintet.server.config import ServerConfig
from quintet.server.http import app as web
from quintet.server.http import openapi
from scripts.reference_pages.markdown import cell, code, table

INTRO = """
Every route of [`quintet serve`](../server.md), generated from the description that the server itself serves at
`/openapi.json`. A field that is not listed is ignored, and named in the response header `x-quintet-ignored-fields`, or
refused with `--strict-requests`. A field that another API has and quintet does not is refused by its name and a reason.

"""
RL_ROUTES = (
    *("/pause", "/resume", "/is_paused", "/get_world_size", "/init_weight_transfer_engine", "/start_weight_update"),
    "/shutdown_weight_transfer_engine",
    *("/update_weights", "/finish_weight_update", "/update_weight_version", "/weight_info"),
)
FLAGS = {  # path -> the flag without which the route is not there
    "/sleep": "--enable-sleep-mode", "/wake_up": "--enable-sleep-mode", "/is_sleeping": "--enable-sleep-mode",
    "/release_kv_cache_memory": "--enable-sleep-mode",
    "/load": "--enable-server-load-tracking", "/tokenizer_info": "--enable-tokenizer-info-endpoint",
    "/start_profile": "--profiler-config", "/stop_profile": "--profiler-config",
    **dict.fromkeys(RL_ROUTES, "--enable-rl-routes"),
    "/v1/tool_servers": "--tool-server", "/v1/tool_servers/call": "--tool-server",
}  # fmt: skip


def schema() -> dict[str, Any]:
    """Returns the description of a server that has every route."""
    settings = ServerConfig(
        enable_sleep_mode=True,
        enable_server_load_tracking=True,
        enable_tokenizer_info_endpoint=True,
        enable_rl_routes=True,
    )
    app = FastAPI(docs_url=None, redoc_url=None)
    web._add_routes(app, SimpleNamespace(settings=settings, profiles=True, tool_servers=True))  # type: ignore[arg-type]
    return openapi.describe(app, "")


def type_name(shape: dict[str, Any]) -> str:
    """Returns a field's type in one line: `array of string`, `ChatMessage`, `integer or null`."""
    if "$ref" in shape:
        return str(shape["$ref"]).rsplit("/", 1)[-1]
    if "const" in shape:
        return repr(shape["const"])
    if "enum" in shape:
        return " or ".join(map(repr, shape["enum"]))
    for key in ("anyOf", "oneOf", "allOf"):
        if key in shape:
            return " or ".join(dict.fromkeys(type_name(each) for each in shape[key]))
    kind = shape.get("type", "any")
    if kind == "array":
        return f"array of {type_name(shape['items'])}" if shape.get("items") else "array"
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def default_of(field: dict[str, Any], required: bool) -> str:
    if required:
        return "required"
    value = field.get("default")
    return "" if value is None else code(repr(value))


def body_section(name: str, body: dict[str, Any]) -> str:
    """A table of the fields of a request's body."""
    required = body.get("required", ())
    rows = [
        [code(field), cell(type_name(shape)), default_of(shape, field in required), cell(shape.get("description", ""))]
        for field, shape in body.get("properties", {}).items()
    ]
    what = cell(" ".join(body.get("description", "").split()))
    return f"\n## {name}\n\n{what}\n\n{table(['field', 'type', 'default', 'meaning'], rows)}"


def http_page(note: str) -> str:
    """The whole page; `note` names its generator."""
    found = schema()
    rows, bodies = [], {}
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            body = type_name(content["schema"]) if content else ""
            what = " ".join((operation.get("description") or operation["summary"]).split())
            flag = f" With `{FLAGS[path]}`." if path in FLAGS else ""
            link = f"[{body}](#{body.lower()})" if body else ""
            rows.append([code(f"{method.upper()} {path}"), cell(what) + flag, link])
            if body:
                bodies[body] = found["components"]["schemas"][body]
    sections = "".join(body_section(name, body) for name, body in bodies.items())
    return f"# HTTP API\n\n{note}{INTRO}{table(['route', 'does', 'body'], rows)}{sections}"
