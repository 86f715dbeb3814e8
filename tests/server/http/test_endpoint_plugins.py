"""Endpoint plug-ins of installed packages: their routes, and what is written where one cannot be used."""

from pathlib import Path

import pytest

from quintet.common import plugins
from quintet.server.config import ServerConfig
from quintet.server.http.app import make_app
from quintet.server.http.app_state import AppState
from quintet.server.http.endpoint_plugins import GROUPS, init_endpoint_plugins
from tests.server.fakes import FakeBackend
from tests.server.http.serving import client

ROUTES = """
from fastapi import APIRouter, Request

class Greeting:
    name, required_tasks = "greeting", ("generate",)

    def attach_router(self, app):
        router = APIRouter()

        @router.get("/greeting")
        async def greeting(request: Request):
            return {"greets": request.app.state.greeted}

        @router.get("/version")
        async def version():
            return {"version": "of the plug-in"}

        app.include_router(router)

    async def init_state(self, engine_client, state, args):
        state.greeted = [engine_client.model_info.model, args.port]

class Bare:
    pass

class Broken:
    def attach_router(self, app):
        raise OSError("no disk")

    async def init_state(self, engine_client, state, args):
        raise OSError("no net")

class Late(Broken):
    def attach_router(self, app):
        pass

def unmade():
    raise RuntimeError("two\\nlines")
"""


@pytest.fixture(params=GROUPS)
def installed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package on the path, which names them in one of the groups."""
    names = ("greeting:Greeting", "bare:Bare", "broken:Broken", "late:Late", "unmade:unmade", "lost:Lost")
    points = [f"{name} = greeting_plugin:{kind}" for name, kind in (each.split(":") for each in names)]
    folder = tmp_path / "greeting-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[{request.param}]\n" + "\n".join(points) + "\n")
    (tmp_path / "greeting_plugin.py").write_text(ROUTES)
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins._read_entry_points.cache_clear()


@pytest.mark.usefixtures("installed")
async def test_routes_come_before_the_servers_own_and_behind_its_keys() -> None:
    async with client(endpoint_plugins=("greeting",), api_key=("sesame",)) as http:
        keyed = {"authorization": "Bearer sesame"}
        assert (await http.get("/greeting")).status_code == 401
        app = http._transport.app  # type: ignore[attr-defined]
        await init_endpoint_plugins(app)
        assert (await http.get("/greeting", headers=keyed)).json() == {"greets": ["fake/model", 8000]}
        assert (await http.get("/version", headers=keyed)).json() == {"version": "of the plug-in"}
        assert (await http.get("/v1/models", headers=keyed)).json()["data"], "its other routes are the server's"
        assert "/greeting" in (await http.get("/openapi.json", headers=keyed)).json()["paths"]


@pytest.mark.usefixtures("installed")
async def test_one_that_is_not_named_is_not_loaded() -> None:
    async with client() as http:
        assert (await http.get("/greeting")).status_code == 404


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("greting", "unknown endpoint plug-in 'greting'; did you mean 'greeting'\\?; install the package"),
        ("bare", "'bare' has no attach_router and no init_state; it must have"),
        ("broken", "'Broken' cannot attach its routes: OSError: no disk; mend the package"),
        ("unmade", "'unmade' cannot be made: RuntimeError: two lines; mend the package"),
        ("lost", "'lost' cannot be made: AttributeError"),
    ],
)
def test_one_that_cannot_be_used_ends_the_start_in_one_line(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as raised:
        make_app(AppState(FakeBackend(), ServerConfig(endpoint_plugins=(name,))))
    assert "\n" not in str(raised.value)


@pytest.mark.usefixtures("installed")
async def test_one_whose_state_fails_ends_the_start() -> None:
    app = make_app(AppState(FakeBackend(), ServerConfig(endpoint_plugins=("late",))))
    with pytest.raises(ValueError, match="'Late' cannot prepare its state: OSError: no net"):
        await init_endpoint_plugins(app)


def test_none_is_installed() -> None:
    with pytest.raises(ValueError, match="no endpoint plug-in 'x' is installed; install the package"):
        make_app(AppState(FakeBackend(), ServerConfig(endpoint_plugins=("x",))))
