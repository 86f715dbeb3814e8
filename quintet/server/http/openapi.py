"""The description of the API at /openapi.json: bodies are pydantic models, answers msgspec structs, errors alike."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import iter_route_contexts
from pydantic import BaseModel

from quintet import __version__

_REF = "#/components/schemas/"
_MARK = "__documented__"

ERRORS: Mapping[int, str] = {
    400: "The request is wrong; `param` names the field",
    401: "The API key is missing or wrong",
    403: "The page or the key may not use this",
    404: "There is no such thing",
    408: "The request came in too slowly",
    413: "The body is too large",
    415: "The body is no JSON, or packed in a way that is not taken here",
    421: "The server does not answer to this name",
    424: "A tool server does not answer",
    429: "The server has enough to do; Retry-After says when to come again",
    500: "The server failed",
    503: "The server cannot serve now",
    504: "The request took too long",
}
_WITHOUT_BODY = (400, 401, 403, 404, 421, 500, 503)


class ErrorDetail(msgspec.Struct):
    """Details of an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    """OpenAI's shape of an error."""

    error: ErrorDetail


@dataclass(frozen=True)
class RouteDocs:
    """Request body, answers and errors of a route."""

    body: type[BaseModel] | None = None
    file: str = ""  # part of a form that has the body's fields, too; "": the body is JSON alone
    answer: Any = None  # a msgspec struct; None: no JSON
    stream: Any = None  # of each event's data
    lines: Any = None  # of each line of a stream of JSON lines
    text: str = ""  # media type of an answer that is text
    errors: Any = Error
    status: int = 200
    conflict: bool = False  # whether it may be refused for what there is already (409)


Route = TypeVar("Route", bound=Callable[..., Any])


def documents_route(**facts: Any) -> Callable[[Route], Route]:
    """Marks a route's function; `facts` are the fields of Documented."""

    def mark(function: Route) -> Route:
        setattr(function, _MARK, RouteDocs(**facts))
        return function

    return mark


def install(app: FastAPI, root_path: str) -> None:
    """Installs the description, which is built on the first request for it."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = describe(app, root_path)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def describe(app: FastAPI, root_path: str) -> dict[str, Any]:
    schema = get_openapi(title="quintet", version=__version__, routes=app.routes)
    if root_path:
        schema["servers"] = [{"url": root_path}]
    schemas: dict[str, Any] = {}
    facts = {_path_and_method(route): getattr(route.endpoint, _MARK, None) for route in iter_route_contexts(app.routes)
             if hasattr(route, "endpoint")}  # fmt: skip
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            fact = facts.get((path, method.upper())) or RouteDocs()
            _complete(operation, fact, schemas)
    schema.setdefault("components", {})["schemas"] = {name: schemas[name] for name in sorted(schemas)}
    schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{}, {"key": []}]
    return schema


def _path_and_method(route: Any) -> tuple[str, str]:
    return getattr(route, "path_format", route.path), next(iter(sorted(getattr(route, "methods", None) or ["GET"])))


def _complete(operation: dict[str, Any], fact: RouteDocs, schemas: dict[str, Any]) -> None:
    if fact.body is not None:
        body = fact.body.model_json_schema(ref_template=_REF + "{model}")
        schemas.update(body.pop("$defs", {}))
        schemas[fact.body.__name__] = body
        content = {"application/json": {"schema": {"$ref": _REF + fact.body.__name__}}}
        if fact.file:
            content["multipart/form-data"] = {"schema": _form(body, fact.file)}
        operation["requestBody"] = {"required": True, "content": content}
    content = {}
    if fact.answer is not None:
        content["application/json"] = {"schema": _struct(fact.answer, schemas)}
    if fact.stream is not None:
        content["text/event-stream"] = {"schema": _event(_struct(fact.stream, schemas))}
    if fact.lines is not None:
        content["application/x-ndjson"] = {"schema": _struct(fact.lines, schemas)}
    if fact.text:
        content[fact.text] = {"schema": {"type": "string"}}
    answer: dict[str, Any] = {"description": "The answer"}
    operation["responses"] = {str(fact.status): {**answer, "content": content} if content else answer}
    error = {"application/json": {"schema": _struct(fact.errors, schemas)}}
    for status, why in _errors(fact):
        operation["responses"][str(status)] = {"description": why, "content": error}


def _form(body: dict[str, Any], file: str) -> dict[str, Any]:
    """Returns the schema of a form with the fields of a body and a file."""
    fields = {**body["properties"], file: {"type": "string", "format": "binary"}}
    return {**body, "properties": fields, "required": [*body.get("required", ()), file]}


def _event(data: dict[str, Any]) -> dict[str, Any]:
    """Returns a stream's schema, which is that of each event (OpenAPI 3.2 will call it itemSchema)."""
    text = {"type": "string", "contentMediaType": "application/json", "contentSchema": data}
    either = {"anyOf": [text, {"type": "string", "const": "[DONE]"}]}
    return {"type": "object", "properties": {"event": {"type": "string"}, "data": either}, "required": ["data"]}


def _errors(fact: RouteDocs) -> Iterable[tuple[int, str]]:
    found = [(status, why) for status, why in ERRORS.items() if fact.body is not None or status in _WITHOUT_BODY]
    if fact.file:
        found.append((507, "The server's disk is full"))
    return [*found, (409, "It cannot be, as things are now")] if fact.conflict else found


def _struct(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """A reference to it; it and what it holds become components."""
    [out], components = msgspec.json.schema_components([kind], ref_template=_REF + "{name}")
    schemas.update(components)
    return dict(out)
