"""The routes of traces over a fake engine: only where they are allowed, and never two at once."""

from tests.server.fakes import FakeBackend
from tests.server.http.serving import client


async def test_without_leave_there_are_no_such_routes() -> None:
    async with client() as http:
        for path in ("/start_profile", "/stop_profile"):
            assert (await http.post(path)).status_code == 404
        assert "/start_profile" not in (await http.get("/openapi.json")).json()["paths"]


async def test_a_trace_is_begun_and_ended_and_its_file_is_named() -> None:
    backend = FakeBackend()
    async with client(backend, profiles=True) as http:
        assert (await http.post("/start_profile")).json() == {"status": "tracing"} and backend.trace_control.running
        again = await http.post("/start_profile")
        assert again.status_code == 409 and again.json()["error"]["code"] == "cannot_trace"
        assert "a trace runs already" in again.json()["error"]["message"]
        found = await http.post("/stop_profile")
        assert found.json() == {"file": "a.json.gz", "steps": 3, "ended": "it was stopped"}
        none = await http.post("/stop_profile")
        assert none.status_code == 409 and "no trace runs" in none.json()["error"]["message"]
