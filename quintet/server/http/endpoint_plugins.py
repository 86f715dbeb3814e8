"""Endpoint plug-ins: routes of installed packages beside the server's own, with vLLM's interface.

A package names a function (or class) that makes its plug-in in the entry-point group `quintet.endpoint_plugins`, or in
vLLM's `vllm.endpoint_plugins`; `--endpoint-plugins` names those that a server has. None is loaded that is not named.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from fastapi import FastAPI
from starlette.datastructures import State

from quintet.common.plugins import entry_points
from quintet.common.suggestions import unknown_name_error
from quintet.server.backend import Backend
from quintet.server.config import ServerConfig

GROUPS = ("quintet.endpoint_plugins", "vllm.endpoint_plugins")
METHODS = ("attach_router", "init_state")


class EndpointPlugin(Protocol):
    """Interface of what an entry point makes, in each API process. vLLM's `name` and `required_tasks` are not read: the
    operator names a plug-in for the model that it is for."""

    def attach_router(self, app: FastAPI) -> None:
        """Adds its routes; a route goes before one of the server's with the same path and method."""
        ...

    async def init_state(self, engine_client: Backend, state: State, args: ServerConfig) -> None:
        """Prepares what its routes need, before the first request; the model may still be loading
        (`engine_client.unavailable_reason()`). `state` is `app.state`."""
        ...


def load_endpoint_plugins(names: Sequence[str]) -> list[EndpointPlugin]:
    """Makes the named plug-ins. ValueError says why one cannot be had."""
    return [_load(name) for name in names]


def attach_endpoint_plugins(app: FastAPI, plugins: Sequence[EndpointPlugin]) -> None:
    """Adds the routes of the plug-ins, before all others."""
    app.state.endpoint_plugins = plugins
    own = list(app.router.routes)
    for plugin in plugins:
        try:
            plugin.attach_router(app)
        except Exception as error:  # a package's own code
            raise _failure(type(plugin).__name__, "attach its routes", error) from error
    app.router.routes[:] = [*(route for route in app.router.routes if route not in own), *own]


async def init_endpoint_plugins(app: FastAPI) -> None:
    """Calls each plug-in's init_state. ValueError names the one that fails."""
    service = app.state.service
    for plugin in app.state.endpoint_plugins:
        try:
            await plugin.init_state(service.backend, app.state, service.settings)
        except Exception as error:  # a package's own code
            raise _failure(type(plugin).__name__, "prepare its state", error) from error


def _load(name: str) -> EndpointPlugin:
    points = {point.name: point for group in reversed(GROUPS) for point in entry_points(group)}
    if name not in points:
        known = unknown_name_error("endpoint plug-in", name, points)
        if not points:
            known = f"no endpoint plug-in {name!r} is installed"
        raise ValueError(f"{known}; install the package that brings it, or leave it out of --endpoint-plugins")
    try:
        made: Any = points[name].load()()
    except Exception as error:  # a package's own code
        raise _failure(name, "be made", error) from error
    lacking = [each for each in METHODS if not callable(getattr(made, each, None))]
    if lacking:
        raise ValueError(
            f"the endpoint plug-in {name!r} has no {' and no '.join(lacking)}; it must have {' and '.join(METHODS)}, "
            "as quintet.server.http.endpoint_plugins.EndpointPlugin has"
        )
    plugin: EndpointPlugin = made
    return plugin


def _failure(name: str, what: str, error: Exception) -> ValueError:
    message = " ".join(str(error).split())
    return ValueError(
        f"the endpoint plug-in {name!r} cannot {what}: {type(error).__name__}: {message}; mend the package that brings "
        "it, or leave it out of --endpoint-plugins"
    )
