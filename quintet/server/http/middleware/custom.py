"""Custom middlewares of the operator: loaded at process start, so that errors appear then."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any, cast

from fastapi import FastAPI
from starlette.middleware.base import BaseHTTPMiddleware

_FORMS = "a class that takes the app, as ASGI's do, or an async function of (request, call_next)"


def load_middlewares(names: tuple[str, ...]) -> list[Any]:
    """Imports "package.module.Name" or "package.module:Name". Raises ValueError with the wrong name and a remedy."""
    return [_check_middleware(_load(name), name) for name in names]


def add_middlewares(app: FastAPI, found: list[Any]) -> None:
    """Adds the middlewares; the last is the outermost of them, as in vLLM."""
    for each in found:
        if isinstance(each, type):
            app.add_middleware(cast(Any, each))
        else:
            app.add_middleware(BaseHTTPMiddleware, dispatch=each)


def build_middlewares(app: FastAPI, names: tuple[str, ...]) -> None:
    """Builds the middlewares now instead of at the first request. Raises ValueError if one fails."""
    if not names:
        return
    try:
        app.middleware_stack = app.build_middleware_stack()
    except Exception as error:  # any error of the operator's code
        raise _load_error(", ".join(names), "cannot be made", error, f"a middleware is {_FORMS}") from error


def _load(name: str) -> Any:
    module, colon, path = name.partition(":")
    if not colon:
        module, _, path = name.rpartition(".")
    if not module or not path:
        raise ValueError(f"middleware {name!r} names no module; write package.module.Name")
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:  # an import runs the operator's code, which may raise anything
        remedy = "put the folder of your modules onto PYTHONPATH; the working directory is not searched"
        if not isinstance(error, ModuleNotFoundError):
            remedy = "mend that module, or leave it out"
        raise _load_error(name, "cannot be imported", error, remedy) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise ValueError(f"middleware {name!r}: {module} has no {part!r}; name what is there")
        found = getattr(found, part)
    return found


def _load_error(name: str, what: str, error: Exception, remedy: str) -> ValueError:
    message = " ".join(str(error).split())  # one line
    return ValueError(f"middleware {name!r} {what}: {type(error).__name__}: {message}; {remedy}")


def _check_middleware(found: Any, name: str) -> type | Callable[..., Any]:
    if inspect.isclass(found) or inspect.iscoroutinefunction(found):
        return found
    raise ValueError(f"middleware {name!r} is {type(found).__name__}, and must be {_FORMS}")
